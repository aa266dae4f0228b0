"""Ctrl-C, SIGTERM and a closed terminal, for commands that stay in the foreground."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class StopRequests:
    """Ctrl-C, SIGTERM and a closed terminal, as an event or as an exception.

    Attributes:
        asked: set when somebody asked.
        interrupts: True = asking raises KeyboardInterrupt at once, for work that cannot look at
            the event; asking a second time by Ctrl-C always does.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.interrupts = True

    def ask(self, number: int, _: object) -> None:
        """The signal handler."""
        again = self.asked.is_set() and number == signal.SIGINT
        self.asked.set()
        if self.interrupts or again:
            raise KeyboardInterrupt


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Take the signals that ask this process to stop, for the time of the block."""
    requests = StopRequests()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, requests.ask)
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
