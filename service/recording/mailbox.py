"""What the driver, a trial and its worker group exchange, and the mailbox that they exchange it through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from service.scheduling.run_plan import Shape
from trainers.config import RunConfig
from trainers.errors import FailureClass
from trainers.reporting import RunHistory, StopReason


@dataclass(frozen=True, slots=True)
class Turn:
    """A run whose turn has come: it waits for a place in the cluster, and gets an attempt only there."""

    number: int  # Counts turns in the sweep
    run_id: int
    attempt: int
    config: RunConfig
    shape: Shape
    isolated: bool  # Its processes serve no other run
    starts_node: bool = False  # Whether it waits for a node that Ray starts for it

    @property
    def name(self) -> str:
        return f"run-{self.run_id}-{self.attempt}-{self.number}"


@dataclass(frozen=True, slots=True)
class Ready:
    """A trial's report that its workers could begin."""

    placement: str | None  # Ray's id of the devices that they hold
    at_s: float  # Unix time of the first such report; reused processes repeat it
    nodes: tuple[str | None, ...] = ()  # Ray's ids of the nodes that they run on


@dataclass(frozen=True, slots=True)
class Assignment:
    """One attempt at one run, opened for workers that are ready."""

    turn: Turn
    attempt: int
    history: RunHistory = field(default_factory=RunHistory)

    @property
    def run_id(self) -> int:
        return self.turn.run_id


@dataclass(frozen=True, slots=True)
class Grant:
    """The driver's answer to `Ready`; None = the run should no longer be trained, or not there."""

    assignment: Assignment | None
    leaves: bool = False  # Whether the processes end as well, because their node is going


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended, according to its worker: at its length, stopped at a step boundary, or failed."""

    kind: Literal["completed", "stopped", "failed"]
    stop_reason: StopReason | None = None
    summary: Mapping[str, float | int | str | None] = field(default_factory=dict)  # Unless it failed
    failure: tuple[FailureClass, str] | None = None  # Class and one line


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """The n-th order to a group: an assignment, or None to end."""

    number: int
    assignment: Assignment | None


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where a worker of a group runs: Ray's ids of its node and of the group's devices, and a free port."""

    rank: int
    node: str | None
    host: str
    pid: int
    address: str
    port: int
    placement: str | None = None


class Mailbox:
    """Held by the experiment's actor. All sides repeat their messages: a killed actor restarts empty."""

    def __init__(self) -> None:
        self._grants: dict[str, Grant] = {}
        self._ready: dict[str, dict[int, WorkerAddress]] = {}
        self._arrived: dict[str, dict[int, WorkerAddress]] = {}
        self._orders: dict[str, WorkOrder] = {}
        self._endings: dict[str, tuple[int, Ending]] = {}

    def grant(self, grants: Mapping[str, Grant]) -> None:
        """Replaces the driver's answers to all trials that have reported ready and not ended."""
        self._grants = dict(grants)

    def granted(self, trial: str) -> Grant | None:
        return self._grants.get(trial)

    def ask(self, group: str, order: WorkOrder) -> Ending | None:
        """Puts a trial's order to its group; returns its ending, once there is one."""
        self._orders[group] = order
        number, ending = self._endings.get(group, (0, None))
        return ending if number == order.number else None

    def ready(self, group: str) -> tuple[WorkerAddress, ...]:
        """Returns the workers of a group that wait for orders, by rank."""
        return _by_rank(self._ready.get(group, {}))

    def serve(
        self, group: str, worker: WorkerAddress, ending: Ending | None, number: int
    ) -> WorkOrder | None:
        """Returns the order after `number`, the last that the worker carried out.

        Takes its ending from rank 0, which repeats it until an order follows. A worker counts as ready from
        its first call on.
        """
        self._ready.setdefault(group, {})[worker.rank] = worker
        if ending is not None:
            self._endings[group] = number, ending
        order = self._orders.get(group)
        return order if order is not None and order.number > number else None

    def arrive(self, group: str, worker: WorkerAddress) -> tuple[WorkerAddress, ...]:
        """Adds a worker to its group; returns those that have arrived, by rank."""
        workers = self._arrived.setdefault(group, {})
        workers[worker.rank] = worker
        return _by_rank(workers)

    def forget(self, group: str) -> None:
        for groups in (self._ready, self._arrived, self._orders, self._endings):
            groups.pop(group, None)


def _by_rank(workers: Mapping[int, WorkerAddress]) -> tuple[WorkerAddress, ...]:
    return tuple(workers[rank] for rank in sorted(workers))
