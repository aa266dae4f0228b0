"""Pareto sets against their definition."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.analysis.ranking import frontier
from tests.service.analysis.building import candidate


def test_a_dominated_configuration_names_who_dominates_it() -> None:
    candidates = [
        candidate("cheap", {"cost_usd": 1.0, "accuracy": 0.8}),
        candidate("good", {"cost_usd": 3.0, "accuracy": 0.9}),
        candidate("bad", {"cost_usd": 4.0, "accuracy": 0.8}),
    ]
    result = frontier(candidates, {"cost_usd": "lower", "accuracy": "higher"})
    assert result == {"bad": ("cheap", "good")}


def test_equal_configurations_are_both_members() -> None:
    twins = [candidate("a", {"t": 1.0}), candidate("b", {"t": 1.0})]
    assert frontier(twins, {"t": "lower"}) == {}


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_members_are_exactly_what_nothing_dominates(rows: list[tuple[int, int, int]]) -> None:
    def beats(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
        costs = [(one[0], other[0]), (one[1], other[1]), (-one[2], -other[2])]
        return all(x <= y for x, y in costs) and any(x < y for x, y in costs)

    candidates = [
        candidate(str(number), dict(zip("abc", map(float, row), strict=True)))
        for number, row in enumerate(rows)
    ]
    result = frontier(candidates, {"a": "lower", "b": "lower", "c": "higher"})
    for number, row in enumerate(rows):
        dominators = {str(other) for other, rival in enumerate(rows) if beats(rival, row)}
        assert (str(number) in result) == bool(dominators)
        if dominators:
            assert set(result[str(number)]) == dominators - result.keys()
