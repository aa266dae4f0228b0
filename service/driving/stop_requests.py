"""Requests to stop runs, sent to their workers through the experiment's actor.

A call to the actor can fail, and a killed actor restarts empty: requests are sent until acknowledged, and
repeated from time to time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping

from trainers.reporting import StopReason

PASS_ON_S = 0.2
"""How often it is checked whether anything has to be sent."""
REPEAT_S = 1.0
"""How often the same is sent again, and how long a call that failed is waited with."""


class StopRequests:
    """Current requests of people, the search and the scheduler; thread-safe.

    Args:
        send: replaces the actor's requests: a reason to stop all runs, and reasons by (run, attempt number);
            raises if the actor does not respond.
    """

    def __init__(
        self,
        send: Callable[[StopReason | None, Mapping[tuple[int, int], StopReason]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self._clock = send, clock
        self._lock = threading.Lock()
        self._everything: StopReason | None = None
        self._cancelled: frozenset[tuple[int, int]] = frozenset()
        self._early: frozenset[tuple[int, int]] = frozenset()
        self._preempted: frozenset[tuple[int, int]] = frozenset()
        self._sent: tuple[StopReason | None, Mapping[tuple[int, int], StopReason]] | None = None
        self._due_s = float("-inf")

    def ask(self, everything: StopReason | None, cancelled: Iterable[tuple[int, int]]) -> None:
        """Replaces people's requests: a reason to stop all runs, and attempts to cancel."""
        with self._lock:
            self._everything, self._cancelled = everything, frozenset(cancelled)

    def stop_early(self, attempts: Iterable[tuple[int, int]]) -> None:
        """Replaces the attempts to end early."""
        with self._lock:
            self._early = frozenset(attempts)

    def preempt(self, attempts: Iterable[tuple[int, int]]) -> None:
        """Replaces the attempts that give their devices back and continue later."""
        with self._lock:
            self._preempted = frozenset(attempts)

    def pass_on(self) -> None:
        """Sends requests that are new or were sent a while ago; called by one thread.

        What `send` raises is passed on, and the next call sends them again.
        """
        with self._lock:
            attempts = dict.fromkeys(self._preempted, StopReason.preempted)
            attempts |= dict.fromkeys(self._early, StopReason.early_stop)
            attempts |= dict.fromkeys(self._cancelled, StopReason.cancel)
            wanted = self._everything, attempts
        now = self._clock()
        if now < self._due_s and wanted == self._sent:
            return
        self._sent, self._due_s = wanted, now + REPEAT_S  # Failed or not, the same is sent again by then.
        self._send(*wanted)
