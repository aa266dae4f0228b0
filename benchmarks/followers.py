"""What live followers of one running experiment cost the API."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from contextlib import ExitStack, closing

from benchmarks.live import api_process, reporting, started
from service.config.settings import Settings
from service.store import Store

FOLLOWERS = 500
_RUNS = 4
_SECONDS = 10.0
_ANSWER_S = 60.0


def followers(settings: Settings, smoke: bool) -> dict[str, float]:
    """Follows a running experiment of four runs, each of which reports four times a second.

    Returns:
        CPU seconds of the API's process per second, over ten seconds.
    """
    count, seconds = (5, 1.0) if smoke else (FOLLOWERS, _SECONDS)
    with closing(Store.open(settings)) as store, api_process(settings) as (url, process):
        experiment_id, runs = started(store, _RUNS)
        path = f"/api/v1/experiments/{experiment_id}/stream"
        with reporting(store, runs), _Followers(url, path, count) as watching:
            before, begin = sum(process.cpu_times()[:2]), time.perf_counter()
            seen = watching.events
            time.sleep(seconds)
            took_s = time.perf_counter() - begin
            share = (sum(process.cpu_times()[:2]) - before) / took_s
            told = (watching.events - seen) / (count * took_s)
    # A second is too short to tell where other work keeps the processors.
    assert smoke or told > _RUNS, (
        f"a follower was sent {told:.1f} events a second; half a second apart are {2 * _RUNS}"
    )
    return {"followers_500_cpu_share": share}


class _Followers:
    """Clients of a stream, all read by one thread, which counts their events.

    A context: it is entered when every client has been sent something.
    """

    def __init__(self, url: str, path: str, count: int) -> None:
        self.events = 0
        address = url.removeprefix("http://")
        self._request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n".encode()
        host, port = address.split(":")
        self._address = host, int(port)
        self._count = count
        self._stop = threading.Event()
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> _Followers:
        self._thread.start()
        if not self._answered.wait(_ANSWER_S) or not self._thread.is_alive():
            self.__exit__()
            raise AssertionError(f"not every follower was answered within {_ANSWER_S:.0f} s")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        with ExitStack() as open_sockets, selectors.DefaultSelector() as selector:
            for _ in range(self._count):
                client = open_sockets.enter_context(socket.create_connection(self._address, _ANSWER_S))
                client.sendall(self._request)
                selector.register(client, selectors.EVENT_READ)
            silent = set(selector.get_map())
            while not self._stop.is_set():
                for key, _ in selector.select(0.1):
                    assert isinstance(key.fileobj, socket.socket)
                    data = key.fileobj.recv(1 << 16)
                    if not data:
                        raise ConnectionError("the API closed a stream")
                    if key.fd in silent:
                        assert data.startswith(b"HTTP/1.1 200"), data
                        silent.discard(key.fd)
                    self.events += data.count(b"event: ")
                if not silent:
                    self._answered.set()
