"""Who else uses a run's node while it is measured, which affects the run's times.

A thread of the worker looks every few seconds. Use is counted by kind: `foreign` (outside the cluster),
`other_experiment` and `same_experiment`; processes of Ray and of this service do not count. On a GPU, any
other process on the same device counts, busy or not.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.domain.neighbours import Neighbour, of_cpus, of_time
from service.recording.mailbox import WorkerAddress
from service.recording.outages import Repeated
from trainers.device_kinds import DEVICE_KINDS
from trainers.reporting import Measurement, Provenance
from trainers.telemetry.sampling import machine_cpu_s

logger = logging.getLogger(__name__)

MARK = "STILLHOUSE_EXPERIMENT"
"""Environment variable of an experiment's processes; its value is that of `mark_of`."""
SERVICE = "service"  # Owner of the processes of Ray and of this service, which belong to no experiment

_SETTLED_S = 10.0  # Age from which a process is what it seems: Ray starts a worker, then replaces its program
_RECHECK_LOOKS = 60  # Looks after which foreign processes are read again: others may have their numbers
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
    b"python -m service.",
)  # fmt: skip
_RELAY = b"ray::Relay"
"""The actor that passes reports on: the service's, although it has the mark of an experiment."""
_SCRIPT = b"stillhouse"
OTHERS_SHARE = 0.2  # Share of the machine's CPUs above which use by others is noticeable
LOOK_S = 5.0  # Time between two looks
SHORTEST_S = 0.25  # CPU time is counted in hundredths of a second: a window shorter than this is not judged
_LEAST_REPORTED_S, _REPORTED_SHARE = 30.0, 0.1
"""A measurement covers at least this time, and this share of the time reported before it: a run of a week
has about a hundred."""


def mark_of(cluster: str, experiment_id: int) -> str:
    """Returns the value of `MARK`; two clusters on a machine can have experiments of one id."""
    return f"{cluster}/{experiment_id}"


@dataclass(frozen=True, slots=True)
class Process:
    parent: int
    started: int  # Clock ticks since the machine started; distinguishes processes that reuse a number
    cpu_s: float
    reaped_s: float = 0.0  # CPU time of its ended children
    owner: str | None = None  # Mark of its experiment, or `SERVICE`; None = foreign


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine at one moment."""

    at_s: float  # Monotonic
    busy_s: float | None  # CPU time of all processes since the machine started; None = unknown
    cpus: int
    processes: Mapping[int, Process] = field(default_factory=dict)  # Known foreign ones may be missing

    def under(self, roots: Iterable[int]) -> frozenset[int]:
        children: defaultdict[int, list[int]] = defaultdict(list)
        for pid, process in self.processes.items():
            children[process.parent].append(pid)
        family = set(roots)
        waiting = list(family)
        while waiting:
            fresh = [pid for pid in children[waiting.pop()] if pid not in family]
            family.update(fresh)
            waiting += fresh
        return frozenset(family)


class ProcessTable:
    """Takes snapshots of the machine from /proc, and reads only what it does not know yet.

    Ray gives every process of an experiment an environment variable (`MARK`), which its children inherit, so
    that a process belongs to its experiment from the start, imports included. Processes of Ray and of this
    service are recognized by their command lines. Everything else is foreign and not read: its CPU time is
    what remains of the machine's total.
    """

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
        processes = {pid: self._read(pid) for pid in pids}
        return {pid: process.owner if process else None for pid, process in processes.items()}

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
                return SERVICE if title.startswith(_RELAY) else value.decode(errors="replace")
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


def kind_of(owner: str | None, mark: str) -> Neighbour | None:
    """Returns the relation of a process to a run of the experiment with `mark`; None = not a neighbour."""
    if owner == SERVICE:
        return None
    if owner is None:
        return Neighbour.foreign
    if owner == mark:
        return Neighbour.same_experiment
    same_cluster = not mark or owner.rpartition("/")[0] == mark.rpartition("/")[0]
    return Neighbour.other_experiment if same_cluster else Neighbour.foreign


def cpu_by_kind(
    before: Machine, after: Machine, mark: str, roots: Collection[int]
) -> dict[Neighbour, float] | None:
    """Returns others' CPU seconds, `roots` and their descendants left out; None = they are not counted."""
    if before.busy_s is None or after.busy_s is None:
        return None
    ours = before.under(roots) | after.under(roots)
    used = dict.fromkeys(Neighbour, 0.0)
    known_s = 0.0
    for owner, mine, seconds in _spent(before, after, ours):
        kind = None if mine else kind_of(owner, mark)
        if kind is not Neighbour.foreign:
            known_s += seconds
        if kind is not None and kind is not Neighbour.foreign:
            used[kind] += seconds
    # What runs outside the cluster is not listed one by one: it is what is left, kernel and all.
    used[Neighbour.foreign] = max(0.0, after.busy_s - before.busy_s - known_s)
    return used


def _spent(before: Machine, after: Machine, ours: frozenset[int]) -> Iterable[tuple[str | None, bool, float]]:
    """Yields CPU time as (owner, whether the run's own, seconds), also of processes that ended meanwhile."""

    def same(pid: int) -> Process | None:
        was = before.processes.get(pid)
        now = after.processes.get(pid)
        return was if was is not None and now is not None and was.started == now.started else None

    gone: defaultdict[int, list[tuple[int, Process]]] = defaultdict(list)
    for pid, process in before.processes.items():
        if same(pid) is None:
            gone[process.parent].append((pid, process))
    for pid, process in after.processes.items():
        if process.owner is None and pid not in ours:
            continue
        was = same(pid)
        yield process.owner, pid in ours, process.cpu_s - (was.cpu_s if was else 0.0)
        # A parent is told the whole time of a child that ended: what it had used before is no news.
        ended = gone[pid]
        reaped_s = process.reaped_s - (was.reaped_s if was else 0.0)
        fresh_s = reaped_s - sum(child.cpu_s + child.reaped_s for _, child in ended)
        if fresh_s > 0.0:
            child_pid, child = max(ended, key=lambda of: of[1].cpu_s, default=(pid, process))
            yield child.owner, child_pid in ours, fresh_s


@dataclass(slots=True)
class Company:
    """Neighbours over some time: how long they used the node noticeably, and how much of its CPU time.

    `used` is CPU time / all CPU time of the machine, times `time_s`.
    """

    time_s: float = 0.0
    noticed_s: dict[Neighbour, float] = field(default_factory=lambda: dict.fromkeys(Neighbour, 0.0))
    used: dict[Neighbour, float] = field(default_factory=lambda: dict.fromkeys(Neighbour, 0.0))

    def add(
        self, window_s: float, cpus: int, cpu_s: Mapping[Neighbour, float], on_device: Collection[Neighbour]
    ) -> None:
        self.time_s += window_s
        for kind in Neighbour:
            if kind in on_device or cpu_s[kind] > OTHERS_SHARE * cpus * window_s:
                self.noticed_s[kind] += window_s
            self.used[kind] += cpu_s[kind] / cpus

    def measurements(self, scope: str, end_s: float) -> list[Measurement]:
        """Returns two per kind: share of the time, and mean share of the CPUs."""
        measurements = []
        for kind in Neighbour:
            for name, seconds in ((of_time(kind), self.noticed_s[kind]), (of_cpus(kind), self.used[kind])):
                share = min(100.0, 100.0 * seconds / self.time_s)
                begin_s = end_s - self.time_s
                measurements.append(Measurement(name, share, "%", Provenance.sampled, scope, begin_s, end_s))
        return measurements


class NeighbourWatch:
    """Watches the node in a thread during an attempt; `roots` are the run's workers on this machine."""

    def __init__(
        self,
        report: Callable[[Sequence[Measurement]], None],
        device: str,
        *,
        roots: Collection[int],
        mark: str | None = None,
        every_s: float = LOOK_S,
    ) -> None:
        self._report = report
        self._roots = frozenset(roots)
        self._mark = os.environ.get(MARK, "") if mark is None else mark
        self._table = _table()
        self._gpus = _Gpus() if DEVICE_KINDS[device].nvml else None
        self._scope = f"host:{socket.gethostname()}"
        self._company, self._reported_s = Company(), 0.0
        self._before = self._table.look()
        self._repeated = Repeated(self._step, every_s, "neighbours")
        self._repeated.start()

    def close(self) -> None:
        """Takes a last look and reports the rest."""
        self._repeated.stop()
        self._advance()
        self._say()

    def _step(self) -> None:
        self._advance()
        if self._company.time_s >= max(_LEAST_REPORTED_S, _REPORTED_SHARE * self._reported_s):
            self._say()

    def _advance(self) -> None:
        now = self._table.look()
        window_s = now.at_s - self._before.at_s
        if window_s < SHORTEST_S:
            return
        cpu_s = cpu_by_kind(self._before, now, self._mark, self._roots)
        on_device = self._on_device(now)
        self._before = now
        if cpu_s is not None:
            self._company.add(window_s, now.cpus, cpu_s, on_device)

    def _on_device(self, now: Machine) -> set[Neighbour]:
        if self._gpus is None:
            return set()
        ours = now.under(self._roots)
        others = self._gpus.pids_beside(ours)
        kinds = (kind_of(owner, self._mark) for owner in self._table.owners(others).values())
        return {kind for kind in kinds if kind is not None}

    def _say(self) -> None:
        if self._company.time_s > 0.0:
            self._reported_s += self._company.time_s
            self._report(self._company.measurements(self._scope, time.time()))
            self._company = Company()


def watcher(
    report: Callable[[Sequence[Measurement]], None], device: str, rank: int, workers: Sequence[WorkerAddress]
) -> NeighbourWatch | None:
    """Returns a worker's watch, or None: only the first worker of a group on each machine has one."""
    if not workers:
        return NeighbourWatch(report, device, roots=[os.getpid()])
    here = [worker for worker in workers if worker.host == workers[rank].host]
    if min(worker.rank for worker in here) != rank:
        return None
    return NeighbourWatch(report, device, roots=[worker.pid for worker in here])


@functools.cache
def _table() -> ProcessTable:
    """One table for all runs of this process: finding the owners of processes is the expensive part."""
    return ProcessTable()


class _Gpus:
    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            logger.info("NVML does not list the processes on the GPU: %s", error)
            return
        self._nvml = pynvml

    def pids_beside(self, ours: Collection[int]) -> set[int]:
        """Returns other processes on the GPUs that one of ours computes on; none if NVML renumbers them."""
        others: set[int] = set()
        if self._nvml is None:
            return others
        try:
            for index in range(self._nvml.nvmlDeviceGetCount()):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                running = {of.pid for of in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
                if not running.isdisjoint(ours):
                    others |= running - set(ours)
        except self._nvml.NVMLError as error:
            logger.info("NVML no longer lists the processes on the GPU: %s", error)
            self._nvml = None
        return others
