"""Applications over real HTTP, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from fastapi import FastAPI

from api.server import BoundedProtocol
from api.stream import Streams

_STARTED_WITHIN_S, _ENDED_WITHIN_S = 30.0, 2.0


class _Server(uvicorn.Server):
    """Ends when it is told to: uvicorn looks for that every 0.1 s, and then waits as long again."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready, self._ending = threading.Event(), asyncio.Event()

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self.on_tick(0)
        self.ready.set()
        await self._ending.wait()

    def end(self, streams: Streams) -> None:
        for last in (streams.close, self._ending.set):
            self._loop.call_soon_threadsafe(last)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await asyncio.sleep(0)  # The connection that was accepted last is made.
        with suppress(TimeoutError):
            async with asyncio.timeout(_ENDED_WITHIN_S):
                while self._hang_up() or self.server_state.tasks:
                    await asyncio.sleep(0.002)
        for task in self.server_state.tasks:
            task.cancel()
        while self._hang_up(at_once=True):
            await asyncio.sleep(0.002)
        await self.lifespan.shutdown()

    def _hang_up(self, *, at_once: bool = False) -> bool:
        """Ends connections, unanswered ones only `at_once`; False: none is left to the loop, which ends."""
        for connection in list(self.server_state.connections):
            connection.transport.abort() if at_once else connection.shutdown()
        return bool(self.server_state.connections)


@contextmanager
def serving(app: FastAPI, port: int = 0) -> Iterator[str]:
    """Serves an application on a port, 0 = a free one; gives its base URL."""
    config = uvicorn.Config(app, http=BoundedProtocol, log_config=None, lifespan="on", ws="none")
    server = _Server(config)
    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        assert server.ready.wait(_STARTED_WITHIN_S), "the server has not started"
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.end(app.state.streams)
            thread.join(10)
