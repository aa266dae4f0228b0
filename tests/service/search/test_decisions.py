"""Who ends at a rung, who cannot fit, who diverges."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.config.document import parse
from service.driving.pruning import diverges, does_not_fit
from service.search.asha import Halving, rungs
from service.specs.experiment import validate


def spec(text: str = ""):
    return validate(parse(f"name: a\ntask: {{name: imdb}}\n{text}\n".encode()))


def test_rungs_are_powers_of_the_reduction_below_the_whole_length():
    assert rungs(1 / 9, 3) == pytest.approx((1 / 9, 1 / 3))
    assert rungs(0.5, 4) == (0.5,)


def test_of_three_at_a_rung_the_worst_two_end():
    halving = Halving(1 / 9, 3, "lower")
    verdicts = [halving.judge(run, [(10, loss)], 90) for run, loss in enumerate([0.9, 0.5, 0.7])]
    # The first two met fewer than three, so there was nobody to be compared with fairly.
    assert [verdict.stops for verdict in verdicts] == [False, False, True]
    assert verdicts[2].reason == "at 11% of its length it ranks 2 of 3"
    assert not halving.judge(3, [(10, 0.1)], 90).stops


def test_higher_can_be_better():
    halving = Halving(0.5, 2, "higher")
    assert not halving.judge(0, [(5, 0.9)], 10).stops
    assert halving.judge(1, [(5, 0.8)], 10).stops


def test_a_run_is_judged_once_at_each_rung_by_the_first_value_after_it():
    halving = Halving(1 / 9, 3, "lower")
    assert halving.judge(0, [(9, 1.0)], 90) is None
    assert halving.judge(0, [(9, 1.0), (12, 0.8), (20, 0.2)], 90).value == 0.8
    assert halving.judge(0, [(9, 1.0), (12, 0.8), (20, 0.2)], 90) is None
    assert halving.judge(0, [(12, 0.8), (30, 0.3)], 90).reason.startswith("at 33% of its length")


def test_what_is_not_finite_ends():
    assert Halving(0.5, 4, "lower").judge(0, [(5, math.nan)], 10).stops


series = st.dictionaries(
    st.integers(0, 20), st.lists(st.floats(-10, 10), min_size=1, max_size=9), min_size=1, max_size=12
)


@given(series, st.sampled_from(["lower", "higher"]))
def test_a_driver_that_starts_anew_decides_alike(values, better):
    stored = {run: list(enumerate(listed, 1)) for run, listed in values.items()}
    whole = Halving(1 / 9, 3, better)
    for run, listed in stored.items():
        while whole.judge(run, listed, 9) is not None:
            pass
    anew = Halving(1 / 9, 3, better)
    anew.restore(stored, dict.fromkeys(stored, 9))
    everybody = {run for rung in anew.values.values() for run in rung}
    for rung, judged in whole.values.items():
        assert judged.items() <= anew.values[rung].items()
    assert everybody <= set(stored)


def test_the_best_run_is_never_ended():
    halving = Halving(1 / 9, 3, "lower")
    verdicts = {
        run: halving.judge(run, [(10, loss)], 90) for run, loss in enumerate([0.3, 0.9, 0.8, 0.7, 0.1, 0.5])
    }
    assert not verdicts[4].stops


def test_out_of_memory_prunes_the_same_and_larger_micro_batches_of_the_cell():
    failed = spec("batch: {global_size: 32}")
    assert does_not_fit(spec("batch: {global_size: 64}"), failed).startswith("does not fit (by 32)")
    assert does_not_fit(spec("batch: {global_size: 32}\nseeds: [1]"), failed) is not None
    assert does_not_fit(spec("batch: {global_size: 16}"), failed) is None
    # Accumulation keeps the micro-batch small.
    assert does_not_fit(spec("batch: {global_size: 64, micro_size: 16}"), failed) is None


@pytest.mark.parametrize(
    "other",
    ["precision: bf16", "model: {name: tiny}", "task: {name: imdb, max_length: 64}", "hardware: A100"],
)
def test_out_of_memory_says_nothing_of_another_cell(other):
    text = other if other.startswith("task") else f"task: {{name: imdb}}\n{other}"
    cell = validate(parse(f"name: a\n{text}\nbatch: {{global_size: 64}}\n".encode()))
    assert does_not_fit(cell, spec("batch: {global_size: 32}")) is None


def test_a_loss_that_rises_for_good_diverges():
    falling = [2.0 - 0.01 * step for step in range(100)]
    assert not diverges(falling, 2.0)
    assert not diverges([*falling, 9.0], 2.0)  # a single bad batch is none
    assert diverges([*falling, *[9.0] * 10], 2.0)
    assert diverges([*falling, *[math.nan] * 10], 2.0)
    assert not diverges([9.0] * 5, 2.0)  # too short to tell
