"""Everything that a report says, before it has a form: answers, curves, facts, caveats.

What cannot be answered is not left out: its section says why.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeVar

import yaml

from service.analysis.answers import (
    ComparisonAnswer,
    EffectsAnswer,
    FrontierAnswer,
    ScoreAnswer,
    SpeedupAnswer,
    TestedPair,
)
from service.analysis.candidates import label_of
from service.analysis.errors import AnalysisError
from service.analysis.question import Question
from service.analysis.results import Recommendation
from service.analysis.run_table import RunTable, UnitScores, no_scores
from service.analysis.run_tables import read_curves, read_run_table
from service.analysis.score import STRATEGIES
from service.analysis.selection import EVERYTHING, Selection
from service.domain.ledger import Ledger
from service.domain.records import PointRow, Run
from service.domain.states import RunState
from service.output.traces import TracedStep
from service.store import Store
from trainers.figures import SCORES
from trainers.predictions import LabelCounts

Answer = TypeVar("Answer")

CURVES = (
    "loss",
    *(name for name, score in SCORES.items() if score.drawn),
    "flipped_signs_pct",
    "near_zero_pct",
)
"""Points that are drawn over steps, where runs have them."""
POINTS_PER_CURVE = 60
"""Most points of one run's curve: what a plot 400 pixels wide can show."""
MOST_TRACED = 8
"""Most runs of which a step is drawn."""
MOST_ROWS = 200
"""Most rows of one table."""
TIME_PARTS = (
    "setup_time_s", "data_wait_time_s", "forward_time_s", "backward_time_s", "bubble_time_s",
    "optimizer_time_s", "communication_time_s", "checkpoint_time_s", "validation_time_s", "test_time_s",
    "profiling_time_s",
)  # fmt: skip
"""The parts that sum to a run's time, in the order in which they are stacked."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Why there is no answer."""

    reason: str


@dataclass(frozen=True, slots=True)
class ByLabel:
    """What a configuration made of each label of the test part.

    Attributes:
        point: Configuration.
        runs: its runs that are counted.
        counts: their counts together.
    """

    point: Mapping[str, object]
    runs: tuple[int, ...]
    counts: LabelCounts


@dataclass(frozen=True, slots=True)
class Contents:
    """What a report says.

    Attributes:
        run_table: the runs.
        specs: text of each experiment's spec as submitted.
        made_at_s: when the report was made, Unix seconds.
        recommendation, comparison, frontier, effects, speedup: answers, or why there is none.
        verdicts: the recommended configuration against each other one.
        scores: an answer per named strategy.
        curves: points by run id and name.
        steps: by run id, a step of the first run of each configuration that traced some.
        breakdown: mean seconds of each part of a run's time, by configuration.
        caveats: Caveats for the reader, in words.
        ledgers: Ledgers of the experiments, all their runs included.
        by_label: Counts by label of the recommended configuration, without one of the first; None = the
            task has no labels, or no run kept them here.
    """

    run_table: RunTable
    specs: tuple[str, ...]
    made_at_s: float
    recommendation: Recommendation | Unanswered
    comparison: ComparisonAnswer | Unanswered
    frontier: FrontierAnswer | Unanswered
    effects: EffectsAnswer | Unanswered
    speedup: SpeedupAnswer | Unanswered
    verdicts: tuple[TestedPair, ...] | Unanswered
    scores: Mapping[str, ScoreAnswer] | Unanswered
    curves: Mapping[int, Mapping[str, Sequence[PointRow]]]
    steps: Mapping[int, TracedStep]
    breakdown: Mapping[str, Mapping[str, float]]
    caveats: tuple[str, ...]
    ledgers: tuple[Ledger, ...] = ()
    by_label: ByLabel | None = None


def gather(
    store: Store,
    experiment_ids: Sequence[int],
    selection: Selection = EVERYTHING,
    *,
    traced: Callable[[Run], TracedStep | None] = lambda run: None,
    unit_scores: UnitScores = no_scores,
    label_counts: Callable[[Run], LabelCounts | None] = lambda run: None,
) -> Contents:
    """Reads and answers everything.

    Args:
        store: Store with the runs.
        experiment_ids: one, or several that are answered together.
        selection: Selection among their runs.
        traced: a step of a run, where it traced some.
        unit_scores: reads a run's scores of the test part's units.
        label_counts: reads a run's counts by label.

    Raises:
        NotFound: there is no such experiment.
        FilterError: the filter cannot be understood.
        AnalysisError: there is no run, or the runs are of different tasks or data.
    """
    run_table = read_run_table(store, experiment_ids, selection, unit_scores=unit_scores)
    question = Question(run_table)
    curves = read_curves(store, run_table.finished, CURVES, max_points=POINTS_PER_CURVE)
    specs = tuple(store.experiment_spec(experiment.id)[0] for experiment in run_table.experiments)
    ledgers = [store.ledger(experiment.id) for experiment in run_table.experiments]
    steps = _steps(run_table.finished, traced)
    found = contents(question, specs, curves, ledgers, made_at_s=time.time(), steps=steps)
    return replace(found, by_label=_by_label(found, label_counts))


def _by_label(found: Contents, label_counts: Callable[[Run], LabelCounts | None]) -> ByLabel | None:
    chosen, finished = found.recommendation, found.run_table.finished
    if not finished:
        return None
    label = label_of(finished[0].point) if isinstance(chosen, Unanswered) else chosen.winner
    runs = [run for run in finished if label_of(run.point) == label]
    counted = {run.id: counts for run in runs if (counts := label_counts(run)) is not None}
    if not counted:
        return None
    return ByLabel(runs[0].point, tuple(counted), LabelCounts.added_up(list(counted.values())))


def _steps(runs: Sequence[Run], traced: Callable[[Run], TracedStep | None]) -> dict[int, TracedStep]:
    """Returns a step of the first run of each configuration, as far as they are drawn."""
    found: dict[int, TracedStep] = {}
    seen: set[str] = set()
    for run in runs:
        label = label_of(run.point)
        if label in seen or len(found) == MOST_TRACED:
            continue
        if (step := traced(run)) is not None:
            found[run.id] = step
            seen.add(label)
    return found


def contents(
    question: Question,
    specs: Sequence[str],
    curves: Mapping[int, Mapping[str, Sequence[PointRow]]],
    ledgers: Sequence[Ledger] = (),
    *,
    made_at_s: float,
    steps: Mapping[int, TracedStep] = MappingProxyType({}),
) -> Contents:
    """Answers everything. Pure.

    Args:
        question: Question about the runs.
        specs: text of each experiment's spec.
        curves: points by run id and name.
        ledgers: Ledgers of the experiments.
        made_at_s: now, in Unix seconds.
        steps: traced steps by run id.
    """
    run_table = question.run_table
    recommendation = _answer(question.recommend)
    comparison = _answer(question.compare)
    effects = _answer(question.effects)
    judged = question.judged_by.name
    validated = question.validated_by.name
    evaluated = {run: series[validated] for run, series in curves.items() if validated in series}
    return Contents(
        run_table=run_table,
        specs=tuple(specs),
        made_at_s=made_at_s,
        recommendation=recommendation,
        comparison=comparison,
        frontier=_answer(question.frontier),
        effects=effects,
        speedup=_answer(lambda: question.speedup(curves=evaluated)),
        verdicts=recommendation
        if isinstance(recommendation, Unanswered)
        else _answer(
            lambda: question.claims_against(recommendation.winner, ("cost_usd", "total_time_s", judged))
        ),
        scores=_answer(lambda: {name: question.score(strategy=name) for name in STRATEGIES}),
        curves=curves,
        steps=steps,
        breakdown=breakdown(run_table),
        caveats=tuple(_caveats(run_table, recommendation, comparison, effects)),
        ledgers=tuple(ledgers),
    )


def _answer(ask: Callable[[], Answer]) -> Answer | Unanswered:
    try:
        return ask()
    except AnalysisError as error:
        return Unanswered(str(error))


def breakdown(run_table: RunTable) -> dict[str, dict[str, float]]:
    """Mean seconds of each part of a run's time, by configuration; runs without the parts give none."""
    found: dict[str, dict[str, list[float]]] = {}
    columns = {part: run_table.column(part).tolist() for part in TIME_PARTS}
    for position, run in enumerate(run_table.runs):
        if run.state is RunState.succeeded:
            for part, column in columns.items():
                if math.isfinite(column[position]):
                    found.setdefault(label_of(run.point), {}).setdefault(part, []).append(column[position])
    return {
        label: {part: sum(values) / len(values) for part, values in parts.items()}
        for label, parts in found.items()
    }


def _caveats(
    run_table: RunTable,
    recommendation: Recommendation | Unanswered,
    comparison: ComparisonAnswer | Unanswered,
    effects: EffectsAnswer | Unanswered,
) -> list[str]:
    runs, finished = run_table.runs, run_table.finished
    caveats: list[str] = []
    going = [run for run in runs if run.ended_s is None]
    if going:
        caveats.append(f"{_count(going)} not ended yet: figures may still change")
    for state, said in (
        (RunState.failed, "failed and have no result"),
        (RunState.cancelled, "were cancelled"),
        (
            RunState.stopped,
            "were stopped early: left out of means and claims, because their times are incomplete",
        ),
    ):
        of = [run for run in runs if run.state is state]
        if of:
            caveats.append(f"{_count(of)} {said}")
    retried = [run for run in finished if run.own_failures + run.infrastructure_failures]
    if retried:
        caveats.append(
            f"{_count(retried)} finished after failures; the lost work is charged to the "
            "experiment, not to the run's figures"
        )
    for answer in (recommendation, comparison):
        if not isinstance(answer, Unanswered):
            caveats += answer.notes
    if len(run_table.environments) > 1:
        caveats.append(
            f"the runs come from {len(run_table.environments)} different environments (see Environment), "
            "which may explain differences in time"
        )
    known = {run for _, of in run_table.environments for run in of}
    silent = [run for run in finished if run.id not in known]
    if silent:
        caveats.append(f"{_count(silent)} did not report where they ran")
    if any(facts.get("git_dirty") for facts, _ in run_table.environments):
        caveats.append("some runs used code with uncommitted changes; the commit alone does not reproduce it")
    if not isinstance(effects, Unanswered):
        for item in effects.items:
            caveats += [f"effects on {item.model.metric}: {check}" for check in item.model.checks]
    return list(dict.fromkeys(caveats))


def _count(runs: Sequence[Run]) -> str:
    named = ", ".join(f"run:{run.id}" for run in runs[:3]) + (", ..." if len(runs) > 3 else "")
    return f"{len(runs)} run{'s' * (len(runs) != 1)} ({named})"


def description_of(spec: str) -> str:
    """Returns the spec's own words about what it is for; empty without any."""
    try:
        document = yaml.safe_load(spec)
    except yaml.YAMLError:
        return ""
    return str(document.get("description") or "") if isinstance(document, dict) else ""
