"""Drift from repeated reference runs, against drifts that are known."""

from __future__ import annotations

import numpy as np
import pytest

from service.analysis.drift import drift

HOUR = 3600.0


def test_a_steady_slowing_is_found_exactly() -> None:
    middles = [0.0, HOUR, 2 * HOUR, 3 * HOUR]
    found = drift(middles, [10.0 * 1.02**hours for hours in range(4)])
    assert found.slope_pct == pytest.approx(2.0)
    assert found.total_pct == pytest.approx(100 * (1.02**3 - 1))
    assert found.proven
    assert "+2% per hour" in found.sentence()
    assert found.notes()


def test_noise_alone_is_called_no_drift() -> None:
    found = drift([0.0, HOUR, 2 * HOUR, 3 * HOUR], [10.0, 10.2, 10.2, 10.0])
    assert not found.proven
    assert found.low_pct is not None and found.high_pct is not None
    assert found.low_pct < 0 < found.high_pct
    assert found.sentence().startswith("no significant drift")
    assert found.notes() == []


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    chance = np.random.default_rng(5)
    middles = np.arange(6) * HOUR / 2
    held = 0
    for _ in range(1000):
        seconds = 10 * np.exp(0.01 * middles / HOUR + chance.normal(0, 0.01, 6))
        found = drift(middles.tolist(), seconds.tolist())
        assert found.low_pct is not None and found.high_pct is not None
        held += found.low_pct <= 100 * np.expm1(0.01) <= found.high_pct
    assert 0.93 <= held / 1000 <= 0.97


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_than_three_say_nothing(count: int) -> None:
    found = drift([HOUR * n for n in range(count)], [10.0] * count)
    assert (found.runs, found.slope_pct, found.proven) == (count, None, False)
    assert "measuring drift takes 3" in found.sentence()


def test_measurements_at_one_moment_say_nothing() -> None:
    assert drift([5.0, 5.0, 5.0], [10.0, 11.0, 12.0]).slope_pct is None


def test_equal_measurements_are_no_drift() -> None:
    found = drift([0.0, HOUR, 2 * HOUR], [10.0] * 3)
    assert found.slope_pct == pytest.approx(0.0)
    assert not found.proven
