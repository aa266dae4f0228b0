"""Pages of the queue, without sorting all that waits. Pure.

At one priority, the n-th waiting experiment of an owner is claimed when the owner's share (experiments
starting or running) is n - 1 larger than now. So the order is (priority, share, age, owner), and how many
each owner has waiting is enough to tell which of them are on a page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from service.db.errors import BadPageToken
from service.db.listing import page_token, read_page_token
from service.domain.access import DEFAULT_POOL


@dataclass(frozen=True, slots=True)
class WaitingCount:
    priority: int
    owner: str
    count: int


@dataclass(frozen=True, slots=True)
class ClaimTurn:
    """Where an experiment stands in the order of claims; `share` is what its owner has at work by then.

    A claim changes no other experiment's turn: its owner has one more at work and one less that waits.
    """

    priority: int
    share: int
    queued_s: float
    owner: str
    pool: str = DEFAULT_POOL

    @property
    def key(self) -> tuple[int, int, float, str]:
        return -self.priority, self.share, self.queued_s, self.owner

    def token(self, experiment_id: int) -> str:
        """Returns the token of the page that follows; it contains no user names."""
        return page_token([self.priority, self.share, self.queued_s, experiment_id])

    @classmethod
    def read(cls, token: str, belonging: Callable[[int], tuple[str, str] | None]) -> ClaimTurn:
        """Returns a token's turn, or raises `BadPageToken`; `belonging`: owner and pool of an experiment."""
        priority, share, queued_s, experiment_id = read_page_token(token, 4)
        sound = (
            type(priority) is int
            and type(share) is int
            and isinstance(queued_s, float)
            and math.isfinite(queued_s)
            and type(experiment_id) is int
            and abs(experiment_id) < 1 << 63
        )
        found = belonging(experiment_id) if sound else None
        if found is None:
            raise BadPageToken
        return cls(priority, share, queued_s, *found)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive waiting experiments of one owner, after `skipped` older ones, from `share` on."""

    priority: int
    owner: str
    skipped: int
    count: int
    share: int


def stretches(
    waiting: Iterable[WaitingCount], active: Mapping[str, int], after: ClaimTurn | None, least: int
) -> tuple[int, list[Stretch]]:
    """Returns which experiments have their turn next, and how many come before all of these.

    Whole shares are given, so these may be more than `least`; they are fewer only if no more wait. Turns of
    the share of `after` are included, before it or not.
    """
    shares = dict(active)
    by_priority: dict[int, list[WaitingCount]] = {}
    for each in waiting:
        by_priority.setdefault(each.priority, []).append(each)
    before, found = 0, 0
    chosen: list[Stretch] = []
    for priority in sorted(by_priority, reverse=True):
        if found >= least:
            break
        owners = by_priority[priority]
        starts = {each.owner: shares.get(each.owner, 0) for each in owners}
        if after is not None and priority > after.priority:
            before += sum(each.count for each in owners)
        else:
            low = after.share if after is not None and priority == after.priority else 0
            skipped = _below(owners, starts, low)
            high = _bound(owners, starts, sum(skipped) + least - found)
            upto = _below(owners, starts, max(low, high))
            before += sum(skipped)
            found += sum(upto) - sum(skipped)
            chosen += [
                Stretch(priority, each.owner, first, end - first, starts[each.owner] + first)
                for each, first, end in zip(owners, skipped, upto, strict=True)
                if end > first
            ]
        for each in owners:
            shares[each.owner] = starts[each.owner] + each.count
    return before, chosen


def _below(owners: Sequence[WaitingCount], starts: Mapping[str, int], share: int) -> list[int]:
    """Returns how many of each owner's have their turn at a smaller share."""
    return [min(max(share - starts[each.owner], 0), each.count) for each in owners]


def _bound(owners: Sequence[WaitingCount], starts: Mapping[str, int], wanted: int) -> int:
    """Returns the smallest share below which `wanted` have their turn; or all, if there are fewer."""
    low, high = 0, max(starts[each.owner] + each.count for each in owners)
    while low < high:
        middle = (low + high) // 2
        if sum(_below(owners, starts, middle)) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low
