"""Drift from repeated reference runs, against drifts that are known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from service.analysis.drift import drift, drifts
from service.domain.grid import REFERENCE_CELL
from service.domain.records import Run
from service.domain.states import RunState
from tests.service.analysis.building import run

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


def reference(id: int, experiment: int, began_s: float, rate: float | None, **fields: object) -> Run:
    return run(
        id, {}, 0, experiment_id=experiment, cell=REFERENCE_CELL, started_s=began_s, ended_s=began_s + 60.0,
        samples_per_s=rate, **fields,
    )  # fmt: skip


def test_reference_runs_of_each_experiment_are_read_from_their_rates_and_middles() -> None:
    runs = [reference(id, 1, HOUR * id, 100.0 / 1.02**id) for id in range(3)]
    runs += [reference(9, 2, 0.0, 50.0)]
    runs += [
        reference(10, 1, 0.0, 1.0, state=RunState.failed), reference(11, 1, 0.0, None),
        run(12, {}, 0, samples_per_s=1.0),
    ]  # fmt: skip
    (first, of_first), (second, of_second) = drifts(runs)
    assert (first, of_first.runs, second, of_second.runs) == (1, 3, 2, 1)
    assert of_first.hours == pytest.approx(2.0)
    assert of_first.slope_pct == pytest.approx(2.0)
    assert drifts([run(1, {}, 0)]) == []
    assert [found.runs for _, found in drifts([reference(1, 1, 0.0, None)])] == [0]


def test_a_finding_is_one_sentence() -> None:
    words = [drift([HOUR * n for n in range(count)], [10.0] * count).sentence() for count in (0, 1, 2)]
    assert words == [
        "0 reference runs finished; measuring drift takes 3",
        "1 reference run finished; measuring drift takes 3",
        "2 reference runs finished; measuring drift takes 3",
    ]
    assert drift([0.0, HOUR, 2 * HOUR, 3 * HOUR], [10.0, 10.2, 10.2, 10.0]).sentence() == (
        "no significant drift: time per example changed by +0% per hour (-2.7 to +2.7), +0% over the sweep, "
        "by 4 reference runs that vary by 1.4% around it"
    )
    found = drift([0.0, HOUR, 2 * HOUR], [10.0, 11.0, 12.1])
    assert found.notes() == [f"drift: {found.sentence()}"]
    assert found.sentence().startswith("time per example changed by +10% per hour (")


def test_the_interval_is_students_around_the_line() -> None:
    hours, seconds = np.array([0.0, 1.0, 2.0, 3.0]), np.array([10.0, 10.3, 10.1, 10.6])
    found = drift((hours * HOUR + 7.0).tolist(), seconds.tolist())
    line = stats.linregress(hours, np.log(seconds))
    half = stats.t.ppf(0.975, 2) * line.stderr
    assert found.hours == 3.0
    assert found.low_pct == pytest.approx(100 * np.expm1(line.slope - half))
    assert found.high_pct == pytest.approx(100 * np.expm1(line.slope + half))
    sd = line.stderr * np.sqrt(((hours - 1.5) ** 2).sum())
    assert found.spread_pct == pytest.approx(100 * np.expm1(sd))
