"""Effects against constructed truth."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from service.analysis import AnalysisError
from service.analysis.effects import Observation, effects


def times(*, interaction: float = 0.0, noise: float = 0.02, seeds: int = 4) -> list[Observation]:
    """Seconds: bf16 takes 40% of fp32, each doubling of the batch takes 80%."""
    generator = np.random.default_rng(1)
    rows = []
    for precision, batch, _ in itertools.product(("fp32", "bf16"), (8, 16, 32), range(seeds)):
        seconds = 100.0 * (0.4 if precision == "bf16" else 1.0) * 0.8 ** math.log2(batch / 8)
        if precision == "bf16" and batch == 32:
            seconds *= 1.0 + interaction
        seconds *= math.exp(generator.normal(0.0, noise))
        rows.append(Observation({"precision": precision, "batch.global_size": batch}, seconds))
    return rows


def test_a_ratio_is_recovered_with_its_interval() -> None:
    result = effects("total_time_s", times(), scale="ratio")
    by_level = {(level.axis, level.level): level for level in result.levels}
    bf16 = by_level["precision", "bf16"]
    assert bf16.baseline == "fp32"
    assert bf16.low < -0.6 < bf16.high
    assert bf16.high - bf16.low < 0.05
    assert by_level["batch.global_size", 32].effect == pytest.approx(0.8**2 - 1, abs=0.02)
    assert result.r_squared > 0.99


def test_no_interaction_is_found_where_there_is_none_and_one_where_there_is() -> None:
    def p_value(rows: list[Observation]) -> float:
        terms = {term.axes: term for term in effects("t", rows, scale="ratio").terms}
        return terms["precision", "batch.global_size"].p_value

    assert p_value(times()) > 0.05
    assert p_value(times(interaction=0.5)) < 1e-6


def test_one_axis_agrees_with_one_way_analysis_of_variance() -> None:
    generator = np.random.default_rng(2)
    groups = {level: generator.normal(mean, 1.0, 6) for level, mean in (("a", 0.0), ("b", 0.5), ("c", 1.0))}
    rows = [Observation({"x": level}, value) for level, values in groups.items() for value in values]
    [term] = effects("accuracy", rows, scale="difference").terms
    expected = stats.f_oneway(*groups.values())
    assert (term.f, term.p_value) == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue))


def test_missing_seeds_do_not_bias_the_means() -> None:
    rows = times(noise=1e-6)
    slow = [row for row in rows if row.point == {"precision": "fp32", "batch.global_size": 8}]
    result = effects("t", [row for row in rows if row not in slow[:3]], scale="ratio")
    [bf16] = [level for level in result.levels if level.level == "bf16"]
    assert bf16.effect == pytest.approx(-0.6, abs=1e-4)
    assert "cells have between 1 and 4 runs" in result.checks


def test_a_missing_cell_is_said() -> None:
    rows = [row for row in times() if row.point != {"precision": "bf16", "batch.global_size": 32}]
    result = effects("t", rows, scale="ratio")
    assert result.left_out == (("precision", "batch.global_size"),)
    assert any("1 of 6 cells have no run" in check for check in result.checks)


def test_runs_that_repeat_exactly_are_judged_by_what_a_figure_can_tell() -> None:
    rows = [Observation({"x": x}, value) for x, value in (("a", 1.0), ("a", 1.0), ("b", 2.0), ("b", 2.0))]
    result = effects("t", rows, scale="difference")
    assert result.levels[0].effect == pytest.approx(1.0)
    # Whole seconds, two a side, tell 1 from 2 no better than this.
    assert result.terms[0].p_value > 0.05
    assert result.levels[0].low < 0.0 < result.levels[0].high
    finer = [Observation(row.point, row.value + 0.0625) for row in rows]
    assert effects("t", finer, scale="difference").terms[0].p_value < 1e-4


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "no run has t"),
        ([Observation({"x": 1}, 1.0), Observation({"x": 1}, 2.0)], "only one value"),
        ([Observation({"x": 1}, 1.0), Observation({"x": 2}, 2.0)], "add seeds"),
        ([Observation({"x": 1}, 1.0), Observation({"x": 2}, math.nan)], "not finite"),
        ([Observation({"x": 1}, 1.0), Observation({"x": 2}, 0.0)], "positive values"),
        (
            [Observation({"x": n % 2, "y": n % 2}, 1.0 + n) for n in range(8)],
            "always change together",
        ),
    ],
)
def test_a_question_that_the_rows_cannot_answer_is_refused(rows: list[Observation], says: str) -> None:
    with pytest.raises(AnalysisError, match=says):
        effects("t", rows, scale="ratio")
