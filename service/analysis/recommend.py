"""The cheapest configuration that loses no accuracy.

A recommendation is a choice under constraints with its evidence: what it beats and by how much, what was
excluded and why, and how sure the choice is. The winner is compared with the runner-up on the objective, and
with the most accurate configuration on accuracy. All were picked from the figures that they are tested
on, so their claims are those of the family of all pairs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from service.analysis.answers import AnalysisError, ChosenConfiguration, Claim, PerValue
from service.analysis.claims import Family
from service.analysis.ranking import Configuration
from service.analysis.words import correction_words
from service.domain.metrics import MARGINS
from trainers.metrics import Better


@dataclass(frozen=True, slots=True)
class Constraint:
    """A bound on a metric's mean over seeds.

    `at_most` and `at_least` bound by `value`; `within_of_best` allows `value` less than the best mean
    (more, where lower is better) among those that meet all other bounds.
    """

    metric: str
    kind: Literal["at_most", "at_least", "within_of_best"]
    value: float
    better: Better = "higher"

    @property
    def is_limit(self) -> bool:
        return self.kind != "within_of_best"

    def __str__(self) -> str:
        if not self.is_limit:
            return f"{self.metric} within {self.value:g} of the best"
        return f"{self.metric} {'<=' if self.kind == 'at_most' else '>='} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Rules:
    """What is chosen by."""

    objective: str
    better: Better
    constraints: Sequence[Constraint]
    family: Callable[[str, Better, float | None], Family]
    """Makes claims about all pairs of configurations, by metric, direction and margin."""

    @property
    def sign(self) -> float:
        return 1.0 if self.better == "lower" else -1.0

    def on_objective(self, a: str, b: str) -> Claim:
        margin = MARGINS.get(self.objective)
        return self.family(self.objective, self.better, margin).claim(a, b)


def recommend(configurations: Sequence[Configuration], rules: Rules) -> ChosenConfiguration:
    """Chooses the best configuration on the objective among those that meet every constraint.

    Raises `AnalysisError` when nothing meets the constraints, naming the one that excludes most.
    """
    objective, constraints = rules.objective, rules.constraints
    excluded: dict[str, str] = {}
    eligible: list[Configuration] = []
    limits = [(constraint, constraint.value) for constraint in constraints if constraint.is_limit]
    # The best mean is taken among those within the limits.
    among = [each for each in configurations if _missed(each, limits) is None] or configurations
    bounds = [(constraint, _bound(constraint, among)) for constraint in constraints]
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
    ordered = sorted(eligible, key=lambda configuration: rules.sign * (configuration.mean(objective) or 0.0))
    winner, runner_up = ordered[0], ordered[1] if len(ordered) > 1 else None
    claim, sure = _certainty(winner, runner_up, rules)
    against_best, doubts = _against_best(winner, among, constraints, rules)
    overlooked = _not_shown_worse(winner, among, bounds, rules)
    sure = "; ".join((sure, *doubts, *overlooked))
    value = winner.mean(objective)
    assert value is not None  # An eligible configuration has the objective.
    return ChosenConfiguration(
        winner=winner.label,
        winner_point=winner.point,
        objective=objective,
        value=value,
        runner_up=runner_up.label if runner_up else None,
        over_runner_up=claim,
        against_best=against_best,
        excluded=excluded,
        sure=sure,
        text=_words(winner, runner_up, rules, excluded, sure),
    )


def recommend_per(
    axis: str,
    groups: Mapping[str, Sequence[Configuration]],
    overall: ChosenConfiguration,
    rules: Rules,
) -> PerValue:
    """Chooses for each value of an axis among its configurations, by `recommend`, and among the choices.

    Claims are those of the family of all configurations, so that any may be picked by its figures.
    """
    choices: dict[str, ChosenConfiguration] = {}
    left_out: dict[str, str] = {}
    for value, configurations in groups.items():
        try:
            choices[value] = recommend(configurations, rules)
        except AnalysisError as error:
            left_out[value] = str(error)
    best, *others = sorted(choices, key=lambda value: rules.sign * choices[value].value)
    text = f"The best on {rules.objective} is {best}: {choices[best].value:.4g} with {choices[best].winner}"
    claim = None
    if others:
        following = choices[others[0]]
        change = f" ({choices[best].value / following.value - 1:+.1%})" if following.value else ""
        text += f"; the next, {others[0]}, has {following.value:.4g}{change}"
        try:
            claim = rules.on_objective(choices[best].winner, following.winner)
        except AnalysisError as error:
            text += f", not tested: {error}"
        else:
            how = f"p = {claim.p_value:.2g} ({claim.test}{correction_words(claim)})"
            sure = {"A is better": "better", "equivalent": "equivalent"}.get(claim.verdict, "undecided")
            text += f"; {sure}, {how}{_more(claim)}"
    if choices[best].winner != overall.winner and choices[best].winner in overall.excluded:
        text += f". Among all configurations it is excluded: {overall.excluded[choices[best].winner]}"
    return PerValue(axis, choices, left_out, best, claim, f"{text}.")


def _bound(constraint: Constraint, configurations: Sequence[Configuration]) -> float:
    if constraint.is_limit:
        return constraint.value
    means = [mean for c in configurations if (mean := c.mean(constraint.metric)) is not None]
    if not means:
        raise AnalysisError(f"no run has {constraint.metric}, which a constraint needs")
    return max(means) - constraint.value if constraint.better == "higher" else min(means) + constraint.value


def _exclusion(
    configuration: Configuration, objective: str, bounds: Sequence[tuple[Constraint, float]]
) -> str | None:
    if configuration.mean(objective) is None:
        if configuration.failures:
            return "; ".join(sorted(set(configuration.failures.values())))
        return f"has no {objective}"
    return _missed(configuration, bounds)


def _missed(configuration: Configuration, bounds: Sequence[tuple[Constraint, float]]) -> str | None:
    for constraint, bound in bounds:
        mean = configuration.mean(constraint.metric)
        if mean is None:
            return f"has no {constraint.metric}"
        upper = constraint.kind == "at_most" or (
            constraint.kind == "within_of_best" and constraint.better == "lower"
        )
        if mean > bound if upper else mean < bound:
            if constraint.is_limit:
                side = "above" if upper else "below"
                return f"{constraint.metric} {mean:.4g} is {side} the limit of {bound:g}"
            return (
                f"{constraint.metric} {mean:.4g} misses {constraint} ({'<=' if upper else '>='} {bound:.4g})"
            )
    return None


def _certainty(
    winner: Configuration, runner_up: Configuration | None, rules: Rules
) -> tuple[Claim | None, str]:
    if runner_up is None:
        return None, "it is the only configuration that meets the constraints"
    try:
        claim = rules.on_objective(winner.label, runner_up.label)
    except AnalysisError as error:
        return None, f"not tested: {error}"
    if claim.verdict == "equivalent":
        return claim, f"equivalent to the runner-up within {claim.margin:g}, p = {claim.p_equivalent:.2g}"
    how = f"p = {claim.p_value:.2g} ({claim.test}{correction_words(claim)})"
    if claim.verdict == "A is better":
        return claim, f"better than the runner-up, {how}"
    return claim, f"undecided against the runner-up, {how}{_more(claim)}"


def _more(claim: Claim) -> str:
    if claim.more_seeds is None:
        return ""
    return f"; about {claim.more_seeds} more seed{'s' * (claim.more_seeds != 1)} would decide"


def _against_best(
    winner: Configuration,
    configurations: Sequence[Configuration],
    constraints: Sequence[Constraint],
    rules: Rules,
) -> tuple[tuple[Claim, ...], list[str]]:
    claims: list[Claim] = []
    words: list[str] = []
    for constraint in constraints:
        metric = constraint.metric
        having = [c for c in configurations if c.mean(metric) is not None]
        if constraint.is_limit or not having:
            continue
        pick = max if constraint.better == "higher" else min
        best = pick(having, key=lambda c: c.mean(metric) or 0.0)
        if best.mean(metric) == winner.mean(metric):
            words.append(f"it also has the best {metric}")
            continue
        try:
            margin = constraint.value if constraint.value > 0 else None
            claim = rules.family(metric, constraint.better, margin).claim(winner.label, best.label)
        except AnalysisError as error:
            words.append(f"a loss of {metric} is not tested: {error}")
            continue
        claims.append(claim)
        if claim.verdict == "equivalent":
            words.append(
                f"its {metric} is equivalent to the best within {constraint.value:g} "
                f"(p = {claim.p_equivalent:.2g})"
            )
        elif claim.verdict == "undecided":
            words.append(f"whether its {metric} is within {constraint.value:g} is undecided{_more(claim)}")
        elif claim.verdict == "B is better":
            words.append(
                f"its {metric} is significantly worse than the best (p = {claim.p_value:.2g}), "
                f"by {claim.low:.3g} to {claim.high:.3g}"
            )
    return tuple(claims), words


def _not_shown_worse(
    winner: Configuration,
    configurations: Sequence[Configuration],
    bounds: Sequence[tuple[Constraint, float]],
    rules: Rules,
) -> list[str]:
    """Returns in words which excluded configuration luck may have excluded.

    It is the best on the objective among those that beat the winner there, meet every other constraint, and
    whose mean misses the best one's by no more than the noise between runs.
    """
    objective = rules.objective
    value = winner.mean(objective)
    assert value is not None
    absolute = [each for each in bounds if each[0].is_limit]
    relative = [constraint for constraint, _ in bounds if not constraint.is_limit]
    better = [
        (mean, configuration)
        for configuration in configurations
        if (mean := configuration.mean(objective)) is not None
        and rules.sign * mean < rules.sign * value
        and _exclusion(configuration, objective, absolute) is None
        and all(configuration.mean(constraint.metric) is not None for constraint in relative)
    ]
    for mean, configuration in sorted(better, key=lambda pair: rules.sign * pair[0]):
        claims = [_against_best(configuration, configurations, [each], rules)[0] for each in relative]
        tested = [claim for of_one in claims for claim in of_one]
        if tested and all(claim.verdict != "B is better" for claim in tested):
            undecided = next((claim for claim in tested if claim.verdict == "undecided"), None)
            change = f"{mean / value - 1:+.1%}" if value else f"{mean:.4g}"
            return [
                f"{configuration.label} ({objective} {change}) was excluded by its mean, but is not shown to "
                f"be worse on {' and '.join(constraint.metric for constraint in relative)}"
                f"{_more(undecided) if undecided else ''}"
            ]
    return []


def _words(
    winner: Configuration,
    runner_up: Configuration | None,
    rules: Rules,
    excluded: Mapping[str, str],
    sure: str,
) -> str:
    value = winner.mean(rules.objective)
    under = f" with {' and '.join(map(str, rules.constraints))}" if rules.constraints else ""
    sentences = [f"Use {winner.label}: {rules.objective} {value:.4g}{under}."]
    if runner_up is not None:
        other = runner_up.mean(rules.objective)
        assert value is not None
        assert other is not None
        change = f" ({value / other - 1:+.1%})" if other else ""
        sentences.append(f"The runner-up, {runner_up.label}, has {other:.4g}{change}.")
    sentences.append(f"Confidence: {sure}.")
    if excluded:
        count = f"{len(excluded)} configuration" + ("s were" if len(excluded) > 1 else " was")
        sentences.append(f"{count} excluded.")
    return " ".join(sentences)
