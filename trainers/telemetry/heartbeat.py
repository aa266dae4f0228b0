"""Heartbeats, from which the next attempt measures what a killed one lost.

Each attempt has a small file next to its checkpoints: its content is when the attempt began, its
modification time when it was last known to be alive.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

_PREFIX = "alive-"


@dataclass(frozen=True, slots=True)
class TimeBefore:
    """Time between the state that an attempt continues from and the attempt."""

    lost_s: float = 0.0  # Work of earlier attempts that is not in a checkpoint
    queue_s: float = 0.0  # Time in which no attempt was working


def lost_work_s(began_s: float, ended_s: float, kept_until_s: float) -> float:
    """Returns an attempt's work after its last saved state (-inf = none), which the ledger charges."""
    return max(0.0, ended_s - max(began_s, kept_until_s))


class Heartbeat:
    def beat(self) -> None: ...

    def look_back(self, *, kept_until_s: float | None, submitted_s: float | None) -> TimeBefore:
        """Returns how the time before this attempt was spent; Unix times, None = no checkpoint, not known."""
        return TimeBefore()


class HeartbeatFile(Heartbeat):
    """The file of this attempt. One that cannot be written loses a figure, not the run."""

    def __init__(self, folder: Path, began_s: float) -> None:
        self._folder, self._began_s = folder, began_s
        self._file = folder / f"{_PREFIX}{time.time_ns()}-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            self._file.write_text(f"{began_s!r}", encoding="ascii")

    @override
    def beat(self) -> None:
        now = time.time()
        with contextlib.suppress(OSError):
            os.utime(self._file, (now, now))

    @override
    def look_back(self, *, kept_until_s: float | None, submitted_s: float | None) -> TimeBefore:
        lives = []
        for file in sorted(self._folder.glob(f"{_PREFIX}*")):
            if file == self._file:
                continue
            with contextlib.suppress(OSError, ValueError):
                began_s, seen_s = float(file.read_text(encoding="ascii")), file.stat().st_mtime
                if kept_until_s is not None and seen_s <= kept_until_s:
                    file.unlink()
                else:
                    lives.append((began_s, seen_s))
        since_s = kept_until_s
        if since_s is None:
            known = [began_s for began_s, _ in lives] + ([] if submitted_s is None else [submitted_s])
            since_s = min(known, default=self._began_s)
        lost_s = sum(lost_work_s(began_s, min(seen_s, self._began_s), since_s) for began_s, seen_s in lives)
        return TimeBefore(lost_s, max(0.0, self._began_s - since_s - lost_s))
