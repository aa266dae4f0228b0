"""The content of a report before it has a form: answers, curves, facts, caveats.

The section of an answer that cannot be given says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import yaml

from service.analysis.answers import (
    EVERYTHING,
    ComparisonAnswer,
    EffectsAnswer,
    FrontierAnswer,
    Recommendation,
    ScoreAnswer,
    Selection,
    SpeedupAnswer,
    TestedPair,
)
from service.analysis.ranking import STRATEGIES
from service.analysis.run_table import RunTable, UnitScores, no_scores, read_curves, read_kernels
from service.domain.ledger import Ledger
from service.domain.records import PointRow, Run
from service.domain.states import RunState
from service.output.plots.material import ByLabel, Material, Unanswered, answered
from service.output.plots.plot import Plot
from service.output.plots.registry import figures_of_report
from service.output.run_files import TracedStep
from service.store import Store
from trainers.checkpoints.predictions import LabelCounts

OF_SIGNS = ("flipped_signs_pct", "near_zero_pct")
"""Metrics of low-bit models; the report shows the final value of each."""
POINTS_PER_CURVE = 60
"""Most points that are read of one run's curve."""
MOST_ROWS = 200
"""Most rows of one table."""


@dataclass(frozen=True, slots=True)
class ReportContents:
    run_table: RunTable
    specs: tuple[str, ...]
    """Text of each experiment's spec as submitted."""
    made_at_s: float
    recommendation: Recommendation | Unanswered
    comparison: ComparisonAnswer | Unanswered
    frontier: FrontierAnswer | Unanswered
    effects: EffectsAnswer | Unanswered
    speedup: SpeedupAnswer | Unanswered
    verdicts: tuple[TestedPair, ...] | Unanswered
    """The recommended configuration against each other one."""
    scores: Mapping[str, ScoreAnswer] | Unanswered
    """By named strategy."""
    curves: Mapping[int, Mapping[str, Sequence[PointRow]]]
    """Points by run id and name, of the metrics that tables and the speed-up need."""
    figures: tuple[Plot, ...]
    caveats: tuple[str, ...]
    ledgers: tuple[Ledger, ...]
    """Of the experiments, all their runs included."""
    by_label: ByLabel | None
    """Of the recommended configuration, else of the first; None = no run kept counts by label here."""


def gather(
    store: Store,
    experiment_ids: Sequence[int],
    selection: Selection = EVERYTHING,
    *,
    traced: Callable[[Run], TracedStep | None] = lambda run: None,
    unit_scores: UnitScores = no_scores,
    label_counts: Callable[[Run], LabelCounts | None] = lambda run: None,
) -> ReportContents:
    """Reads and answers everything; the functions are those of `Material`.

    Raises:
        NotFound: there is no such experiment.
        FilterError: the filter cannot be understood.
        AnalysisError: there is no run, or the runs are of different tasks or data.
    """
    material = Material(
        store, experiment_ids, selection, traced=traced, unit_scores=unit_scores, label_counts=label_counts
    )
    question = material.question
    run_table, judged, validated = material.run_table, question.judged_by.name, question.validated_by.name
    names = (validated, *(name for name in OF_SIGNS if name in material.point_names))
    curves = read_curves(store, run_table.finished, names, max_points=POINTS_PER_CURVE)
    evaluated = {run: series[validated] for run, series in curves.items() if validated in series}
    recommendation, effects = material.recommendation, material.effects
    kernels = read_kernels(store, material.experiment_ids)
    comparison = answered(lambda: question.compare(kernels=kernels or None))
    return ReportContents(
        run_table=run_table,
        specs=tuple(store.experiments.spec(experiment.id)[0] for experiment in run_table.experiments),
        made_at_s=material.made_at_s,
        recommendation=recommendation,
        comparison=comparison,
        frontier=answered(material.frontier),
        effects=effects,
        speedup=answered(lambda: question.speedup(curves=evaluated)),
        verdicts=recommendation
        if isinstance(recommendation, Unanswered)
        else answered(
            lambda: question.claims_against(recommendation.winner, ("cost_usd", "total_time_s", judged))
        ),
        scores=answered(lambda: {name: question.score(strategy=name) for name in STRATEGIES}),
        curves=curves,
        figures=tuple(figures_of_report(material)),
        caveats=tuple(_caveats(run_table, recommendation, comparison, effects)),
        ledgers=material.ledgers,
        by_label=material.by_label,
    )


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
    stopped = "were stopped early: left out of means and claims, because their times are incomplete"
    for state, outcome in (
        (RunState.failed, "failed and have no result"),
        (RunState.cancelled, "were cancelled"),
        (RunState.stopped, stopped),
    ):
        if of := [run for run in runs if run.state is state]:
            caveats.append(f"{_count(of)} {outcome}")
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
    """The spec's description; empty without one."""
    try:
        document = yaml.safe_load(spec)
    except yaml.YAMLError:
        return ""
    return str(document.get("description") or "") if isinstance(document, dict) else ""
