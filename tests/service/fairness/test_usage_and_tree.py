"""Decayed use, and the scores of the tree of shares."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.fairness.shares import (
    HALF_LIFE_S,
    HORIZON_H,
    LAG_H,
    Level,
    by_project,
    charge,
    charged,
    decayed,
    excesses,
    score_of,
)
from service.fairness.state import DEFAULT_POOL, Lane, Usage


def test_use_counts_half_after_its_half_life() -> None:
    assert decayed(Usage(8.0, 0.0), HALF_LIFE_S) == 4.0
    assert decayed(Usage(8.0, 0.0), 3 * HALF_LIFE_S) == 1.0


def test_a_clock_that_goes_back_changes_nothing() -> None:
    assert decayed(Usage(8.0, 100.0), 0.0) == 8.0
    assert charged(Usage(8.0, 100.0), 50.0, 3.0, -50.0) == Usage(8.0, 100.0)


@given(st.floats(0.0, 1e6), st.floats(0.0, 100.0), st.floats(1.0, 1e6), st.floats(1.0, 1e6))
def test_charging_an_interval_equals_charging_its_parts(
    usd: float, usd_per_hour: float, first_s: float, second_s: float
) -> None:
    start = Usage(usd, 0.0)
    parts = charged(
        charged(start, first_s, usd_per_hour, first_s), first_s + second_s, usd_per_hour, second_s
    )
    whole = charged(start, first_s + second_s, usd_per_hour, first_s + second_s)
    assert math.isclose(parts.usd, whole.usd, rel_tol=1e-9, abs_tol=1e-9)


def test_only_what_is_held_is_charged() -> None:
    h100, v100 = Lane(DEFAULT_POOL, "h100"), Lane(DEFAULT_POOL, "v100")
    ann, bob = ("nlp", "ann", h100), ("nlp", "bob", h100)
    tree = {ann: Usage(4.0, 0.0), bob: Usage(2.0, 0.0), ("nlp", "bob", v100): Usage(9.0, 0.0)}
    after = charge(tree, 3600.0, {bob: 3.0, ("vision", "cy", h100): 0.0}, 3600.0)
    assert after.keys() == tree.keys(), "who waits is not charged"
    assert after[ann] == Usage(4.0, 0.0)
    assert after[bob].usd == pytest.approx(5.0, rel=0.01)
    assert by_project(after, 3600.0)["nlp", h100] == pytest.approx(9.0, rel=0.01)


def test_excess_is_what_was_used_beyond_the_share() -> None:
    assert excesses({"a": 1.0, "b": 3.0}, {"a": 30.0, "b": 10.0}, 8.0) == {"a": 20.0, "b": -20.0}
    assert excesses({"a": 2.0}, {"a": 30.0}, 8.0) == {"a": 0.0}


def test_who_was_away_is_behind_by_so_many_hours_of_their_share_alone() -> None:
    weights = dict.fromkeys("abcd", 1.0)
    found = excesses(weights, {"a": 9000.0, "b": 9200.0}, 8.0)
    assert found["c"] == found["d"] == -2.0 * LAG_H
    assert found["b"] - found["a"] == pytest.approx(200.0), "those who always work are compared exactly"
    assert sum(found.values()) == pytest.approx(0.0, abs=1e-6)


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=6), st.floats(0.0, 50.0))
def test_excesses_keep_the_order_of_use_and_add_up_to_nothing(used: list[float], usd_per_hour: float) -> None:
    amounts = {str(number): usd for number, usd in enumerate(used)}
    found = excesses(dict.fromkeys(amounts, 1.0), amounts, usd_per_hour)
    assert math.fsum(found.values()) == pytest.approx(0.0, abs=1e-6)
    assert sorted(found, key=lambda name: (found[name], amounts[name], name)) == sorted(
        amounts, key=lambda name: (amounts[name], name)
    )


@given(st.floats(0.0, 50.0), st.floats(0.01, 50.0), st.floats(-1e4, 1e4), st.floats(0.1, 10.0))
def test_who_holds_more_never_scores_lower(held: float, more: float, excess: float, weight: float) -> None:
    assert score_of(held, excess, weight) <= score_of(held + more, excess, weight)


def test_a_score_shows_its_parts() -> None:
    level = Level({"nlp": 3.0, "vision": 1.0}, {"nlp": 42.0, "vision": 6.0}, 16.0)
    score = level.score("nlp", 5.0)
    assert (score.entitled_part, score.used_part, score.entitled_usd_per_hour) == (0.75, 0.875, 12.0)
    assert score.excess_usd == 6.0
    assert score.score == (5.0 + 6.0 / HORIZON_H) / 3.0
