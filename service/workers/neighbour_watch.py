"""Who else uses a run's node while it is measured, which affects the run's times.

A thread of the worker looks every few seconds. Use is counted by kind: `foreign` (outside the cluster),
`other_experiment` and `same_experiment`; processes of Ray and of this service do not count. On a GPU, any
other process on the same device counts, busy or not.
"""

from __future__ import annotations

import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from service.domain.neighbours import Neighbour, of_cpus, of_time
from service.recording.mailbox import WorkerAddress
from service.workers.processes import MARK, SERVICE, Machine, Process, ProcessTable
from trainers.device_kinds import DEVICE_KINDS
from trainers.reporting import Measurement, Provenance

logger = logging.getLogger(__name__)

OTHERS_SHARE = 0.2
"""Share of the machine's CPUs above which use by others is noticeable."""
LOOK_S = 5.0
"""Time between two looks."""
SHORTEST_S = 0.25
"""CPU time is counted in hundredths of a second: a window shorter than this is not judged."""
_LEAST_SAID_S, _SAID_SHARE = 30.0, 0.1
"""A measurement covers at least so much time and such a share of what was told before: a week's run
tells about a hundred times."""


def kind_of(owner: str | None, mark: str) -> Neighbour | None:
    """Returns the relation of a process to a run; None = not a neighbour.

    Args:
        owner: see `Process.owner`.
        mark: mark of the run's experiment; empty = unknown.
    """
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
    """Returns neighbours' CPU seconds between two snapshots; None = the system does not count them.

    Args:
        roots: the run's workers; they and their descendants are not neighbours.
    """
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

    gone: dict[int, list[tuple[int, Process]]] = {}
    for pid, process in before.processes.items():
        if same(pid) is None:
            gone.setdefault(process.parent, []).append((pid, process))
    for pid, process in after.processes.items():
        if process.owner is None and pid not in ours:
            continue
        was = same(pid)
        yield process.owner, pid in ours, process.cpu_s - (was.cpu_s if was else 0.0)
        # A parent is told the whole time of a child that ended: what it had used before is no news.
        ended = gone.get(pid, [])
        told_s = process.reaped_s - (was.reaped_s if was else 0.0)
        fresh_s = told_s - sum(child.cpu_s + child.reaped_s for _, child in ended)
        if fresh_s > 0.0:
            child_pid, child = max(ended, key=lambda of: of[1].cpu_s, default=(pid, process))
            yield child.owner, child_pid in ours, fresh_s


@dataclass(slots=True)
class Company:
    """Neighbours over some time.

    Attributes:
        noticed_s: time in which they used the node noticeably, by kind.
        used: CPU time / all CPU time of the machine, times `time_s`, by kind.
    """

    time_s: float = 0.0
    noticed_s: dict[Neighbour, float] = field(default_factory=lambda: dict.fromkeys(Neighbour, 0.0))
    used: dict[Neighbour, float] = field(default_factory=lambda: dict.fromkeys(Neighbour, 0.0))

    def add(
        self, window_s: float, cpus: int, cpu_s: Mapping[Neighbour, float], on_device: Collection[Neighbour]
    ) -> None:
        """Adds one window.

        Args:
            cpus: CPUs of the machine.
            on_device: kinds with processes on the run's GPU.
        """
        self.time_s += window_s
        for kind in Neighbour:
            if kind in on_device or cpu_s[kind] > OTHERS_SHARE * cpus * window_s:
                self.noticed_s[kind] += window_s
            self.used[kind] += cpu_s[kind] / cpus

    def measurements(self, scope: str, end_s: float) -> list[Measurement]:
        """Returns two per kind: share of the time, and mean share of the CPUs."""
        said = []
        for kind in Neighbour:
            for name, seconds in ((of_time(kind), self.noticed_s[kind]), (of_cpus(kind), self.used[kind])):
                share = min(100.0, 100.0 * seconds / self.time_s)
                begin_s = end_s - self.time_s
                said.append(Measurement(name, share, "%", Provenance.sampled, scope, begin_s, end_s))
        return said


class NeighbourWatch:
    """Watches the node in a thread during an attempt, and reports measurements.

    Args:
        roots: processes of the run's workers on this machine.
        mark: mark of the run's experiment; None = the mark of this process.
    """

    def __init__(
        self,
        report: Callable[[Sequence[Measurement]], None],
        device: str,
        *,
        roots: Collection[int],
        mark: str | None = None,
        every_s: float = LOOK_S,
        look: Callable[[], Machine] | None = None,
    ) -> None:
        self._report, self._every_s = report, every_s
        self._roots = frozenset(roots)
        self._mark = os.environ.get(MARK, "") if mark is None else mark
        self._table = _table()
        self._look = look or self._table.look
        self._gpus = _Gpus() if DEVICE_KINDS[device].nvml else None
        self._scope = f"host:{socket.gethostname()}"
        self._company, self._said_s = Company(), 0.0
        self._before = self._look()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbours", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes a last look and reports the rest."""
        self._over.set()
        self._thread.join()
        self._advance()
        self._say()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._advance()
            if self._company.time_s >= max(_LEAST_SAID_S, _SAID_SHARE * self._said_s):
                self._say()

    def _advance(self) -> None:
        now = self._look()
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
            self._said_s += self._company.time_s
            self._report(self._company.measurements(self._scope, time.time()))
            self._company = Company()


def watcher(
    report: Callable[[Sequence[Measurement]], None], device: str, rank: int, workers: Sequence[WorkerAddress]
) -> NeighbourWatch | None:
    """Returns a worker's watch, or None: only the first worker of a group on each machine has one.

    Args:
        workers: of the group, by rank; empty for a single worker.
    """
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
        """Returns other processes on the GPUs that one of ours computes on.

        A GPU without any of ours is not the run's; nor is a GPU whose processes NVML numbers as in another
        container.
        """
        found: set[int] = set()
        if self._nvml is None:
            return found
        try:
            for index in range(self._nvml.nvmlDeviceGetCount()):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                running = {of.pid for of in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
                if not running.isdisjoint(ours):
                    found |= running - set(ours)
        except self._nvml.NVMLError as error:
            logger.info("NVML no longer lists the processes on the GPU: %s", error)
            self._nvml = None
        return found
