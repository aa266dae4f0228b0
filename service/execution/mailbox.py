"""Hands assignments to a worker group that serves several runs in turn, and endings back.

Plain Python, held by the exchange actor. Both sides say again and again what they know, so that
nothing is lost when the actor is killed and starts anew with an empty mailbox.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.execution.assignment import Assignment, Ending


@dataclass(frozen=True, slots=True)
class Order:
    """The n-th thing a group is asked to do: an assignment, or to end (None)."""

    number: int
    assignment: Assignment | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """What came of the n-th order, as rank 0 saw it."""

    number: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker of a group runs.

    Attributes:
        rank: of the worker.
        node: Ray's id of its node.
        host: name of the machine.
        pid: its process there.
        address: of its node in the cluster.
        port: free there when it arrived.
    """

    rank: int
    node: str | None
    host: str
    pid: int
    address: str
    port: int


class Mailbox:
    """Orders and deliveries by group, and where its workers are."""

    def __init__(self) -> None:
        self._places: dict[str, dict[int, Place]] = {}
        self._orders: dict[str, Order] = {}
        self._deliveries: dict[str, Delivery] = {}

    def ask(self, group: str, order: Order) -> Ending | None:
        """The trial's side: this is wanted; what came of it, once that is known."""
        self._orders[group] = order
        delivery = self._deliveries.get(group)
        return delivery.ending if delivery is not None and delivery.number == order.number else None

    def serve(self, group: str, done: Delivery | None, number: int) -> Order | None:
        """The worker's side: `done` came of the last order; the order after `number`, once there is one.

        Args:
            group: of the worker.
            done: from rank 0, the last delivery, repeated until an order follows; None from others.
            number: of the last order that this worker has carried out.
        """
        if done is not None:
            self._deliveries[group] = done
        order = self._orders.get(group)
        return order if order is not None and order.number > number else None

    def arrive(self, group: str, place: Place) -> tuple[Place, ...]:
        """The worker's side: it runs here; where those run that have arrived, by rank."""
        places = self._places.setdefault(group, {})
        places[place.rank] = place
        return tuple(places[rank] for rank in sorted(places))

    def forget(self, group: str) -> None:
        """The group has ended."""
        self._places.pop(group, None)
        self._orders.pop(group, None)
        self._deliveries.pop(group, None)
