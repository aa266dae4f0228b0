"""Configurations at their best value of a nuisance axis: the choice, and claims that take it into account."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from service.analysis import AnalysisError
from service.analysis.answers import BadQuestion
from service.analysis.best_over import AtBest
from service.analysis.question import Question
from service.analysis.run_table import RunTable
from service.domain.states import RunState
from tests.service.analysis.building import run, run_table

RATES = [1e-5, 3e-5, 1e-4]
AXES: dict[str, list[Any]] = {"precision": ["fp32", "bf16"], "optimizer.learning_rate": RATES}
BEST = {"fp32": 3e-5, "bf16": 1e-4}


def tuned(point: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Each precision is best at another rate; on the test part the best of all is 1e-5."""
    rate = point["optimizer.learning_rate"]
    accuracy = 0.9 if rate == BEST[point["precision"]] else 0.8
    return {
        "accuracy": accuracy + 0.002 * seed + 0.0001 * RATES.index(rate) * seed,
        "test_score": 0.99 if rate == 1e-5 else 0.7 + 0.01 * seed * (1 + RATES.index(rate)),
        "cost_usd": 10.0 * rate + 0.00001 * seed,
        "total_time_s": 10.0 + seed + 0.1 * seed * (point["precision"] == "bf16"),
        "energy_kwh": 1.0,
    }


def at_best(table: RunTable, *over: str) -> AtBest:
    return AtBest(Question(table), over or ("learning_rate",))


def test_each_configuration_is_at_the_value_that_is_best_on_the_validation_part() -> None:
    answer = at_best(run_table(AXES, of=tuned)).compare()
    assert answer.axes == ("precision",)
    assert answer.tuning is not None
    assert answer.tuning.metric.name == "accuracy"
    assert [(of.label, of.chosen, of.tried, of.seeds) for of in answer.tuning.best] == [
        ("precision=fp32", {"optimizer.learning_rate": 3e-5}, 3, 3),
        ("precision=bf16", {"optimizer.learning_rate": 1e-4}, 3, 3),
    ]
    assert [of.mean for of in answer.tuning.best] == pytest.approx([0.9021, 0.9022])
    spread = answer.rows[0].figures["cost_usd"]
    assert spread is not None
    assert spread.mean == pytest.approx(10.0 * 3e-5 + 0.00001)
    assert any("3 values were tried for each" in note for note in answer.notes)
    assert any("the same seeds chose and are compared" in note for note in answer.notes)


def test_claims_over_the_seeds_that_chose_are_those_of_everything_tried() -> None:
    question = Question(run_table(AXES, of=tuned))
    [pair] = AtBest(question, ["learning_rate"]).compare(metrics=["total_time_s"], claims=True).claims
    sides = {f"precision={p}, optimizer.learning_rate={BEST[p]:g}" for p in BEST}
    [same] = [
        each
        for each in question.compare(metrics=["total_time_s"], claims=True).claims
        if {each.a, each.b} == sides
    ]
    assert pair.claim is not None
    assert same.claim is not None
    assert pair.claim.claims == same.claim.claims == math.comb(6, 2)
    assert (pair.claim.p_value, pair.claim.verdict) == (same.claim.p_value, same.claim.verdict)


def test_claims_over_seeds_that_chose_nothing_are_of_the_rows_alone() -> None:
    table = run_table(AXES, of=tuned)
    fresh = [
        run(100 + number, {"precision": precision, "optimizer.learning_rate": rate}, seed,
            **tuned({"precision": precision, "optimizer.learning_rate": rate}, seed))
        for number, (precision, rate, seed) in enumerate(
            (precision, BEST[precision], seed) for precision in BEST for seed in (7, 8, 9)
        )
    ]  # fmt: skip
    both = RunTable(experiments=(), runs=(*table.runs, *fresh), summaries=table.summaries)
    answer = at_best(both).compare(metrics=["total_time_s"], claims=True)
    assert answer.tuning is not None
    assert answer.tuning.fresh
    assert [of.seeds for of in answer.tuning.best] == [3, 3]
    assert [row.finished for row in answer.rows] == [3, 3]
    [pair] = answer.claims
    assert pair.claim is not None
    assert (pair.claim.claims, pair.claim.pairs) == (1, 3)
    assert pair.claim.mean_a == 18.0
    assert "figures and claims are over seeds that chose nothing: 7, 8, 9" in answer.notes


def test_a_value_of_which_only_lucky_seeds_survived_is_not_chosen() -> None:
    def change(each: Any) -> dict[str, Any]:
        lost = each.point["optimizer.learning_rate"] == BEST["fp32"] and each.seed == 2
        return {"state": RunState.failed, "accuracy": None} if lost else {}

    answer = at_best(run_table(AXES, of=tuned, change=change)).compare()
    assert answer.tuning is not None
    assert answer.tuning.best[0].chosen == {"optimizer.learning_rate": 1e-4}
    assert answer.tuning.best[0].fewer_seeds == ("optimizer.learning_rate=3e-05",)
    assert any(note.startswith("precision=fp32: not eligible") for note in answer.notes)


def test_unequal_numbers_of_tries_are_noted() -> None:
    table = run_table(AXES, of=tuned)
    lost = {"precision": "bf16", "optimizer.learning_rate": 1e-5}
    runs = tuple(each for each in table.runs if each.point != lost)
    answer = at_best(RunTable(experiments=(), runs=runs, summaries=table.summaries)).compare()
    assert any("between 2 and 3 values were tried, which favours" in note for note in answer.notes)


def test_without_any_result_a_configuration_is_left_out_with_its_reason() -> None:
    table = run_table(AXES, of=tuned, change=lambda r: {"accuracy": None} if r.id <= 9 else {})
    answer = at_best(table).compare()
    assert [row.label for row in answer.rows] == ["precision=bf16"]
    assert "precision=fp32 is left out: has no accuracy" in answer.notes


@pytest.mark.parametrize(
    ("over", "says"),
    [
        (["warmup"], "unknown axis 'warmup'"),
        (["precision", "learning_rate"], "needs an axis besides"),
    ],
)
def test_axes_that_leave_nothing_to_compare_are_refused(over: list[str], says: str) -> None:
    with pytest.raises(BadQuestion, match=says) as raised:
        at_best(run_table(AXES, of=tuned), *over)
    assert raised.value.parameter == "best_over"


def test_means_over_further_axes_get_no_claims_from_the_seeds_that_chose() -> None:
    axes = {**AXES, "batch.global_size": [16, 32]}
    question = at_best(run_table(axes, of=tuned))
    assert len(question.compare(by=["precision"]).rows) == 2
    with pytest.raises(AnalysisError, match="run the chosen configurations with fresh seeds"):
        question.compare(by=["precision"], claims=True)


def test_equal_configurations_tried_unequally_often_rarely_get_a_false_claim() -> None:
    """All are equal; one has one rate and the other six."""
    generator = np.random.default_rng(0)
    points: list[dict[str, Any]] = [{"precision": "fp32", "optimizer.learning_rate": 1e-5}]
    points += [{"precision": "bf16", "optimizer.learning_rate": 1e-5 * 2**k} for k in range(6)]
    false, families = 0, 120
    for _ in range(families):
        runs = []
        for point in points:
            for seed in range(5):
                drawn = float(generator.normal(0.8, 0.01))
                runs.append(run(len(runs) + 1, point, seed, accuracy=drawn))
        table = RunTable((), tuple(runs), {each.id: {"validation_examples": 100_000} for each in runs})
        claims = at_best(table).compare(metrics=["accuracy"], claims=True, untested=True).claims
        false += any(each.claim and each.claim.verdict.endswith("better") for each in claims)
    assert false <= 0.05 * families + 1.64 * math.sqrt(families * 0.05 * 0.95)
