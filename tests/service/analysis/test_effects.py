"""Effects against constructed truth, and what seeds in common do to them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas import DataFrame
from scipy import stats
from statsmodels.stats.anova import AnovaRM

from service.analysis import AnalysisError
from service.analysis.answers import Effects, LevelEffect, Scale
from service.analysis.cells import sides
from service.analysis.claims import Family
from service.analysis.effects import effects, sentences
from service.analysis.ranking import Configuration, label_of
from service.analysis.uncertainty import of_blocks
from service.domain.metrics import better_of, scale_of
from tests.drawing import scaled

Value = Callable[[Mapping[str, Any], int], float | None]


def grid(axes: Mapping[str, Sequence[Any]], seeds: int, value: Value, metric: str) -> list[Configuration]:
    """Configurations with a value of each seed; None = no run."""
    cells = []
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        found = {seed: of for seed in range(seeds) if (of := value(point, seed)) is not None}
        cells.append(Configuration(label_of(point), point, {metric: found}, {}))
    return cells


def asked(cells: Sequence[Configuration], metric: str, scale: Scale | None = None) -> Effects:
    """The effects on a metric."""
    better = better_of(metric) or "lower"
    return effects(
        metric,
        cells,
        scale=scale or scale_of(metric),
        family=lambda every: Family(metric, {s.label: s.values[metric] for s in every}, better=better),
    )


def level(model: Effects, axis: str, value: Any) -> LevelEffect:
    """One level effect."""
    [found] = [of for of in model.levels if (of.axis, of.level) == (axis, value)]
    return found


AXES: dict[str, list[Any]] = {"precision": ["fp32", "bf16"], "batch.global_size": [8, 16, 32]}


def times(interaction: float = 0.0, noise: float = 0.02, seeds: int = 4) -> list[Configuration]:
    """Seconds: bf16 takes 40% of fp32, each doubling of the batch takes 80%."""
    generator = np.random.default_rng(1)

    def seconds(point: Mapping[str, Any], seed: int) -> float:
        found = 100.0 * (0.4 if point["precision"] == "bf16" else 1.0)
        found *= 0.8 ** math.log2(point["batch.global_size"] / 8)
        if point == {"precision": "bf16", "batch.global_size": 32}:
            found *= 1.0 + interaction
        return found * math.exp(generator.normal(0.0, noise))

    return grid(AXES, seeds, seconds, "total_time_s")


def test_a_ratio_is_recovered_with_its_interval() -> None:
    model = asked(times(), "total_time_s")
    bf16 = level(model, "precision", "bf16")
    assert (bf16.baseline, bf16.verdict) == ("fp32", "better")
    assert bf16.low < -0.6 < bf16.high
    assert bf16.high - bf16.low < 0.05
    assert level(model, "batch.global_size", 32).effect == pytest.approx(0.8**2 - 1, abs=0.02)
    assert model.r_squared > 0.99


def test_an_option_of_one_value_alone_is_no_factor() -> None:
    cells = [
        replace(cell, point={**cell.point, "implementation": "fused"})
        if cell.point["precision"] == "bf16"
        else cell
        for cell in times()
    ]
    assert asked(cells, "total_time_s").levels == asked(times(), "total_time_s").levels
    axes = {"hardware": ["a", "b"], **AXES}
    other = [
        replace(cell, point={name: of for name, of in cell.point.items() if name != "precision"})
        if cell.point["hardware"] == "b"
        else cell
        for cell in grid(axes, 2, lambda point, seed: 1.0 + seed, "total_time_s")
    ]
    with pytest.raises(AnalysisError, match="has no precision, which others vary; leave out runs"):
        asked(other, "total_time_s")


def test_no_interaction_is_found_where_there_is_none_and_one_where_there_is() -> None:
    def p_value(cells: list[Configuration]) -> float:
        terms = {term.axes: term for term in asked(cells, "total_time_s").terms}
        return terms["precision", "batch.global_size"].p_value

    assert p_value(times()) > 0.05
    assert p_value(times(interaction=0.5)) < 1e-3


# -- Seeds in common ---------------------------------------------------------------------------


def test_runs_of_one_seed_that_are_alike_count_once() -> None:
    """24 runs whose precision changes nothing: three seeds, not six, tell batch sizes apart."""
    axes = {
        "precision": ["fp32", "bf16"],
        "batch.global_size": [16, 64],
        "optimizer.learning_rate": [1e-4, 3e-4],
    }
    generator = np.random.default_rng(4)
    of_seed = {
        (batch, rate, seed): 0.8 - 0.03 * (batch == 64) + float(generator.normal(0.0, 0.05))
        for batch, rate, seed in itertools.product([16, 64], [1e-4, 3e-4], range(3))
    }

    def accuracy(point: Mapping[str, Any], seed: int) -> float:
        shared = of_seed[point["batch.global_size"], point["optimizer.learning_rate"], seed]
        return shared + float(generator.normal(0.0, 0.0005))

    cells = grid(axes, 3, accuracy, "accuracy")
    every, _ = sides(cells, ["batch.global_size"], ["accuracy"])
    claim = Family("accuracy", {s.label: s.values["accuracy"] for s in every}, better="higher").claim(
        "batch.global_size=64", "batch.global_size=16"
    )
    effect = level(asked(cells, "accuracy"), "batch.global_size", 64)
    assert (effect.verdict, effect.p_value) == ("undecided", claim.p_value)
    assert (effect.effect, effect.low, effect.high) == (claim.difference, claim.low, claim.high)
    # A model that takes runs for independent is sure of itself.
    left, right = (
        [
            value
            for c in cells
            if c.point["batch.global_size"] == batch
            for value in c.figures["accuracy"].values()
        ]
        for batch in (16, 64)
    )
    assert stats.ttest_ind(left, right).pvalue < effect.p_value


@pytest.mark.parametrize(
    "correlation", [*(pytest.param(r, marks=pytest.mark.slow) for r in (0.0, 0.5)), 0.99]
)
@pytest.mark.parametrize("missing", [False, True])
def test_effects_that_are_none_are_claimed_as_rarely_as_promised(correlation: float, missing: bool) -> None:
    """150 grids of 2 x 3 cells; runs of one seed and batch correlate. Each term for itself."""
    generator = np.random.default_rng(int(100 * correlation))
    wrong = dict.fromkeys(("precision", "batch.global_size", "interaction"), 0)
    trials = 150
    for _ in range(trials):
        shared = generator.normal(0.0, math.sqrt(correlation), (3, 4))
        own = generator.normal(0.0, math.sqrt(1 - correlation), (2, 3, 4))

        def value(point: Mapping[str, Any], seed: int, of: Any = shared[None] + own) -> float | None:
            at = [AXES[name].index(point[name]) for name in AXES]
            return None if missing and (*at, seed) in ((0, 0, 0), (1, 2, 3)) else 100.0 + float(of[*at, seed])

        model = asked(grid(AXES, 4, value, "loss"), "loss", "difference")
        for term in model.terms:
            wrong[term.axes[0] if len(term.axes) == 1 else "interaction"] += term.p_value < 0.05
    assert max(wrong.values()) / trials <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / trials)


def test_a_seed_that_shifts_every_cell_alike_changes_nothing() -> None:
    generator = np.random.default_rng(0)
    noise = generator.normal(0.0, 1.0, (2, 3, 5))

    def value(point: Mapping[str, Any], seed: int, shift: float) -> float:
        at = [AXES[name].index(point[name]) for name in AXES]
        return float(noise[*at, seed]) + shift * seed

    plain, shifted = (
        asked(grid(AXES, 5, lambda point, seed, by=by: value(point, seed, by), "loss"), "loss", "difference")
        for by in (0.0, 50.0)
    )
    for one, other in zip(plain.terms, shifted.terms, strict=True):
        assert one.p_value == pytest.approx(other.p_value)


# -- Against other implementations ---------------------------------------------------------------


@settings(max_examples=scaled(30), deadline=None)
@given(seeds=st.integers(2, 12), effect=st.floats(-2, 2), random=st.integers(0, 2**32))
def test_two_values_are_the_paired_t_test_of_scipy(seeds: int, effect: float, random: int) -> None:
    generator = np.random.default_rng(random)
    values = 100.0 + generator.normal(0.0, 1.0, (2, 2, seeds)) + np.array([0.0, effect])[:, None, None]
    axes = {"a": [0, 1], "b": [0, 1]}
    model = asked(grid(axes, seeds, lambda p, s: float(values[p["a"], p["b"], s]), "x"), "x", "difference")
    means = values.mean(axis=1)
    differences = (values[0, 0] - values[0, 1]) - (values[1, 0] - values[1, 1])
    least = 2 * (1e-3 * np.abs(values).max()) ** 2
    expected = {("a",): means[0] - means[1], ("a", "b"): differences / 2}
    for term in model.terms:
        if term.axes in expected and expected[term.axes].var(ddof=1) > 2 * least:
            reference = stats.ttest_1samp(expected[term.axes], 0.0).pvalue
            assert term.p_value == pytest.approx(reference)


def test_an_interaction_is_repeated_measures_analysis_of_variance_by_the_lower_bound() -> None:
    generator = np.random.default_rng(3)
    axes = {"a": [0, 1, 2], "b": [0, 1, 2, 3]}
    values = (
        100.0 + generator.normal(0.0, 1.0, (3, 4, 6)) + np.arange(3)[:, None, None] * np.arange(4)[:, None]
    )
    cells = grid(axes, 6, lambda p, s: float(values[p["a"], p["b"], s]), "x")
    rows = [
        {"a": a, "b": b, "seed": s, "x": values[a, b, s]}
        for a, b, s in itertools.product(range(3), range(4), range(6))
    ]
    table = AnovaRM(DataFrame(rows), "x", "seed", within=["a", "b"]).fit().anova_table
    f = float(table.loc["a:b", "F Value"])
    [term] = [term for term in asked(cells, "x", "difference").terms if len(term.axes) == 2]
    assert term.p_value == pytest.approx(stats.f.sf(f, 1, 5))


@pytest.mark.parametrize("ratio", [1.0, 0.3, 0.0])
@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_blocks_keep_their_rate_whatever_the_variances_are(seeds: int, ratio: float) -> None:
    """Six contrasts of variances 1, r, r^2, ...: alike, unlike, and all in one."""
    generator = np.random.default_rng(seeds)
    spread = np.sqrt(ratio ** np.arange(6))
    _, p_values = of_blocks(generator.normal(0.0, 1.0, (20_000, seeds, 6)) * spread, 0.0)
    assert (p_values < 0.05).mean() <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 20_000)


@settings(max_examples=scaled(50), deadline=None)
@given(cells=st.integers(2, 4), seeds=st.integers(1, 4), random=st.integers(0, 2**32))
def test_the_explained_share_is_that_of_least_squares(cells: int, seeds: int, random: int) -> None:
    """One axis: the share of the squares between groups."""
    generator = np.random.default_rng(random)
    values = generator.normal(100.0, 1.0, (cells, seeds + 1))
    counts = generator.integers(2, seeds + 2, cells)

    def value(point: Mapping[str, Any], seed: int) -> float | None:
        return float(values[point["a"], seed]) if seed < counts[point["a"]] else None

    model = asked(grid({"a": list(range(cells))}, seeds + 1, value, "x"), "x", "difference")
    groups = [values[k, : counts[k]] for k in range(cells)]
    every = np.concatenate(groups)
    within = sum(((group - group.mean()) ** 2).sum() for group in groups)
    assert model.r_squared == pytest.approx(1 - within / ((every - every.mean()) ** 2).sum())


def test_shares_are_those_of_the_sum_of_squares() -> None:
    """Two axes and a seed, each its own part of the variance: 4, 1 and 0.25."""
    signs = {0: -1.0, 1: 1.0}

    def value(point: Mapping[str, Any], seed: int) -> float:
        return 10.0 + 2.0 * signs[point["a"]] + signs[point["b"]] + 0.5 * signs[seed]

    model = asked(grid({"a": [0, 1], "b": [0, 1]}, 2, value, "x"), "x", "difference")
    assert {term.axes: term.share for term in model.terms} == pytest.approx(
        {("a",): 4 / 5.25, ("b",): 1 / 5.25, ("a", "b"): 0.0}
    )
    assert model.r_squared == pytest.approx(5 / 5.25)
    same = asked(grid({"a": [0, 1], "b": [0, 1]}, 2, lambda p, s: 3.0, "x"), "x", "difference")
    assert [term.share for term in same.terms] == [0.0] * 3
    assert same.r_squared == 1.0


def test_interactions_of_three_axes_are_over_the_cells_of_the_third() -> None:
    generator = np.random.default_rng(5)
    values = 100.0 + generator.normal(0.0, 1.0, (2, 2, 2, 5))
    axes = {"a": [0, 1], "b": [0, 1], "c": [0, 1]}
    whole = grid(axes, 5, lambda p, s: float(values[p["a"], p["b"], p["c"], s]), "x")

    def expected(of: Any) -> float:
        return float(stats.ttest_1samp(of[0, 0] - of[0, 1] - of[1, 0] + of[1, 1], 0.0).pvalue)

    model = asked(whole, "x", "difference")
    terms = {term.axes: term.p_value for term in model.terms}
    assert model.left_out == ()
    assert terms["a", "b"] == pytest.approx(expected(values.mean(axis=2)))
    assert terms["b", "c"] == pytest.approx(expected(values.mean(axis=0)))
    # Without one cell, a and b interact where c is 0; other pairs likewise.
    part = asked([c for c in whole if c.point != {"a": 1, "b": 1, "c": 1}], "x", "difference")
    assert part.left_out == ()
    assert {term.axes: term.p_value for term in part.terms}["a", "b"] == pytest.approx(
        expected(values[:, :, 0])
    )


def test_an_interaction_of_seeds_that_agree_is_judged_by_its_size_in_examples() -> None:
    cells = grid({"a": [0, 1], "b": [0, 1]}, 3, lambda p, s: 0.8 if p["a"] and p["b"] else 0.9, "accuracy")
    [term] = [term for term in asked(cells, "accuracy").terms if len(term.axes) == 2]
    # The contrast is 0.1 / 2; of 100 examples that is a variance of 0.05 / 200 at least.
    assert term.p_value == pytest.approx(stats.f.sf(3 * 0.05**2 / (0.05 / 200), 1, 2))


def test_seeds_that_are_not_normal_are_said() -> None:
    generator = np.random.default_rng(2)
    noise = generator.normal(0.0, 1.0, (4, 6))

    def checks(outlier: float) -> tuple[str, ...]:
        def value(point: Mapping[str, Any], seed: int) -> float:
            return 100.0 + float(noise[point["a"], seed]) + (outlier if (point["a"], seed) == (0, 3) else 0.0)

        return asked(grid({"a": [0, 1, 2, 3]}, 6, value, "x"), "x", "difference").checks

    assert checks(0.0) == ()
    assert checks(50.0) == (
        "what seeds add to cells is not normal (Shapiro-Wilk p < 0.01): p-values are approximate",
    )


def test_an_effect_without_an_end_says_so() -> None:
    cells = grid({"x": ["a", "b"]}, 2, lambda p, s: [[0.1, 2.0], [1.0, 3.0]][p["x"] == "b"][s], "t")
    [sentence] = sentences(asked(cells, "t", "ratio"))
    assert sentence == "x=b against a: t +90.5% (+12.1% to no bound)"


# -- What is missing -----------------------------------------------------------------------------


def test_a_cell_of_one_seed_leaves_nothing_to_tell_from_noise() -> None:
    cells = times()
    slow = {seed: value for seed, value in cells[0].figures["total_time_s"].items() if seed == 3}
    cells[0] = Configuration(cells[0].label, cells[0].point, {"total_time_s": slow}, {})
    with pytest.raises(AnalysisError, match=r"precision=fp32 \(B\): B has one seed with total_time_s"):
        asked(cells, "total_time_s")


def test_one_seed_less_is_left_out_where_it_is_missing() -> None:
    cells = times(noise=1e-6)
    kept = {seed: value for seed, value in cells[0].figures["total_time_s"].items() if seed != 0}
    cells[0] = Configuration(cells[0].label, cells[0].point, {"total_time_s": kept}, {})
    model = asked(cells, "total_time_s")
    assert level(model, "precision", "bf16").effect == pytest.approx(-0.6, abs=1e-4)
    assert {term.axes: term.seeds for term in model.terms}["precision", "batch.global_size"] == 3
    assert "cells have between 3 and 4 seeds" in model.checks


def test_a_missing_cell_is_said_and_its_effect_is_over_the_others() -> None:
    cells = [c for c in times() if c.point != {"precision": "bf16", "batch.global_size": 32}]
    model = asked(cells, "total_time_s")
    assert model.left_out == (("precision", "batch.global_size"),)
    assert any("1 of 6 cells have no run" in check for check in model.checks)
    assert any("batch.global_size=32 is left out" in check for check in model.checks)
    assert level(model, "precision", "bf16").effect == pytest.approx(-0.6, abs=0.02)


def test_other_seeds_in_each_cell_are_judged_by_welch_and_have_no_interaction() -> None:
    cells = [
        Configuration(c.label, c.point, {m: {s + 10 * k: v for s, v in of.items()}}, {})
        for k, c in enumerate(times())
        for m, of in c.figures.items()
    ]
    model = asked([c for c in cells if c.point["batch.global_size"] == 8], "total_time_s")
    assert level(model, "precision", "bf16").verdict == "better"
    assert model.left_out == ()
    with pytest.raises(AnalysisError, match="a claim needs at least two"):
        asked(cells, "total_time_s")  # No seed ran two cells, so that no side has one.


def test_runs_that_repeat_exactly_are_judged_by_what_a_figure_can_tell() -> None:
    model = asked(
        grid({"x": ["a", "b"]}, 2, lambda p, s: 1.0 if p["x"] == "a" else 2.0, "t"), "t", "difference"
    )
    assert model.levels[0].effect == pytest.approx(1.0)
    # Whole seconds, two a side, tell 1 from 2 no better than this.
    assert model.terms[0].p_value > 0.05
    assert model.levels[0].low < 0.0 < model.levels[0].high
    finer = grid({"x": ["a", "b"]}, 3, lambda p, s: 1.0625 if p["x"] == "a" else 2.0625, "t")
    assert asked(finer, "t", "difference").terms[0].p_value < 1e-3


def constant(point: Mapping[str, Any], seed: int) -> float:
    """The seed, from 1 on."""
    return 1.0 + seed


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ([], "no run has t"),
        (grid({"x": [1]}, 2, constant, "t"), "only one value"),
        (grid({"x": [1, 2]}, 1, constant, "t"), "a claim needs at least two"),
        (grid({"x": [1, 2]}, 2, lambda p, s: 0.0, "t"), "positive values"),
        (
            [c for c in grid({"x": [1, 2], "y": [1, 2]}, 3, constant, "t") if len({*c.point.values()}) == 1],
            "compare configurations instead",
        ),
    ],
)
def test_a_question_that_the_runs_cannot_answer_is_refused(cells: list[Configuration], says: str) -> None:
    with pytest.raises(AnalysisError, match=says):
        asked(cells, "t", "ratio")
