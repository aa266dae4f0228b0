"""Threads that check documents, apart from those that answer reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

HEAVY_AT_A_TIME = 2
"""Large documents that are checked at a time: each takes a share of the interpreter from every read."""
LOOKS_AT_A_TIME = 2
"""Small documents whose data are read at a time."""

Result = TypeVar("Result")


class Checks:
    """The checks of one application; used from its event loop only."""

    def __init__(self) -> None:
        self._light = ThreadPoolExecutor(1, thread_name_prefix="light-checks")
        self._looks = ThreadPoolExecutor(LOOKS_AT_A_TIME, thread_name_prefix="looks")
        self._heavy = ThreadPoolExecutor(HEAVY_AT_A_TIME, thread_name_prefix="checks")

    async def light(self, check: Callable[[], Result]) -> Result:
        """Runs what takes milliseconds; never waits for what takes longer."""
        return await asyncio.get_running_loop().run_in_executor(self._light, check)

    async def look(self, check: Callable[[], Result]) -> Result:
        """Runs a small check that reads data; waits for disks, and never for large documents."""
        return await asyncio.get_running_loop().run_in_executor(self._looks, check)

    async def heavy(self, check: Callable[[], Result]) -> Result:
        """Runs what may take seconds; waits until one of few threads is free."""
        return await asyncio.get_running_loop().run_in_executor(self._heavy, check)

    def close(self) -> None:
        """Lets running checks end; those that wait are given up."""
        for pool in (self._light, self._looks, self._heavy):
            pool.shutdown(wait=False, cancel_futures=True)
