"""Energy counters of the machine's processors and memory (RAPL), where they may be read.

Linux shows them under `/sys/class/powercap`, for AMD's processors under the same names; most
systems let only root read them. They count the whole machine, whoever uses it.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

POWERCAP = Path("/sys/class/powercap")
_PACKAGE = re.compile(r"(intel|amd)-rapl:\d+$")  # `intel-rapl-mmio:0` counts the same package again
_PART = re.compile(r"(intel|amd)-rapl:\d+:\d+$")
_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of `/proc/stat` that are work: user, nice, system, irq, softirq, steal."""


class Rapl:
    """A machine whose counters cannot be read."""

    def read_j(self) -> dict[str, float]:
        """Returns joules since this was made, by kind: `cpu` (all packages), `dram`; what is known."""
        return {}


@dataclass(slots=True)
class _Zone:
    """One counter, which starts again at 0 after `range_uj`."""

    kind: str
    file: Path
    range_uj: int
    last_uj: int
    total_uj: int = field(default=0)

    def advance(self) -> None:
        """Adds what was counted since the last call, in which it wrapped around at most once."""
        now_uj = int(self.file.read_text(encoding="ascii"))
        self.total_uj += (now_uj - self.last_uj) % (self.range_uj + 1)
        self.last_uj = now_uj


class PowercapRapl(Rapl):
    """The counters of this machine.

    A package's counter wraps around after minutes (262 kJ at 200 W: 22). It must be read more
    often than that: the sampling thread does, and every checkpoint.
    """

    def __init__(self, zones: list[_Zone]) -> None:
        self._zones = zones
        self._lock = threading.Lock()
        self._lost: set[str] = set()

    @override
    def read_j(self) -> dict[str, float]:
        """A kind whose counter has disappeared is left out for good."""
        with self._lock:
            for zone in self._zones:
                try:
                    zone.advance()
                except (OSError, ValueError):
                    self._lost.add(zone.kind)
            totals: dict[str, float] = {}
            for zone in self._zones:
                if zone.kind not in self._lost:
                    totals[zone.kind] = totals.get(zone.kind, 0.0) + zone.total_uj / 1e6
        return totals


def find_rapl(root: Path = POWERCAP) -> Rapl:
    """Returns the machine's counters; the null form where there are none or they may not be read."""
    zones = []
    try:
        entries = sorted(root.iterdir())
    except OSError:
        return Rapl()
    for entry in entries:
        if not (_PACKAGE.match(entry.name) or _PART.match(entry.name)):
            continue
        with contextlib.suppress(OSError, ValueError):
            name = (entry / "name").read_text(encoding="ascii").strip()
            if _PACKAGE.match(entry.name) and name.startswith("package"):
                kind = "cpu"
            elif name == "dram":
                kind = "dram"
            else:
                continue  # cores and graphics are parts of the package, psys is more than both
            file = entry / "energy_uj"
            limit_uj = int((entry / "max_energy_range_uj").read_text(encoding="ascii"))
            zones.append(_Zone(kind, file, limit_uj, int(file.read_text(encoding="ascii"))))
    return PowercapRapl(zones) if zones else Rapl()


def machine_cpu_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Returns CPU seconds of all processes of the machine; None where they are not known."""
    try:
        fields = stat.read_text(encoding="ascii").splitlines()[0].split()[1:]
        return sum(int(fields[column]) for column in _BUSY) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def machine() -> str:
    """Returns the same for all processes of one machine until it boots again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename
