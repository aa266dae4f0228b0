"""Grants from the driver to trials, and assignments from a trial to its worker group and endings back.

Plain Python, held by the experiment's actor. All sides repeat what they know, so that nothing is lost when
the actor is killed and restarts with an empty mailbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.recording.assignment import Assignment, Ending, Grant


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """The n-th thing a group is asked to do: an assignment, or to end (None)."""

    number: int
    assignment: Assignment | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """What came of the n-th order, as rank 0 saw it."""

    number: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where a worker of a group runs.

    Attributes:
        rank: Rank of the worker.
        node: Ray's id of its node.
        host: name of the machine.
        pid: its process there.
        address: Address of its node in the cluster.
        port: free there when it arrived.
        placement: Ray's id of the devices that the group holds.
    """

    rank: int
    node: str | None
    host: str
    pid: int
    address: str
    port: int
    placement: str | None = None


class Mailbox:
    """Grants by trial; orders and deliveries by group, and where its workers are."""

    def __init__(self) -> None:
        self._grants: dict[str, Grant] = {}
        self._ready: dict[str, dict[int, WorkerAddress]] = {}
        self._arrived: dict[str, dict[int, WorkerAddress]] = {}
        self._orders: dict[str, WorkOrder] = {}
        self._deliveries: dict[str, Delivery] = {}

    def grant(self, grants: Mapping[str, Grant]) -> None:
        """The driver's side: its answers to all trials that have reported ready and not ended."""
        self._grants = dict(grants)

    def granted(self, trial: str) -> Grant | None:
        """Returns the trial's side: the driver's answer, once there is one."""
        return self._grants.get(trial)

    def ask(self, group: str, order: WorkOrder) -> Ending | None:
        """Returns the trial's side: this is wanted; what came of it, once that is known."""
        self._orders[group] = order
        delivery = self._deliveries.get(group)
        return delivery.ending if delivery is not None and delivery.number == order.number else None

    def ready(self, group: str) -> tuple[WorkerAddress, ...]:
        """Returns the trial's side: where those workers run that wait for orders, by rank."""
        ready = self._ready.get(group, {})
        return tuple(ready[rank] for rank in sorted(ready))

    def serve(
        self, group: str, worker: WorkerAddress, done: Delivery | None, number: int
    ) -> WorkOrder | None:
        """The worker's side: `done` came of the last order; the order after `number`, once there is one.

        Args:
            group: Group of the worker.
            worker: this one; it is ready from its first call on.
            done: Last delivery of rank 0, repeated until an order follows; None from others.
            number: Number of the last order carried out by this worker.
        """
        self._ready.setdefault(group, {})[worker.rank] = worker
        if done is not None:
            self._deliveries[group] = done
        order = self._orders.get(group)
        return order if order is not None and order.number > number else None

    def arrive(self, group: str, worker: WorkerAddress) -> tuple[WorkerAddress, ...]:
        """Returns the worker's side: it runs here; where those run that have arrived, by rank."""
        workers = self._arrived.setdefault(group, {})
        workers[worker.rank] = worker
        return tuple(workers[rank] for rank in sorted(workers))

    def forget(self, group: str) -> None:
        """The group has ended."""
        self._ready.pop(group, None)
        self._arrived.pop(group, None)
        self._orders.pop(group, None)
        self._deliveries.pop(group, None)
