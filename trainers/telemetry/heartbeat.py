"""Heartbeats, from which the next attempt measures what a killed one lost.

Next to checkpoints in a folder, each attempt has a small file: its content is when the attempt began, its
modification time when it was last known to be alive. Where checkpoints are in an object store, which has no
times of change, the next attempt is given what is on record of those before.
"""

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """`lives` are the attempts before: when each began and was last known to be alive, Unix times."""

    def __init__(self, began_s: float, lives: Sequence[tuple[float, float]] = ()) -> None:
        self._began_s, self._lives = began_s, lives

    def beat(self) -> None: ...

    def look_back(self, *, kept_until_s: float | None, submitted_s: float | None) -> TimeBefore:
        """Returns how the time before this attempt was spent; Unix times, None = no checkpoint, not known."""
        lives = [life for life in self._lives if kept_until_s is None or life[1] > kept_until_s]
        since_s = kept_until_s
        if since_s is None:
            known = [began_s for began_s, _ in lives] + ([] if submitted_s is None else [submitted_s])
            since_s = min(known, default=self._began_s)
        lost_s = sum(lost_work_s(began_s, min(seen_s, self._began_s), since_s) for began_s, seen_s in lives)
        return TimeBefore(lost_s, max(0.0, self._began_s - since_s - lost_s))


class HeartbeatFile(Heartbeat):
    """The file of this attempt. One that cannot be written loses a figure, not the run."""

    def __init__(self, folder: Path, began_s: float) -> None:
        super().__init__(began_s)
        self._folder = folder
        self._file = folder / f"{_PREFIX}{time.time_ns()}-{os.getpid()}"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            self._file.write_text(f"{began_s!r}", encoding="ascii")

    def beat(self) -> None:
        now = time.time()
        with contextlib.suppress(OSError):
            os.utime(self._file, (now, now))

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
        self._lives = lives
        return super().look_back(kept_until_s=kept_until_s, submitted_s=submitted_s)
