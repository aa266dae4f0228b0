"""Whether somebody else uses the device of a run while it prepares: that would be measured as the run's.

Somebody else is every process outside this cluster's own: the processes under the Ray node of this worker
are its neighbours by permission of the queue. On a CPU the machine's use over the time of preparation counts,
without that of our own processes; on a GPU the processes that NVML names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainers.telemetry.rapl import machine_cpu_s

OTHERS_SHARE = 0.2
"""Share of the machine's CPUs from which on the use by others is said."""
SHORTEST_S = 0.25
"""Times are counted in hundredths of a second: a shorter look says nothing."""
OTHER_PIDS = "gpu_other_pids"
"""Fact of a run: processes on its GPU beside the worker; absent where NVML does not say."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process: who started it, and the CPU time that it has used, in s."""

    parent: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine at one moment.

    Attributes:
        at_s: a clock that only grows, in s.
        busy_s: CPU time of all processes since it started; None = the system does not say.
        cpus: how many it has.
        processes: by number.
    """

    at_s: float
    busy_s: float | None
    cpus: int
    processes: Mapping[int, Process] = field(default_factory=dict)

    def under(self, root: int) -> frozenset[int]:
        """A process and all that it has started, over any number of steps."""
        children: dict[int, list[int]] = {}
        for pid, process in self.processes.items():
            children.setdefault(process.parent, []).append(pid)
        found, waiting = {root}, [root]
        while waiting:
            fresh = [pid for pid in children.get(waiting.pop(), ()) if pid not in found]
            found.update(fresh)
            waiting += fresh
        return frozenset(found)


def look(proc: Path = Path("/proc")) -> Machine:
    """The machine now; without processes where there is no such folder."""
    ticks = os.sysconf("SC_CLK_TCK")
    processes: dict[int, Process] = {}
    for entry in proc.glob("[0-9]*/stat"):
        try:
            # The name stands in brackets and may hold anything, brackets too.
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            processes[int(entry.parent.name)] = Process(
                int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks
            )
        except (OSError, ValueError, IndexError):
            continue  # It has ended since it was listed.
    return Machine(time.monotonic(), machine_cpu_s(proc / "stat"), os.cpu_count() or 1, processes)


class Neighbours:
    """Looks at the machine when a run begins to prepare, and again when it is about to train.

    Args:
        device: torch device type of the run.
        root: process under which everything is our own; None = the one that started this.
        look: the machine now; tests have another.
    """

    def __init__(self, device: str, *, root: int | None = None, look: Callable[[], Machine] = look) -> None:
        self._device, self._look = device, look
        self._root = os.getppid() if root is None else root
        self._before = look()

    def found(self, facts: Mapping[str, Any]) -> str | None:
        """Who else uses the device, in one line; None = nobody, or it cannot be told.

        Args:
            facts: what the worker found out about itself.
        """
        if self._device == "cuda":
            return self._on_gpu(facts.get(OTHER_PIDS))
        return self._on_cpu(self._look())

    def _on_cpu(self, now: Machine) -> str | None:
        before, window_s = self._before, now.at_s - self._before.at_s
        if now.busy_s is None or before.busy_s is None or window_s < SHORTEST_S:
            return None
        ours = now.under(self._root) | before.under(self._root)
        mine_s = sum(
            process.cpu_s - (before.processes[pid].cpu_s if pid in before.processes else 0.0)
            for pid, process in now.processes.items()
            if pid in ours
        )
        others = (now.busy_s - before.busy_s - mine_s) / window_s
        if others <= OTHERS_SHARE * now.cpus:
            return None
        return (
            f"somebody else used {others:.1f} of the machine's {now.cpus} CPUs while the run prepared; "
            "its times hold that too"
        )

    def _on_gpu(self, others: Sequence[int] | None) -> str | None:
        if not others:
            return None
        ours = self._look().under(self._root)
        strange = sorted(set(others) - ours)
        if not strange:
            return None
        shown = ", ".join(map(str, strange[:5])) + (", ..." if len(strange) > 5 else "")
        return (
            f"{len(strange)} process{'es' * (len(strange) != 1)} of somebody else on the GPU "
            f"(number {shown}); the run's times hold theirs too"
        )
