"""One question has one answer: whatever is asked of the same runs, no two answers contradict each other.

500 generated experiments are asked by every function that the report, the page and REST call.
`tests/api/test_one_answer.py` reads the rendered report next to REST.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest

from service.analysis.answers import AnalysisError, Claim
from service.analysis.best_over import AtBest
from service.analysis.question import Question
from service.analysis.ranking import label_of
from service.analysis.run_table import RunTable
from service.domain.metrics import better_of
from service.domain.records import Run
from service.domain.states import RunState
from service.output.plots import answers as figures
from tests.service.analysis.building import run

EXPERIMENTS = 250
METRICS = ("total_time_s", "cost_usd", "accuracy")
AXES: dict[str, list[Any]] = {
    "precision": ["fp32", "bf16", "tf32"],
    "batch.global_size": [16, 32],
    "optimizer.name": ["adamw", "adan"],
}


@dataclass(frozen=True, slots=True)
class Statement:
    """What an answer says of two sides on a metric.

    Attributes:
        source: of the answer.
        metric: name.
        axes: that make the sides; the others are averaged over.
        sides: labels.
        says: label of the better side, which is `tested` or only `ahead` by its mean, or None: a tested
            difference that is not decided, or equivalence. kind: how it is said. Statements about
            `intervals` say whether they leave out no difference.
    """

    source: str
    metric: str
    axes: tuple[str, ...]
    sides: frozenset[str]
    says: str | None
    kind: Literal["tested", "equivalent", "ahead", "interval"]

    def contradicts(self, other: Statement) -> bool:
        """Whether both cannot be so."""
        if (self.metric, self.axes, self.sides) != (other.metric, other.axes, other.sides):
            return False
        kinds = {self.kind, other.kind}
        if (len(kinds) == 1 and kinds != {"ahead"}) or kinds == {"tested", "equivalent"}:
            return self.says != other.says or self.kind != other.kind
        # A mean may be ahead where nothing is decided, and an interval for itself is not corrected. Over the
        # seeds that both sides ran it may point away from the means over all seeds: then nothing is decided.
        return (
            kinds != {"ahead", "interval"} and None not in (self.says, other.says) and self.says != other.says
        )


# -- Generated experiments -----------------------------------------------------------------------


def experiment(number: int) -> RunTable:
    """An experiment of one to three axes, with or without effects, and something missing or odd by its
    number."""
    generator = np.random.default_rng(number)
    shape = SHAPES[number % len(SHAPES)]
    chosen = list(AXES)[: 1 + number // len(SHAPES) % 3]
    axes = {name: AXES[name] for name in chosen}
    seeds = 1 if shape == "one seed" else int(generator.integers(1 if shape == "repeats" else 2, 6))
    size = generator.choice([0.0, 0.03, 0.3])
    noise = generator.choice([0.002, 0.02, 0.1])
    correlation = {"correlated seeds": 0.99, "balanced": 0.0}.get(shape, 0.5)
    points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    by_level = {(name, value): generator.normal(0.0, size) for name in axes for value in axes[name]}
    shared = {
        (seed, str(point.get("batch.global_size"))): generator.normal(0.0, noise)
        for seed in range(seeds)
        for point in points
    }
    lost = set(generator.choice(len(points), 1 + len(points) // 4, replace=False).tolist())
    runs: list[Run] = []
    repeats = range(3 if shape == "repeats" else 1)
    for (cell, point), seed, repeat in itertools.product(enumerate(points), range(seeds), repeats):
        effect = sum(by_level[name, point[name]] for name in axes)

        def draw(scale: float, point: Mapping[str, Any] = point, seed: int = seed) -> float:
            of_seed = shared[seed, str(point.get("batch.global_size"))] * math.sqrt(correlation)
            return scale * (of_seed + math.sqrt(1 - correlation) * float(generator.normal(0.0, noise)))

        values: dict[str, Any] = {
            "total_time_s": 100.0 * math.exp(effect + draw(1.0)),
            "accuracy": float(np.clip(0.9 + 0.02 * effect + draw(0.1), 0.0, 1.0)),
        }
        if shape == "ties":
            values = {
                "total_time_s": round(values["total_time_s"], -1),
                "accuracy": round(values["accuracy"], 2),
            }
        values["cost_usd"] = values["total_time_s"] / 1000.0
        if shape == "NaN" and generator.random() < 0.15:
            values[str(generator.choice(list(values)))] = math.nan
        if (shape == "missing cells" and cell in lost) or (
            shape in ("missing seeds", "repeats") and cell in lost and generator.random() < 0.5
        ):
            values = {"state": RunState.failed}
        if shape == "stopped early" and cell in lost and generator.random() < 0.5:
            values = {"state": RunState.stopped, "total_time_s": 1.0, "cost_usd": 0.001, "accuracy": 0.99}
        named = seed + 10 * cell if shape == "other seeds" and cell in lost else seed
        runs.append(run(len(runs) + 1, point, named, repeat=repeat, **values))
    judged_on = {made.id: {"validation_examples": 2_000} for made in runs}
    return RunTable(experiments=(), runs=tuple(runs), summaries=judged_on)


SHAPES = (
    "balanced", "missing cells", "missing seeds", "one seed", "correlated seeds", "ties", "NaN",
    "other seeds", "stopped early", "repeats",
)  # fmt: skip
FAST = (0, SHAPES.index("repeats"))


# -- What is said --------------------------------------------------------------------------------


def statements(question: Question) -> Iterator[Statement]:
    """Everything that the answers say of two sides."""
    every = tuple(question.axes)
    for axes in [every, *((axis,) for axis in every if len(every) > 1)]:
        yield from compared(question, axes)
    yield from at_best(question)
    yield from of_effects(question)
    yield from of_recommendation(question)
    yield from of_frontier(question)
    for metric in METRICS:
        yield from of_scores(question, metric)
        yield from of_speedup(question, metric)


def compared(question: Question, axes: tuple[str, ...]) -> Iterator[Statement]:
    """`compare --by`, without and with claims."""
    try:
        plain = question.compare(by=axes, metrics=METRICS)
        answer = question.compare(by=axes, metrics=METRICS, claims=True, untested=True)
    except AnalysisError:
        return
    for found, source in ((plain, "compare"), (answer, "compare --claims")):
        for metric, best in found.best.items():
            for row in found.rows:
                if row.label != found.rows[best].label:
                    pair = frozenset((row.label, found.rows[best].label))
                    yield Statement(source, metric, axes, pair, found.rows[best].label, "ahead")
    for pair in answer.claims:
        if pair.claim is not None:
            yield from claimed("compare --claims", axes, pair.a, pair.b, pair.claim)


def at_best(question: Question) -> Iterator[Statement]:
    """`compare --best-over` of the last axis, whose claims are about the chosen configurations."""
    every = tuple(question.axes)
    if len(every) < 2:
        return
    try:
        best = AtBest(question, every[-1:])
        answer = best.compare(metrics=METRICS, claims=True, untested=True)
    except AnalysisError:
        return
    if best.tuning.fresh:  # Over other seeds.
        return
    labels = {
        of.label: label_of({axis: {**of.point, **of.chosen}[axis] for axis in every})
        for of in best.tuning.best
    }
    for pair in answer.claims:
        if pair.claim is not None:
            yield from claimed("compare --best-over", every, labels[pair.a], labels[pair.b], pair.claim)


def claimed(source: str, axes: tuple[str, ...], a: str, b: str, claim: Claim) -> Iterator[Statement]:
    """A claim, and its interval."""
    pair = frozenset((a, b))
    if claim.verdict == "equivalent":
        yield Statement(source, claim.metric, axes, pair, None, "equivalent")
    else:
        says = {"A is better": a, "B is better": b}.get(claim.verdict)
        yield Statement(source, claim.metric, axes, pair, says, "tested")
    for low, high in ((claim.low, claim.high), (claim.relative_low, claim.relative_high)):
        if low is not None and high is not None:
            yield apart(source, claim.metric, axes, a, b, low, high)


def apart(
    source: str, metric: str, axes: tuple[str, ...], a: str, b: str, low: float, high: float
) -> Statement:
    """An interval of a less b; a claim whose sides' tables say the reverse is not in it."""
    says = None
    if not low <= 0.0 <= high:
        says = a if (high < 0.0) == (better_of(metric) == "lower") else b
    return Statement(source, metric, axes, frozenset((a, b)), says, "interval")


def of_effects(question: Question) -> Iterator[Statement]:
    """Effects, their sentences and their figure."""
    try:
        answer = question.effects(metrics=METRICS)
    except AnalysisError:
        return
    for item in answer.items:
        metric, smallest = item.model.metric, {}
        drawn = figures.effect(item).data[0]["x"]
        factor = 100.0 if item.model.scale == "ratio" else 1.0
        assert drawn == pytest.approx([factor * level.effect for level in reversed(item.model.levels)])
        for level, sentence in zip(item.model.levels, item.sentences, strict=True):
            a, b = f"{level.axis}={level.level}", f"{level.axis}={level.baseline}"
            says = {"better": a, "worse": b}.get(level.verdict)
            kind: Any = "equivalent" if level.verdict == "equivalent" else "tested"
            yield Statement("effects", metric, (level.axis,), frozenset((a, b)), says, kind)
            yield apart("effects", metric, (level.axis,), a, b, level.low, level.high)
            words = {"undecided": "no significant effect", "equivalent": "equivalent within"}
            for verdict, said in words.items():
                assert (said in sentence) == (level.verdict == verdict), sentence
            smallest[level.axis] = min(smallest.get(level.axis, 1.0), 1.0 if says is None else level.p_value)
        for term in item.model.terms:
            if len(term.axes) == 1 and smallest.get(term.axes[0], 1.0) < 0.05:
                assert term.p_value < 0.05


def of_recommendation(question: Question) -> Iterator[Statement]:
    """The recommendation, and the report's claims about its winner."""
    axes = tuple(question.axes)
    for objective in ("cost_usd", "accuracy"):
        try:
            chosen = question.recommend(objective=objective, per=axes[0])
        except AnalysisError:
            continue
        assert chosen.per is not None
        for of_value in chosen.per.choices.values():
            if of_value.over_runner_up is not None and of_value.runner_up is not None:
                made = of_value.over_runner_up
                yield from claimed("recommend --per", axes, of_value.winner, of_value.runner_up, made)
        if (claim := chosen.per.over_next) is not None:
            best = chosen.per.choices[chosen.per.best]
            following = [each for each in chosen.per.choices.values() if each.value == claim.mean_b]
            if len(following) == 1 and following[0] != best:
                yield from claimed("recommend --per", axes, best.winner, following[0].winner, claim)
        if chosen.over_runner_up is not None and chosen.runner_up is not None:
            yield from claimed("recommend", axes, chosen.winner, chosen.runner_up, chosen.over_runner_up)
            said = (
                "better" if chosen.over_runner_up.verdict == "A is better" else chosen.over_runner_up.verdict
            )
            assert chosen.sure.startswith(said), chosen.sure
        front = question.frontier(metrics=[objective])
        for row in (*front.members, *front.others):
            if row.label not in chosen.excluded and row.values[objective] != chosen.value:
                pair = frozenset((chosen.winner, row.label))
                yield Statement("recommend", objective, axes, pair, chosen.winner, "ahead")
        best = {claim.metric: claim for claim in chosen.against_best}
        try:
            against = question.claims_against(chosen.winner, METRICS)
        except AnalysisError:
            continue
        for pair_of in against:
            if pair_of.claim is not None:
                yield from claimed("report", axes, pair_of.a, pair_of.b, pair_of.claim)
        if claim := best.get("accuracy"):
            of_best = [pair for pair in against if pair.metric == "accuracy" and pair.claim is not None]
            assert any(
                (pair.claim.verdict, pair.claim.p_value, pair.claim.mean_b)
                == (claim.verdict, claim.p_value, claim.mean_b)
                for pair in of_best
                if pair.claim is not None
            )


def of_frontier(question: Question) -> Iterator[Statement]:
    """A configuration that dominates is behind on no metric."""
    try:
        answer = question.frontier(metrics=METRICS)
    except AnalysisError:
        return
    values = {member.label: member.values for member in (*answer.members, *answer.others)}
    for label, dominators in answer.dominated.items():
        for by, metric in itertools.product(dominators, METRICS):
            if values[by][metric] != values[label][metric]:
                pair = frozenset((label, by))
                yield Statement("frontier", metric, tuple(question.axes), pair, by, "ahead")


def of_scores(question: Question, metric: str) -> Iterator[Statement]:
    """A score of one metric ranks by it."""
    try:
        ranking = question.score(weights={metric: 1.0}).ranking
    except AnalysisError:
        return
    for one, other in itertools.combinations(ranking, 2):
        if one.score < other.score:
            pair = frozenset((one.label, other.label))
            yield Statement("scores", metric, tuple(question.axes), pair, one.label, "ahead")


def of_speedup(question: Question, metric: str) -> Iterator[Statement]:
    """The interval of a ratio, whose sides are the baseline and a configuration."""
    try:
        answer = question.speedup(metrics=[metric])
    except AnalysisError:
        return
    for row in answer.rows:
        ratio = row.ratios[metric]
        if ratio is None or ratio.low is None or ratio.high is None or row.label == answer.baseline:
            continue
        low, high = ratio.low - 1.0, ratio.high - 1.0
        if better_of(metric) == "lower":  # Above 1 means that the configuration is better.
            low, high = -high, -low
        yield apart("speedup", metric, tuple(question.axes), row.label, answer.baseline, low, high)


def contradictions(said: Sequence[Statement]) -> list[tuple[Statement, Statement]]:
    """Pairs of statements that cannot both be so."""
    groups: dict[Any, dict[Statement, None]] = {}
    for one in said:
        groups.setdefault((one.metric, one.axes, one.sides), {})[one] = None
    return [
        (one, other)
        for group in groups.values()
        for one, other in itertools.combinations(group, 2)
        if one.contradicts(other)
    ]


# -- Tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    [pytest.param(at, marks=[pytest.mark.slow] * (at not in FAST)) for at in range(len(SHAPES))],
    ids=SHAPES,
)
def test_no_two_answers_contradict_each_other(shape: int) -> None:
    found, tested, decided = [], 0, 0
    for number in range(shape, EXPERIMENTS, len(SHAPES)):
        said = list(statements(Question(experiment(number))))
        found += [(number, *pair) for pair in contradictions(said)]
        tested += sum(one.kind == "tested" for one in said)
        decided += sum(one.kind == "tested" and one.says is not None for one in said)
    assert not found, found[:5]
    # The experiments are worth asking: many claims, some of them decided.
    if SHAPES[shape] == "one seed":
        assert tested == 0
    else:
        assert tested > 100
        assert decided > 10


def test_a_contradiction_is_seen() -> None:
    sides = frozenset("ab")
    decided = Statement("x", "t", ("p",), sides, "a", "tested")
    for says, kind in (
        (None, "tested"),
        ("b", "tested"),
        (None, "equivalent"),
        ("b", "ahead"),
        ("b", "interval"),
    ):
        other = Statement("y", "t", ("p",), sides, says, kind)  # type: ignore[arg-type]
        assert contradictions([decided, other]), other
    agreeing = [
        Statement("y", "t", ("p",), sides, "a", kind)  # type: ignore[arg-type]
        for kind in ("ahead", "interval")
    ]
    assert not contradictions([decided, *agreeing])
