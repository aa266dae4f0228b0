"""What runs in the processes of an installation: the product's own entry points."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
import time
from typing import Any

import api.server
import service.driving.driver
import service.driving.host
import service.scheduling.scheduler
from service.config.settings import Settings
from service.recording.outages import wait_out
from service.recording.relay import Relay
from service.store import StoreOutage
from tests.faults.campaign import messages, ray_stand_in


def api_process(settings: Settings, listener: socket.socket) -> int:
    """The API, once the database can be used."""
    logging.basicConfig(level=logging.WARNING)
    while True:
        try:
            api.server.serve(settings, listener=listener)
            return 0
        except StoreOutage:
            time.sleep(0.05)


def scheduler(settings: Settings, node: str) -> int:
    """A scheduler, once the database can be used."""
    ray_stand_in.here.node = node
    wait_out(lambda: service.scheduling.scheduler.main(settings), "the scheduler")
    return 0


def driver(arguments: list[str], job: str, node: str) -> int:
    """The process of a job."""
    ray_stand_in.here.node, ray_stand_in.here.job = node, job
    sys.argv = ["driver", *arguments]
    return service.driving.driver.main()


def host(arguments: list[str], job: str, node: str) -> int:
    """The process of a job that carries drivers."""
    ray_stand_in.here.node, ray_stand_in.here.job = node, job
    sys.argv = ["host", *arguments]
    service.driving.host.main()
    return 0


def relay(address: str) -> int:
    """The relay of the node's drivers, which answers calls on a socket."""

    async def serve() -> None:
        served = Relay()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                size = int.from_bytes(await reader.readexactly(8), "big")
                method, given = pickle.loads(await reader.readexactly(size))
                try:
                    outcome: tuple[bool, Any] = True, await getattr(served, method)(*given)
                except Exception as error:
                    outcome = False, error
                writer.write(pickle.dumps(outcome))
                await writer.drain()
            except (OSError, asyncio.IncompleteReadError):
                pass  # The caller was killed.
            finally:
                writer.close()

        if os.path.exists(address):
            os.unlink(address)
        async with await asyncio.start_unix_server(answer, address, backlog=512) as server:
            await server.serve_forever()

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asyncio.run(serve())
    return 0


def worker(channel: socket.socket, job: str, node: str) -> int:
    """A process for one trial after the other, until its driver is gone."""
    logging.basicConfig(level=logging.WARNING)
    ray_stand_in.here.node, ray_stand_in.here.job = node, job
    ray_stand_in.here.channel = channel
    while True:
        try:
            function, parameters, config, placement = messages.receive(channel)
        except (EOFError, OSError):
            return 0
        ray_stand_in.here.placement = placement
        try:
            function(config, **parameters)
        except Exception as error:
            messages.send(channel, ("error", error))
            raise
        messages.send(channel, ("done", None))
