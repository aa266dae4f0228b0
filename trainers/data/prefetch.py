"""Batches made ahead of their use, by a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

AHEAD = 3
"""Steps made ahead; more only take memory."""


class Prefetcher(Generic[T]):
    """Calls `make(step)` for the steps from `start` up to `end` ahead of their use.

    Making a batch draws no random numbers, so being ahead changes nothing.
    """

    def __init__(self, make: Callable[[int], T], start: int, end: int) -> None:
        self._make = make
        self._ready: queue.Queue[T | BaseException] = queue.Queue(AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(start, end), name="stillhouse-batches", daemon=True
        )
        self._thread.start()

    def next(self) -> T:
        """Returns the next step's item, or raises what `make` raised."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _fill(self, start: int, end: int) -> None:
        try:
            for step in range(start, end):
                item = self._make(step)
                if self._closed.is_set():
                    return
                self._ready.put(item)
        except BaseException as error:
            self._ready.put(error)
