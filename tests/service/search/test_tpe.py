"""TPE's suggestions: reproducible from what is stored, drawn to where it is good, never the same twice."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest

from service.domain.grid import Axes, Conditions, Point, Range, Space
from service.search.protocol import Outcome, Suggestion
from service.search.tpe import RANDOM_FIRST, suggest

LR = {"lr": Range(low=1e-5, high=1e-1, log=True)}


def search(
    axes: Axes,
    judge: Callable[[Point], Suggestion],
    count: int,
    *,
    conditions: Conditions | None = None,
    seed: int = 0,
) -> list[Suggestion]:
    """So many suggestions, each judged before the next."""
    tried: list[Suggestion] = []
    for _ in range(count):
        tried.append(judge(suggest(Space(axes, conditions), tried, better="lower", seed=seed)))
    return tried


def by_distance(point: Point) -> Suggestion:
    """Best at a learning rate of 1e-3."""
    assert isinstance(point["lr"], float)
    return Suggestion(point, Outcome.valued, abs(math.log10(point["lr"]) + 3))


def test_it_is_drawn_to_where_the_metric_is_good() -> None:
    late, early = [], []
    for seed in range(5):
        tried = search(LR, by_distance, 40, seed=seed)
        late += [one.value or 0.0 for one in tried[-15:]]
        early += [one.value or 0.0 for one in tried[:RANDOM_FIRST]]
        assert all(1e-5 <= float(str(one.point["lr"])) <= 1e-1 for one in tried)
    assert statistics.median(late) < 0.7 * statistics.median(early)


def test_higher_is_better_where_it_is() -> None:
    tried: list[Suggestion] = []
    for _ in range(30):
        point = suggest(Space(LR), tried, better="higher", seed=0)
        tried.append(Suggestion(point, Outcome.valued, -(by_distance(point).value or 0.0)))
    assert sorted(one.value or 0.0 for one in tried[-10:])[5] > -0.7


def test_what_is_stored_and_the_seed_decide_alone() -> None:
    tried = search(LR, by_distance, 15)
    for number in (0, 3, 14):
        assert suggest(Space(LR), tried[:number], better="lower", seed=0) == tried[number].point
    assert suggest(Space(LR), tried, better="lower", seed=0) != suggest(
        Space(LR), tried, better="lower", seed=1
    )


def test_suggestions_at_the_same_time_spread_out() -> None:
    tried = search(LR, by_distance, 20)
    for _ in range(4):
        tried.append(Suggestion(suggest(Space(LR), tried, better="lower", seed=0), Outcome.running))
    assert len({one.point["lr"] for one in tried[-4:]}) == 4


def test_a_list_is_walked_to_its_end_and_nothing_comes_twice() -> None:
    axes = {"precision": ["fp32", "bf16"], "flag": [1, True, None]}

    def judge(point: Point) -> Suggestion:
        return Suggestion(point, Outcome.valued, 1.0)

    tried = search(axes, judge, 6)
    assert len({repr(one.point) for one in tried}) == 6
    with pytest.raises(ValueError, match="all configurations have been suggested"):
        suggest(Space(axes), tried, better="lower", seed=0)


def test_an_axis_varies_only_under_its_condition() -> None:
    axes = {"teacher": [None, "run:3"], **LR}
    conditions = {"lr": {"teacher": ["run:3"]}}

    def judge(point: Point) -> Suggestion:
        return Suggestion(point, Outcome.valued, 1.0)

    points = [one.point for one in search(axes, judge, 12, conditions=conditions)]
    assert {point["teacher"] for point in points} == {None, "run:3"}
    assert all(("lr" in point) == (point["teacher"] is not None) for point in points)


def test_where_it_fails_is_left_and_what_says_nothing_is_ignored() -> None:
    good = [Suggestion({"lr": 1e-4 * (1 + n / 10)}, Outcome.valued, 1.0 + n / 10) for n in range(12)]

    def suggested(elsewhere: Outcome) -> int:
        """How many of ten suggestions lie where all others ended like that."""
        value = 0.1 if elsewhere is Outcome.valued else None
        others = [Suggestion({"lr": 1e-2 * (1 + n / 10)}, elsewhere, value) for n in range(12)]
        points = [suggest(Space(LR), good + others, better="lower", seed=seed) for seed in range(10)]
        return sum(float(str(point["lr"])) > 3e-3 for point in points)

    assert suggested(Outcome.bad) <= 2
    assert suggested(Outcome.unknown) < 10
    assert suggested(Outcome.valued) >= 8
