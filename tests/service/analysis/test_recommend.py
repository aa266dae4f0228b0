"""Recommendations: the choice, its constraints, what is excluded and how sure it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from service.analysis import AnalysisError
from service.analysis.answers import BadQuestion
from service.analysis.question import Question
from service.analysis.ranking import Configuration
from service.analysis.recommend import Constraint
from tests.service.analysis.building import recommend, run_table
from tests.service.analysis.test_one_answer import experiment


def configuration(label: str, cost: float, accuracy: float, seeds: int = 4) -> Configuration:
    """Costs and accuracies that differ a little from seed to seed."""
    return Configuration(
        label=label,
        point={"precision": label},
        figures={
            "cost_usd": {seed: cost * (1 + 0.001 * seed) for seed in range(seeds)},
            "accuracy": {seed: accuracy + 0.0001 * seed for seed in range(seeds)},
        },
        failures={},
    )


GRID = [
    configuration("fp32", 2.0, 0.930),
    configuration("bf16", 1.0, 0.928),
    configuration("tiny", 0.1, 0.700),
]
NO_LOSS = Constraint("accuracy", "within_of_best", 0.005)


def test_the_cheapest_within_the_constraint_wins_and_the_rest_is_explained() -> None:
    answer = recommend(GRID, objective="cost_usd", constraints=[NO_LOSS])
    assert (answer.winner, answer.runner_up) == ("bf16", "fp32")
    assert answer.excluded == {"tiny": "accuracy 0.7001 misses accuracy within 0.005 of the best (>= 0.9252)"}
    assert answer.over_runner_up is not None
    assert answer.over_runner_up.verdict == "A is better"
    assert answer.text.startswith("Use bf16: cost_usd 1.002 with accuracy within 0.005 of the best.")
    assert "(-50.0%)" in answer.text
    assert "1 configuration was excluded" in answer.text


def test_without_constraints_the_cheapest_wins() -> None:
    assert recommend(GRID, objective="cost_usd").winner == "tiny"


def test_an_objective_may_be_maximised_under_a_budget() -> None:
    budget = Constraint("cost_usd", "at_most", 1.5)
    assert recommend(GRID, objective="accuracy", better="higher", constraints=[budget]).winner == "bf16"


def test_the_best_is_one_of_those_within_the_limits() -> None:
    limit = Constraint("cost_usd", "at_most", 0.5)
    answer = recommend(GRID, objective="cost_usd", constraints=[NO_LOSS, limit])
    assert answer.winner == "tiny"
    assert answer.excluded.keys() == {"fp32", "bf16"}
    assert "it also has the best accuracy" in answer.sure


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        (Constraint("cost_usd", "at_most", 0.5), "cost_usd 2.003 is above the limit of 0.5"),
        (Constraint("accuracy", "at_least", 0.95), "accuracy 0.9302 is below the limit of 0.95"),
    ],
)
def test_a_missed_limit_is_said_with_the_value_and_the_limit_once(limit: Constraint, reason: str) -> None:
    kept = configuration("kept", 0.1, 0.99)
    answer = recommend([GRID[0], kept], objective="cost_usd", constraints=[limit])
    assert answer.excluded == {"fp32": reason}


def test_one_seed_is_recommended_but_not_claimed() -> None:
    grid = [configuration("a", 1.0, 0.9, seeds=1), configuration("b", 2.0, 0.9, seeds=1)]
    answer = recommend(grid, objective="cost_usd")
    assert answer.winner == "a"
    assert answer.over_runner_up is None
    assert "a claim needs at least two" in answer.sure


def test_what_did_not_fit_is_excluded_with_its_reason() -> None:
    failed = Configuration("big", {}, {}, {0: "does not fit (out_of_memory)"})
    answer = recommend([*GRID, failed], objective="cost_usd")
    assert answer.excluded == {"big": "does not fit (out_of_memory)"}


def test_nothing_that_meets_the_constraints_is_said_with_each_reason() -> None:
    impossible = Constraint("accuracy", "at_least", 0.99)
    with pytest.raises(AnalysisError, match=r"no configuration meets.*fp32: accuracy.*tiny: accuracy"):
        recommend(GRID, objective="cost_usd", constraints=[impossible])


def noisy(label: str, cost: float, accuracies: tuple[float, ...]) -> Configuration:
    """A configuration whose accuracy differs much from seed to seed."""
    return Configuration(
        label=label,
        point={"precision": label},
        figures={
            "cost_usd": {seed: cost * (1 + 0.001 * seed) for seed in range(len(accuracies))},
            "accuracy": dict(enumerate(accuracies)),
        },
        failures={},
    )


def test_a_cheaper_configuration_that_only_noise_excludes_is_named() -> None:
    grid = [noisy("best", 1.0, (0.5, 0.6, 0.7)), noisy("cheap", 0.8, (0.66, 0.5, 0.52))]
    answer = recommend(grid, objective="cost_usd", constraints=[NO_LOSS])
    assert answer.winner == "best"
    assert "cheap (cost_usd -20.0%) was excluded by its mean, but is not shown to be worse" in answer.sure
    assert "more seeds would decide" in answer.sure


def test_a_cheaper_configuration_that_is_worse_is_not_excused() -> None:
    answer = recommend(GRID, objective="cost_usd", constraints=[NO_LOSS])
    assert "tiny" not in answer.sure


def test_a_cheaper_configuration_that_breaks_a_bound_is_not_excused() -> None:
    grid = [noisy("best", 1.0, (0.5, 0.6, 0.7)), noisy("cheap", 0.8, (0.66, 0.5, 0.52))]
    answer = recommend(
        grid, objective="cost_usd", constraints=[NO_LOSS, Constraint("accuracy", "at_least", 0.58)]
    )
    assert "cheap" not in answer.sure


DEVICES = {"hardware": ["v100", "a100", "old"], "precision": ["fp32", "fp16"]}


def on_devices(point: Any, seed: int) -> dict[str, Any]:
    """fp16 saves half on the v100 and nothing on the a100; the old device is cheap and inaccurate."""
    base = {"v100": 2.0, "a100": 3.0, "old": 1.0}[point["hardware"]]
    factor = {("v100", "fp16"): 0.5, ("a100", "fp16"): 1.1}.get((point["hardware"], point["precision"]), 1.0)
    cost = base * factor * (1 + 0.01 * seed + 0.001 * (point["precision"] == "fp16") * seed)
    accuracy = 0.8 if point["hardware"] == "old" else 0.9
    return {"cost_usd": cost, "accuracy": accuracy + 0.001 * seed, "total_time_s": cost}


def test_each_value_of_an_axis_gets_the_best_configuration_among_its_own() -> None:
    answer = Question(run_table(DEVICES, of=on_devices)).recommend(per="hardware")
    assert answer.per is not None
    winners = {value: choice.winner for value, choice in answer.per.choices.items()}
    assert winners == {
        "hardware=v100": "hardware=v100, precision=fp16",
        "hardware=a100": "hardware=a100, precision=fp32",
        "hardware=old": "hardware=old, precision=fp32",
    }
    assert answer.winner == "hardware=v100, precision=fp16"
    assert answer.per.best == "hardware=old"
    assert answer.per.text.startswith("The best on cost_usd is hardware=old: 1.01 with hardware=old, prec")
    assert "Among all configurations it is excluded: accuracy 0.801 misses" in answer.per.text
    assert answer == replace(Question(run_table(DEVICES, of=on_devices)).recommend(), per=answer.per)


def test_a_value_without_any_result_has_the_reason_in_place_of_a_choice() -> None:
    table = run_table(DEVICES, of=on_devices, change=lambda r: {"cost_usd": None} if r.id > 12 else {})
    per = Question(table).recommend(per="hardware").per
    assert per is not None
    assert per.best == "hardware=v100"
    assert per.left_out.keys() == {"hardware=old"}
    assert "has no cost_usd" in per.left_out["hardware=old"]


def test_linked_axes_are_named_by_one_of_their_fields() -> None:
    axes = {"hardware+resources.cpus_per_worker": ["v100+4", "a100+8"], "precision": ["fp32", "fp16"]}

    def figures(point: Any, seed: int) -> dict[str, Any]:
        return on_devices({"hardware": point["hardware+resources.cpus_per_worker"][:4], **point}, seed)

    per = Question(run_table(axes, of=figures)).recommend(per="hardware").per
    assert per is not None
    assert list(per.choices) == [f"hardware+resources.cpus_per_worker={v}" for v in ("v100+4", "a100+8")]


@pytest.mark.parametrize(
    ("axis", "says"), [("device", "unknown axis 'device'"), ("precision", "precision has only one value")]
)
def test_an_axis_that_decides_nothing_is_refused(axis: str, says: str) -> None:
    with pytest.raises(BadQuestion, match=says) as raised:
        Question(run_table({"precision": ["fp32"], "batch.global_size": [16, 32]})).recommend(per=axis)
    assert raised.value.parameter == "per"


@pytest.mark.parametrize("number", range(1, 60, 3))
def test_each_choice_is_that_of_a_filter_and_its_claims_those_of_all_pairs(number: int) -> None:
    """A filter's choice differs at most in how many claims its p-values are corrected for."""
    table = experiment(number)
    question = Question(table)
    if len(question.axes) < 2:
        return
    try:
        per = question.recommend(per=question.axes[0]).per
    except AnalysisError:
        return
    assert per is not None
    for value, choice in per.choices.items():
        runs = tuple(run for run in table.runs if f"{per.axis}={run.point[per.axis]}" == value)
        alone = Question(replace(table, runs=runs)).recommend()
        assert (choice.winner, choice.runner_up, choice.value) == (alone.winner, alone.runner_up, alone.value)
        assert choice.excluded.keys() == alone.excluded.keys()
    assert per.choices[per.best].value == min(choice.value for choice in per.choices.values())
