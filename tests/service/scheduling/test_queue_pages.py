"""Pages of the queue: the same order as claims one after the other, found from counts."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.db.errors import BadPageToken
from service.scheduling.queue_pages import ClaimTurn, WaitingCount, stretches

Waiting = dict[tuple[int, str], list[float]]
"""When each experiment of a priority and owner joined the queue, in order."""

WAITING: st.SearchStrategy[Waiting] = st.dictionaries(
    st.tuples(st.sampled_from([10, 50, 90]), st.sampled_from("abcd")),
    st.lists(st.integers(0, 9).map(float), min_size=1, max_size=6).map(sorted),
)
ACTIVE = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 4))


def claimed_in_turn(waiting: Waiting, active: Mapping[str, int]) -> list[ClaimTurn]:
    """Claims everything, as the scheduler would: highest priority, smallest share, oldest, first owner."""
    queues = {place: list(joined) for place, joined in waiting.items()}
    shares = Counter(active)
    turns = []
    while any(queues.values()):
        oldest = {place: joined[0] for place, joined in queues.items() if joined}
        turn = min(
            (ClaimTurn(priority, shares[owner], at_s, owner) for (priority, owner), at_s in oldest.items()),
            key=lambda turn: (-turn.priority, turn.share, turn.queued_s, turn.owner),
        )
        turns.append(turn)
        queues[turn.priority, turn.owner].pop(0)
        shares[turn.owner] += 1
    return turns


def counts(waiting: Waiting) -> list[WaitingCount]:
    return [WaitingCount(*place, len(joined)) for place, joined in waiting.items()]


@given(WAITING, ACTIVE, st.integers(1, 12), st.integers(0, 30))
def test_what_comes_next_is_what_is_claimed_next(
    waiting: Waiting, active: dict[str, int], least: int, passed: int
) -> None:
    expected = claimed_in_turn(waiting, active)
    after = expected[passed - 1] if 0 < passed <= len(expected) else None
    before, chosen = stretches(counts(waiting), active, after, least)
    turns = [
        ClaimTurn(each.priority, each.share + n, joined, each.owner)
        for each in chosen
        for n, joined in enumerate(
            waiting[each.priority, each.owner][each.skipped : each.skipped + each.count]
        )
    ]
    turns.sort(key=lambda turn: turn.key)
    assert turns == expected[before : before + len(turns)]
    assert len(turns) >= min(least, len(expected) - before)
    assert after is None or (not turns and after == expected[-1]) or after in turns
    owners = {owner for _, owner in waiting}
    assert len(turns) < least + len(owners)  # Whole shares, and no more than are needed.


def test_a_claim_changes_no_other_turn() -> None:
    waiting: Waiting = {(50, "ada"): [1.0, 2.0, 3.0], (50, "bob"): [2.0]}
    first, *others = claimed_in_turn(waiting, {"bob": 1})
    waiting[50, first.owner].remove(first.queued_s)
    assert claimed_in_turn(waiting, {"bob": 1, first.owner: 1}) == others


def test_a_token_names_a_turn_and_no_owner() -> None:
    turn = ClaimTurn(50, 3, 1.5, "ada")
    token = turn.token(7)
    assert ClaimTurn.read(token, {7: ("ada", "default")}.get) == turn
    assert b"ada" not in urlsafe_b64decode(token + "==")


@pytest.mark.parametrize(
    "content",
    [
        [50, 3, 1.5],
        [50, 3, 1.5, 7, 1],
        [True, 3, 1.5, 7],
        [50, 3.0, 1.5, 7],
        [50, 3, 10**400, 7],
        [50, 3, float("inf"), 7],
        [50, 3, float("nan"), 7],
        [50, 3, 1.5, None],
        [50, 3, 1.5, "ada"],
        [50, 3, 1.5, 1 << 63],
        [50, 3, 1.5, 8],
        {"priority": 50},
        7,
    ],
)
def test_other_tokens_are_refused(content: object) -> None:
    with pytest.raises(BadPageToken):
        ClaimTurn.read(
            urlsafe_b64encode(json.dumps(content).encode()).decode(),
            {7: ("ada", "default"), 1 << 63: ("eve", "default")}.get,
        )


@pytest.mark.parametrize("token", ["", "!", "bm90IGpzb24", "W" * 3999])
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(BadPageToken):
        ClaimTurn.read(token, {7: ("ada", "default")}.get)
