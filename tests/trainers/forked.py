"""Processes forked from a server that has imported torch and the trainers, so that each starts at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

LIMIT_S = 300.0


def context() -> ForkServerContext:
    """Starts processes; the first of a session's starts the server."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.trainers.preloaded"])
    return found


def workers(count: int, target: Callable[..., object], *arguments: Any) -> list[int | None]:
    """Calls a function in so many processes, its rank first; returns their exit codes."""
    processes = [context().Process(target=target, args=(rank, *arguments)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        process.kill()
    return [process.exitcode for process in processes]
