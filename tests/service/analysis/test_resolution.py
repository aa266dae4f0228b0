"""Steps of figures: what seeds are taken to spread by at least, in claims, effects, speed-ups and drifts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from service.analysis.answers import Effects
from service.analysis.cells import Side
from service.analysis.claims import Family
from service.analysis.drift import drift
from service.analysis.effects import effects
from service.analysis.ranking import Configuration
from service.analysis.speedup import ratio
from service.analysis.uncertainty import (
    REPEATABILITY,
    UNKNOWN_EXAMPLES,
    Resolution,
    decimal_step,
    resolution_of,
)


@pytest.mark.parametrize(
    ("metric", "examples", "expected"),
    [
        ("accuracy", 1000.0, 1000),
        ("test_map", 633.0, 633),
        ("accuracy", None, UNKNOWN_EXAMPLES),
        ("accuracy", math.nan, UNKNOWN_EXAMPLES),
        ("accuracy", 20.0, 20),
        ("exact_match_has_answer", 5928.0, UNKNOWN_EXAMPLES),
        ("test_exact_match_has_answer", 30.0, 30),
        ("total_time_s", 1000.0, None),
        ("validation_loss", 1000.0, None),
        ("my_figure", 1000.0, None),
    ],
)
def test_a_share_has_steps_of_its_examples(metric: str, examples: float | None, expected: int | None) -> None:
    assert resolution_of(metric, examples=examples) == Resolution(expected)


@pytest.mark.parametrize(("headline", "expected"), [("test_f1", 50), ("validation_loss", None), (None, None)])
def test_a_score_has_the_steps_of_its_headline(headline: str | None, expected: int | None) -> None:
    for name in ("score", "best_score", "test_score"):
        assert resolution_of(name, headline=headline, examples=50.0) == Resolution(expected)


@pytest.mark.parametrize(
    ("values", "step"),
    [([3.0, 20.0], 1.0), ([3.5, 20.0], 0.1), ([1.25, 0.5], 0.01), ([0.0, 0.0], 1.0), ([1 / 3, 2.0], 1e-9)],
)
def test_decimals_say_how_a_figure_was_rounded(values: list[float], step: float) -> None:
    assert decimal_step(np.array(values)) == pytest.approx(step)


@pytest.mark.parametrize(
    ("values", "step"), [([3.0, 20.0], 0.5), ([1.25, 0.5], 0.005), ([1801.25, -3377.5], 3.3775)]
)
def test_other_figures_have_half_a_decimal_or_what_a_machine_repeats(
    values: list[float], step: float
) -> None:
    assert Resolution(None).run_variance(np.array(values)) == pytest.approx(step**2)


def test_a_share_that_differs_by_many_examples_was_judged_differently_on_as_many() -> None:
    [close, apart] = Resolution(1000).run_variance(np.zeros((2, 4)), np.array([0.0, 0.05]))
    assert close == pytest.approx(1 / (4 * 1000**2))
    assert apart == pytest.approx(0.05 / 2000)


def test_effects_of_seeds_that_agree_are_not_certain() -> None:
    cells = [
        Configuration(f"x={x}", {"x": x}, {"accuracy": dict.fromkeys(range(4), value)}, {})
        for x, value in (("a", 0.90), ("b", 0.89))
    ]

    def asked(examples: int) -> Effects:
        steps = Resolution(examples)

        def family(every: Sequence[Side]) -> Family:
            figures = {side.label: side.values["accuracy"] for side in every}
            return Family("accuracy", figures, better="higher", resolution=steps)

        return effects("accuracy", cells, scale="difference", resolution=steps, family=family)

    few, many = asked(50), asked(5000)
    assert few.terms[0].p_value > 0.05
    assert few.levels[0].low < 0.0 < few.levels[0].high
    assert few.r_squared == pytest.approx(1.0)
    assert many.terms[0].p_value < 0.001


def test_a_speed_up_of_seeds_that_agree_has_a_width() -> None:
    for seeds in ((0, 1), (10, 11)):  # Paired, and not.
        found = ratio({0: 20.5123457, 1: 20.5123457}, dict.fromkeys(seeds, 10.25617285), better="lower")
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert found.low < 2.0 < found.high


def test_reference_runs_that_lie_on_a_line_prove_no_drift_below_what_a_machine_repeats() -> None:
    hours_s = [0.0, 3600.0, 7200.0]
    assert not drift(hours_s, [1.0, 1.0 + REPEATABILITY / 2, 1.0 + REPEATABILITY]).proven
    assert drift(hours_s, [1.0, 1.02, 1.04]).proven
