"""The answer to the product's question: the cheapest configuration that loses no accuracy.

A recommendation is a choice under constraints with its evidence: what it beats and by how much,
what was excluded and why, and how sure the choice is. Certainty comes from `claims`: the winner
is compared with the runner-up on the objective, and with the most accurate configuration on
accuracy.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from service.analysis.candidates import Better
from service.analysis.claims import Claim, compare
from service.analysis.errors import AnalysisError


@dataclass(frozen=True, slots=True)
class Configuration:
    """One cell of the grid.

    Attributes:
        label: axis values in words, for instance `precision=bf16, batch.global_size=16`.
        point: axis values by dotted name.
        figures: values by metric, then by seed, in the metric's unit.
        failures: failures in words by seed, for instance `does not fit (out_of_memory)`.
    """

    label: str
    point: Mapping[str, Any]
    figures: Mapping[str, Mapping[int, float]]
    failures: Mapping[int, str]

    def mean(self, metric: str) -> float | None:
        """Mean over seeds; None when no seed has the metric."""
        values = self.figures.get(metric)
        return statistics.fmean(values.values()) if values else None


@dataclass(frozen=True, slots=True)
class Constraint:
    """A bound on a metric's mean over seeds.

    Attributes:
        metric: name, with its unit.
        kind: `at_most` and `at_least` bound by `value`; `within_of_best` allows `value` less
            than the best mean among all configurations (more, where lower is better).
        value: in the metric's unit.
        better: which direction wins; used by `within_of_best`.
    """

    metric: str
    kind: Literal["at_most", "at_least", "within_of_best"]
    value: float
    better: Better = "higher"

    def __str__(self) -> str:
        if self.kind == "within_of_best":
            return f"{self.metric} within {self.value:g} of the best"
        return f"{self.metric} {'<=' if self.kind == 'at_most' else '>='} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A choice with its evidence.

    Attributes:
        winner: label of the chosen configuration.
        objective: metric that was minimised (or maximised).
        value: the winner's mean of it.
        runner_up: the next best that meets the constraints; None when there is no other.
        over_runner_up: winner (A) against runner-up (B) on the objective; None when that cannot
            be tested, and then `sure` says why.
        excluded: why each other configuration was left out, by label.
        sure: how sure the choice is, in one sentence.
        text: the answer in words.
    """

    winner: str
    objective: str
    value: float
    runner_up: str | None
    over_runner_up: Claim | None
    excluded: Mapping[str, str]
    sure: str
    text: str


def recommend(
    configurations: Sequence[Configuration],
    *,
    objective: str,
    better: Better = "lower",
    constraints: Sequence[Constraint] = (),
    alpha: float = 0.05,
) -> Recommendation:
    """Choose the best configuration on `objective` among those that meet every constraint.

    Raises:
        AnalysisError: when nothing has results, or nothing meets the constraints; the message
            names the constraint that excludes most.
    """
    if not configurations:
        raise AnalysisError("there is nothing to recommend: the experiment has no runs")
    excluded: dict[str, str] = {}
    eligible: list[Configuration] = []
    bounds = [(constraint, _bound(constraint, configurations)) for constraint in constraints]
    for configuration in configurations:
        reason = _exclusion(configuration, objective, bounds)
        if reason is None:
            eligible.append(configuration)
        else:
            excluded[configuration.label] = reason
    if not eligible:
        raise AnalysisError(
            "no configuration meets every constraint: "
            + "; ".join(f"{label}: {reason}" for label, reason in excluded.items())
        )
    sign = 1.0 if better == "lower" else -1.0
    ordered = sorted(eligible, key=lambda configuration: sign * (configuration.mean(objective) or 0.0))
    winner, runner_up = ordered[0], ordered[1] if len(ordered) > 1 else None
    claim, sure = _certainty(winner, runner_up, objective, better, alpha)
    value = winner.mean(objective)
    assert value is not None  # An eligible configuration has the objective.
    return Recommendation(
        winner=winner.label,
        objective=objective,
        value=value,
        runner_up=runner_up.label if runner_up else None,
        over_runner_up=claim,
        excluded=excluded,
        sure=sure,
        text=_words(winner, runner_up, objective, constraints, excluded, sure),
    )


def _bound(constraint: Constraint, configurations: Sequence[Configuration]) -> float:
    """The value that a mean must reach (or stay under)."""
    if constraint.kind != "within_of_best":
        return constraint.value
    means = [mean for c in configurations if (mean := c.mean(constraint.metric)) is not None]
    if not means:
        raise AnalysisError(f"no run has {constraint.metric}, which a constraint asks for")
    return max(means) - constraint.value if constraint.better == "higher" else min(means) + constraint.value


def _exclusion(
    configuration: Configuration, objective: str, bounds: Sequence[tuple[Constraint, float]]
) -> str | None:
    """Why the configuration cannot be recommended; None when it can."""
    if configuration.mean(objective) is None:
        if configuration.failures:
            return "; ".join(sorted(set(configuration.failures.values())))
        return f"has no {objective}"
    for constraint, bound in bounds:
        mean = configuration.mean(constraint.metric)
        if mean is None:
            return f"has no {constraint.metric}"
        upper = constraint.kind == "at_most" or (
            constraint.kind == "within_of_best" and constraint.better == "lower"
        )
        if mean > bound if upper else mean < bound:
            return (
                f"{constraint.metric} {mean:.4g} misses {constraint} ({'<=' if upper else '>='} {bound:.4g})"
            )
    return None


def _certainty(
    winner: Configuration, runner_up: Configuration | None, objective: str, better: Better, alpha: float
) -> tuple[Claim | None, str]:
    if runner_up is None:
        return None, "it is the only configuration that meets the constraints"
    try:
        claim = compare(
            objective, winner.figures[objective], runner_up.figures[objective], better=better, alpha=alpha
        )
    except AnalysisError as error:
        return None, f"not tested: {error}"
    if claim.verdict == "A is better":
        return claim, f"better than the runner-up at p = {claim.p_value:.2g} ({claim.test})"
    more = f"; about {claim.more_seeds} more seeds would decide" if claim.more_seeds else ""
    return claim, f"undecided against the runner-up at p = {claim.p_value:.2g} ({claim.test}){more}"


def _words(
    winner: Configuration,
    runner_up: Configuration | None,
    objective: str,
    constraints: Sequence[Constraint],
    excluded: Mapping[str, str],
    sure: str,
) -> str:
    value = winner.mean(objective)
    under = f" with {' and '.join(map(str, constraints))}" if constraints else ""
    sentences = [f"Use {winner.label}: {objective} {value:.4g}{under}."]
    if runner_up is not None:
        other = runner_up.mean(objective)
        assert value is not None
        assert other is not None
        change = f" ({value / other - 1:+.1%})" if other else ""
        sentences.append(f"The runner-up, {runner_up.label}, has {other:.4g}{change}.")
    sentences.append(f"How sure: {sure}.")
    if excluded:
        count = f"{len(excluded)} configuration" + ("s were" if len(excluded) > 1 else " was")
        sentences.append(f"{count} excluded.")
    return " ".join(sentences)
