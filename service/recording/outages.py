"""Waiting and repeating while the database is unavailable."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Self, TypeVar

from service.store import StaleAttempt, StoreOutage

logger = logging.getLogger(__name__)

RETRY_S = 0.2
Result = TypeVar("Result")


def wait_out(call: Callable[[], Result], what: str) -> Result:
    """Repeats a call while the database is unavailable; every call of the store is safe to repeat."""
    while True:
        try:
            return call()
        except StoreOutage as error:
            logger.warning("the database is unavailable; %s is waiting: %s", what, error)
        time.sleep(RETRY_S)


class Repeated:
    """Calls `step` from time to time in a thread, whatever it raises; `StaleAttempt` ends the repetition."""

    def __init__(
        self,
        step: Callable[[], object],
        every_s: float,
        name: str,
        *,
        on_stale: Callable[[], None] = lambda: None,
    ) -> None:
        self._step, self._every_s, self._name, self._on_stale = step, every_s, name, on_stale
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread; the first call comes after a pause."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, after a call in progress."""
        self._over.set()
        self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self._step()
            except StaleAttempt as error:
                if not self._over.is_set():
                    logger.error("%s: %s", self._name, error)
                    self._on_stale()
                return
            except StoreOutage as error:
                logger.warning("%s: the database is unavailable, trying again: %s", self._name, error)
            except Exception:
                logger.exception("%s failed, trying again", self._name)
