"""Recommendations: the choice, its constraints, what is excluded and how sure it is."""

from __future__ import annotations

import pytest

from service.analysis import AnalysisError
from service.analysis.recommend import Configuration, Constraint, recommend


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


def test_an_empty_experiment_is_refused() -> None:
    with pytest.raises(AnalysisError, match="no runs"):
        recommend([], objective="cost_usd")


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
