"""Group commit: writes that come at the same time share one transaction, and one wait for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

LARGEST_GROUP = 256
"""Items that share one transaction at most."""


@dataclass(slots=True)
class _Ticket(Generic[Item, Answer]):
    item: Item
    answer: Answer | BaseException | None = None
    done: bool = False


class GroupCommit(Generic[Item, Answer]):
    """Whoever comes first commits for all that wait; each is answered after the commit.

    Args:
        commit: stores a group and answers each item, with an exception for an item that failed.
        weight: what an item counts towards `limit`.
        limit: heaviest group.
    """

    def __init__(
        self,
        commit: Callable[[list[Item]], list[Answer | BaseException]],
        weight: Callable[[Item], int],
        limit: int,
    ) -> None:
        self._commit = commit
        self._weight = weight
        self._limit = limit
        self._leader = threading.Lock()
        self._mutex = threading.Lock()
        self._waiting: list[_Ticket[Item, Answer]] = []

    def __call__(self, item: Item) -> Answer:
        """Store an item; returns when it is committed."""
        ticket: _Ticket[Item, Answer] = _Ticket(item)
        with self._mutex:
            self._waiting.append(ticket)
        with self._leader:
            while not ticket.done:
                self._commit_group(self._next_group())
        if isinstance(ticket.answer, BaseException):
            raise ticket.answer
        assert ticket.answer is not None
        return ticket.answer

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

    def _commit_group(self, group: list[_Ticket[Item, Answer]]) -> None:
        answers: Sequence[Answer | BaseException]
        try:
            answers = self._commit([ticket.item for ticket in group])
        except BaseException as error:
            answers = [error] * len(group)
        for ticket, answer in zip(group, answers, strict=True):
            ticket.answer, ticket.done = answer, True
