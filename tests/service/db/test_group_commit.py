"""Group commit: who waits is in the group, who fails fails with it, nobody is left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from service.db import group_commit
from service.db.group_commit import GroupCommit

Take = Callable[[], list[int]]


def test_who_comes_while_the_turn_is_awaited_is_in_the_group() -> None:
    groups: list[list[int]] = []
    turn = threading.Event()

    def commit(take: Take) -> list[int | BaseException]:
        turn.wait(10)
        group = take()
        assert take() == group, "a further call gave another group"
        groups.append(group)
        return [-item for item in group]

    together = GroupCommit[int, int](commit, lambda item: 1, 100)
    with ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(together, item) for item in range(1, 6)]
        _until_waiting(together, 5)
        turn.set()
        assert [answer.result(10) for answer in answers] == [-1, -2, -3, -4, -5]
    assert sorted(groups[0]) == [1, 2, 3, 4, 5]


def test_many_threads_are_each_answered_once() -> None:
    stored: list[int] = []

    def commit(take: Take) -> list[int | BaseException]:
        group = take()
        stored.extend(group)
        return [item + 1 for item in group]

    together = GroupCommit[int, int](commit, lambda item: 1, 3)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(together, range(500))) == list(range(1, 501))
    assert sorted(stored) == list(range(500))


@pytest.mark.parametrize("taken", [True, False])
def test_a_group_that_fails_fails_for_all_and_the_next_is_stored(taken: bool) -> None:
    calls = 0

    def commit(take: Take) -> list[int | BaseException]:
        nonlocal calls
        calls += 1
        if calls == 1:
            if taken:
                take()
            raise RuntimeError("away")
        return list(take())

    together = GroupCommit[int, int](commit, lambda item: 1, 100)
    with pytest.raises(RuntimeError, match="away"):
        together(1)
    assert together(2) == 2


def test_an_item_that_fails_fails_alone() -> None:
    def commit(take: Take) -> list[int | BaseException]:
        return [ValueError("odd") if item % 2 else item for item in take()]

    together = GroupCommit[int, int](commit, lambda item: 1, 100)
    assert together(2) == 2
    with pytest.raises(ValueError, match="odd"):
        together(3)


class _Interrupted(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        super().wait(timeout)
        raise KeyboardInterrupt


def test_who_is_interrupted_while_waiting_leaves_the_lead_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def commit(take: Take) -> list[int | BaseException]:
        group = take()
        begun.set()
        go_on.wait(10)
        return list(group)

    together = GroupCommit[int, int](commit, lambda item: 1, 1)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(together, 1)
        assert begun.wait(10)
        with monkeypatch.context() as patch:
            patch.setattr(group_commit, "_Ticket", partial(group_commit._Ticket, turn=_Interrupted()))
            second = pool.submit(together, 2)
            _until_waiting(together, 1)
        third = pool.submit(together, 3)
        _until_waiting(together, 2)
        go_on.set()
        assert first.result(10) == 1
        with pytest.raises(KeyboardInterrupt):
            second.result(10)
        assert third.result(10) == 3


def _until_waiting(together: GroupCommit[int, int], count: int) -> None:
    deadline = time.monotonic() + 10
    while len(together._waiting) < count:
        assert time.monotonic() < deadline, "the items never came"
        time.sleep(0.001)
