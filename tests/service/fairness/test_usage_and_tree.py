"""Decayed use, and the scores of the tree of shares."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.fairness.state import Usage, UsageTree
from service.fairness.tree import ASSURED, HORIZON_H, Level, score_of
from service.fairness.usage import HALF_LIFE_S, by_project, charge, charged, decayed


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
    tree = UsageTree({("nlp", "ann"): Usage(4.0, 0.0), ("nlp", "bob"): Usage(2.0, 0.0)})
    after = charge(tree, 3600.0, {("nlp", "bob"): 3.0, ("vision", "cy"): 0.0}, 3600.0)
    assert after.by_user.keys() == tree.by_user.keys(), "who waits is not charged"
    assert after.by_user["nlp", "ann"] == Usage(4.0, 0.0)
    assert after.by_user["nlp", "bob"].usd == pytest.approx(5.0, rel=0.01)
    assert by_project(after, 3600.0)["nlp"] == pytest.approx(9.0, rel=0.01)


def test_recent_use_counts_above_the_assured_level_alone() -> None:
    assert score_of(2.0, used_usd=120.0, weight=1.0, assured=3.0) == 2.0
    assert score_of(3.0, used_usd=120.0, weight=1.0, assured=3.0) == 3.0 + 120.0 / HORIZON_H


@given(st.floats(0.0, 50.0), st.floats(0.01, 50.0), st.floats(0.0, 1e4), st.floats(0.1, 10.0))
def test_who_holds_more_never_scores_lower(held: float, more: float, used: float, weight: float) -> None:
    assert score_of(held, used, weight, 10.0) <= score_of(held + more, used, weight, 10.0)


def test_a_score_shows_its_parts() -> None:
    level = Level({"nlp": 3.0, "vision": 1.0}, {"nlp": 30.0, "vision": 10.0}, 16.0)
    score = level.score("nlp", 5.0)
    assert (score.entitled_part, score.used_part, score.entitled_usd_per_hour) == (0.75, 0.75, 12.0)
    assert score.assured, f"5 USD/h is less than {ASSURED:.0%} of 12"
    assert score.score == 5.0 / 3.0
