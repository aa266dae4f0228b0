"""Waiting times of the product, shortened so that a fault costs well under a second."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path

LEASE_S = 1.0
"""Length of a lease."""

_SHORTER = {
    "service.domain.states": {"FIRST_DELAY_S": 0.02, "LONGEST_DELAY_S": 0.3, "INFRASTRUCTURE_LIMIT": 10**6},
    "service.scheduling.scheduler": {"PASS_EVERY_S": 0.25, "LONGEST_PAUSE_S": 0.5, "LOOK_EVERY_S": 0.4},
    "service.scheduling.upkeep": {"EVERY_S": 0.3},
    "service.driving.driver": {"BEAT_S": 0.3, "JUDGE_S": 0.2, "GRACE_S": 5.0},
    "service.driving.host": {"LOOK_S": 0.1, "LEAVE_S": 1.0, "IDLE_S": 2.0},
    "service.db.sqlite": {"LONGEST_PAUSE_S": 0.004},  # Longer: many wait for two processors.
    "service.driving.choosing": {"LIST_EVERY_S": 0.3},
    "service.driving.ray_tune": {"REMIND_S": 0.2, "STORED_S": 1800.0},  # As of a checkpoint, below.
    "service.recording.recorder": {"GATHER_S": 0.02, "RETRY_S": 0.2},
    "service.recording.outages": {"RETRY_S": 0.05},
    "service.recording.relay": {"_CALL_TIMEOUT_S": 5.0, "_TAKE_S": 2.0, "_UNAVAILABLE_S": 0.05},
    # A checkpoint waits for its rows however long it takes: rows that were not acknowledged before it may be
    # lost with their worker, as documented, and no checker could tell the two apart. 20 s were too few on a
    # machine so busy that the recorder did not get its turn to write for that long.
    "service.workers.worker_attempt": {
        "POLL_S": 0.2, "GATHER_S": 0.05, "SAVING_S": 1800.0, "FENCE_S": 1800.0, "_FRESH_S": 0.05,
        "_RESEND_S": 0.05, "_FLUSH_S": 0.5,
    },
    "service.workers.trial": {"_LOOK_S": 0.05},
    "service.workers.worker_group": {
        "_LOOK_S": 0.05, "_AWAY_S": 0.05, "_LOOK_LONG_S": 0.05, "_ARRIVE_AGAIN_S": 0.2, "_END_TIMEOUT_S": 5.0,
    },
}  # fmt: skip


def shorten() -> None:
    """Apply the table to this process and all that are forked from it.

    Raises:
        AttributeError: the product has no such waiting time any more.
    """
    for name, values in _SHORTER.items():
        module = importlib.import_module(name)
        for constant, seconds in values.items():
            getattr(module, constant)
            setattr(module, constant, seconds)


class FairClock:
    """Seconds as they pass for one of many processes that share the machine.

    With twice as many runnable processes as processors a second counts half, so that a busy machine neither
    looks like one that is stuck nor gets more faults than it can carry. Looked at often: `sleep` does.
    """

    _LOOK_S = 0.05

    def __init__(self) -> None:
        self._processors = len(os.sched_getaffinity(0))
        self._looked_s = time.monotonic()
        self._now_s = 0.0

    def now(self) -> float:
        """Returns the fair seconds since the start."""
        runnable = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        looked_s = time.monotonic()
        self._now_s += (looked_s - self._looked_s) * min(1.0, self._processors / max(1, runnable))
        self._looked_s = looked_s
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Sleeps for so many fair seconds."""
        until = self.now() + seconds
        while (left := until - self.now()) > 0.0:
            time.sleep(min(self._LOOK_S, left))
