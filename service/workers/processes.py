"""The processes on this machine with their owners at one moment, read from /proc.

Ray gives every process of an experiment an environment variable (`MARK`), which its children inherit, so that
a process belongs to its experiment from the start, imports included. Processes of Ray and of this service are
recognized by their command lines. Everything else is foreign and not read: its CPU time is what remains of
the machine's total.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainers.telemetry.sampling import machine_cpu_s

MARK = "STILLHOUSE_EXPERIMENT"
"""Environment variable of an experiment's processes; its value is that of `mark_of`."""
SERVICE = "service"
"""Owner of the processes of Ray and of this service, which belong to no experiment."""

_SETTLED_S = 10.0
"""Age from which a process is taken for what it is: Ray starts a worker and then replaces its program."""
_RECHECK_LOOKS = 60
"""Looks after which foreign processes are read again: their numbers may have passed to others."""
_LONGEST_READ = 1 << 17
_RAY_PARTS = (
    b"/ray/core/src/ray/",
    b"/ray/dashboard/",
    b"/ray/autoscaler/",
    b"/ray/_private/",
    b"ray.scripts",
)
_RAY_TITLES = (
    b"ray::IDLE", b"ray::DashboardAgent", b"ray::RuntimeEnvAgent", b"ray::JobSupervisor", b"ray-dashboard",
)  # fmt: skip
_EXPERIMENT_ACTOR = b"ray::ExperimentActor"
"""The actor that writes what an experiment's runs report: the service's, although it has the mark."""
_SCRIPT = b"stillhouse"


def mark_of(cluster: str, experiment_id: int) -> str:
    """Returns the value of `MARK` for an experiment.

    Args:
        cluster: address of its Ray cluster; experiments of two clusters on a machine can have the same id.
    """
    return f"{cluster}/{experiment_id}"


@dataclass(frozen=True, slots=True)
class Process:
    """One process.

    Attributes:
        started: clock ticks since the machine started; distinguishes processes that reuse a number.
        cpu_s: CPU time of its own.
        reaped_s: CPU time of its ended children.
        owner: mark of its experiment, or `SERVICE`; None = foreign.
    """

    parent: int
    started: int
    cpu_s: float
    reaped_s: float = 0.0
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine at one moment.

    Attributes:
        at_s: monotonic seconds.
        busy_s: CPU time of all processes since the machine started; None = unknown.
        processes: by number; those known to be foreign may be left out.
    """

    at_s: float
    busy_s: float | None
    cpus: int
    processes: Mapping[int, Process] = field(default_factory=dict)

    def under(self, roots: Iterable[int]) -> frozenset[int]:
        """Returns processes and all their descendants."""
        children: dict[int, list[int]] = {}
        for pid, process in self.processes.items():
            children.setdefault(process.parent, []).append(pid)
        found = set(roots)
        waiting = list(found)
        while waiting:
            fresh = [pid for pid in children.get(waiting.pop(), ()) if pid not in found]
            found.update(fresh)
            waiting += fresh
        return frozenset(found)


class ProcessTable:
    """Takes snapshots of the machine, and reads only what it does not know yet."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = str(proc)
        self._tick_hz = os.sysconf("SC_CLK_TCK")
        self._owners: dict[tuple[int, int], str | None] = {}
        self._foreign: set[int] = set()
        self._looks = 0

    def look(self) -> Machine:
        """Returns the machine now; without processes if there is no /proc."""
        if self._looks % _RECHECK_LOOKS == 0:
            self._foreign.clear()
        self._looks += 1
        pids = self._pids()
        self._foreign &= pids
        processes = {pid: process for pid in pids - self._foreign if (process := self._read(pid))}
        known = {(pid, process.started) for pid, process in processes.items()}
        self._owners = {key: owner for key, owner in self._owners.items() if key in known}
        busy_s = machine_cpu_s(Path(self._proc) / "stat")
        return Machine(time.monotonic(), busy_s, os.cpu_count() or 1, processes)

    def owners(self, pids: Collection[int]) -> dict[int, str | None]:
        """Returns owners of processes by number; None = foreign."""
        found = {pid: self._read(pid) for pid in pids}
        return {pid: process.owner if process else None for pid, process in found.items()}

    def _pids(self) -> set[int]:
        try:
            return {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        except OSError:
            return set()

    def _read(self, pid: int) -> Process | None:
        # The name stands in brackets and may hold anything, brackets too.
        fields = self._bytes(pid, "stat").rpartition(b")")[2].split()
        if len(fields) < 20:
            return None  # It has ended since it was listed.
        own = int(fields[11]) + int(fields[12])
        reaped = int(fields[13]) + int(fields[14])
        started = int(fields[19])
        key = (pid, started)
        if key in self._owners:
            owner = self._owners[key]
        else:
            owner = self._owner(pid)
            settled = time.clock_gettime(time.CLOCK_BOOTTIME) - started / self._tick_hz > _SETTLED_S
            if settled or (owner is not None and owner != SERVICE):
                self._owners[key] = owner
        if owner is None and key in self._owners:
            self._foreign.add(pid)
        return Process(int(fields[1]), started, own / self._tick_hz, reaped / self._tick_hz, owner)

    def _owner(self, pid: int) -> str | None:
        for entry in self._bytes(pid, "environ").split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == MARK.encode():
                title = self._bytes(pid, "cmdline")
                return SERVICE if title.startswith(_EXPERIMENT_ACTOR) else value.decode(errors="replace")
        return SERVICE if _is_service(self._bytes(pid, "cmdline")) else None

    def _bytes(self, pid: int, name: str) -> bytes:
        """Content of a file of a process; empty if it has ended or is another user's."""
        try:
            file = os.open(f"{self._proc}/{pid}/{name}", os.O_RDONLY)
        except OSError:
            return b""
        try:
            return os.read(file, _LONGEST_READ)
        except OSError:
            return b""
        finally:
            os.close(file)


def _is_service(command: bytes) -> bool:
    if command.startswith(_RAY_TITLES):
        return True
    words = command.split(b"\0")
    if any(part in word for word in words[:6] for part in _RAY_PARTS):
        return True
    if any(word.rpartition(b"/")[2] == _SCRIPT for word in words[:2]):
        return True
    modules = [after for word, after in itertools.pairwise(words[:6]) if word == b"-m"]
    return any(name == b"api" or name.startswith((b"service.", b"api.")) for name in modules)
