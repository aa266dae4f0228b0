"""Group commit: writes that come at the same time share one transaction, and one wait for the disk."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

LARGEST_GROUP = 256  # Items that share one transaction at most


@dataclass(slots=True)
class _Ticket(Generic[Item, Answer]):
    item: Item
    turn: threading.Event = field(default_factory=threading.Event)
    """Set when the item is answered, or when its thread is to commit for those that wait."""
    answer: Answer | BaseException | None = None
    done: bool = False


class GroupCommit(Generic[Item, Answer]):
    """The first to come commits for all that wait; each is answered after the commit.

    Args:
        commit: stores a group and answers each item, with an exception for an item that failed. It is given a
            function that returns the group, to be called once it has its turn at the database, so that
            latecomers are still in the group. A further call returns the same group.
        weight: what an item counts towards `limit`, the heaviest group.
    """

    def __init__(
        self,
        commit: Callable[[Callable[[], list[Item]]], list[Answer | BaseException]],
        weight: Callable[[Item], int],
        limit: int,
    ) -> None:
        self._commit = commit
        self._weight = weight
        self._limit = limit
        self._mutex = threading.Lock()
        self._led = False
        self._waiting: list[_Ticket[Item, Answer]] = []

    def __call__(self, item: Item) -> Answer:
        """Stores an item; returns when it is committed."""
        ticket: _Ticket[Item, Answer] = _Ticket(item)
        with self._mutex:
            self._waiting.append(ticket)
            leads, self._led = not self._led, True
        if not leads:
            try:
                ticket.turn.wait()
            except BaseException:  # Interrupted: the others must not wait for this thread.
                self._withdraw(ticket)
                raise
        if not ticket.done:
            self._lead()
        if isinstance(ticket.answer, BaseException):
            raise ticket.answer
        assert ticket.answer is not None
        return ticket.answer

    def _lead(self) -> None:
        group: list[_Ticket[Item, Answer]] = []

        def take() -> list[Item]:
            if not group:
                group.extend(self._next_group())
            return [ticket.item for ticket in group]

        answers: Sequence[Answer | BaseException]
        try:
            try:
                answers = self._commit(take)
            except BaseException as error:
                answers = [error] * len(take())
            for ticket, answer in zip(group, answers, strict=True):
                ticket.answer, ticket.done = answer, True
                ticket.turn.set()
        finally:
            with self._mutex:
                self._pass_on()

    def _withdraw(self, ticket: _Ticket[Item, Answer]) -> None:
        with self._mutex:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
                if ticket.turn.is_set():
                    self._pass_on()

    def _pass_on(self) -> None:
        self._led = bool(self._waiting)
        if self._led:
            self._waiting[0].turn.set()

    def _next_group(self) -> list[_Ticket[Item, Answer]]:
        with self._mutex:
            size = weight = 0
            for ticket in self._waiting[:LARGEST_GROUP]:
                weight += self._weight(ticket.item)
                if size and weight > self._limit:
                    break
                size += 1
            group, self._waiting = self._waiting[:size], self._waiting[size:]
        return group
