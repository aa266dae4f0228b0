"""The content of a report before it has a form: answers, curves, facts, caveats.

The section of an answer that cannot be given says why.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import yaml

from service.analysis.answers import ComparisonAnswer, ScoreAnswer, SpeedupAnswer, TestedPair
from service.analysis.ranking import STRATEGIES
from service.analysis.run_table import read_curves, read_kernels
from service.domain.records import PointRow, Run
from service.domain.states import RunState
from service.output.plots.material import Material, Unanswered, answered
from service.output.plots.plot import Plot
from service.output.plots.registry import figures_of_report

OF_SIGNS = ("flipped_signs_pct", "near_zero_pct")
"""Metrics of low-bit models; the report shows the final value of each."""
POINTS_PER_CURVE = 60  # Most points that are read of one run's curve
MOST_ROWS = 200  # Most rows of one table


class ReportContents(Material):
    """The material of a report; its answers are found when a section first needs them."""

    @cached_property
    def specs(self) -> list[str]:
        return [self.store.experiments.spec(experiment.id)[0] for experiment in self.run_table.experiments]

    @cached_property
    def comparison(self) -> ComparisonAnswer | Unanswered:
        kernels = read_kernels(self.store, self.experiment_ids)
        return answered(lambda: self.question.compare(kernels=kernels or None))

    @cached_property
    def speedup(self) -> SpeedupAnswer | Unanswered:
        name = self.question.validated_by.name
        evaluated = {run: series[name] for run, series in self.points.items() if name in series}
        return answered(lambda: self.question.speedup(curves=evaluated))

    @cached_property
    def verdicts(self) -> tuple[TestedPair, ...] | Unanswered:
        chosen, metrics = self.recommendation, ("cost_usd", "total_time_s", self.question.judged_by.name)
        if isinstance(chosen, Unanswered):
            return chosen
        return answered(lambda: self.question.claims_against(chosen.winner, metrics))

    @cached_property
    def scores(self) -> Mapping[str, ScoreAnswer] | Unanswered:
        return answered(lambda: {name: self.question.score(strategy=name) for name in STRATEGIES})

    @cached_property
    def points(self) -> Mapping[int, Mapping[str, Sequence[PointRow]]]:
        """Points by run id and name, of the metrics that tables and the speed-up need."""
        known = [name for name in OF_SIGNS if name in self.point_names]
        names = (self.question.validated_by.name, *known)
        return read_curves(self.store, self.run_table.finished, names, max_points=POINTS_PER_CURVE)

    @cached_property
    def figures(self) -> list[Plot]:
        return figures_of_report(self)

    @cached_property
    def caveats(self) -> list[str]:
        return list(dict.fromkeys(_caveats(self)))


def _caveats(contents: ReportContents) -> Iterator[str]:
    run_table = contents.run_table
    runs, finished = run_table.runs, run_table.finished
    going = [run for run in runs if run.ended_s is None]
    if going:
        yield f"{_count(going)} not ended yet: figures may still change"
    stopped = "were stopped early: left out of means and claims, because their times are incomplete"
    for state, outcome in (
        (RunState.failed, "failed and have no result"),
        (RunState.cancelled, "were cancelled"),
        (RunState.stopped, stopped),
    ):
        if of := [run for run in runs if run.state is state]:
            yield f"{_count(of)} {outcome}"
    retried = [run for run in finished if run.own_failures + run.infrastructure_failures]
    if retried:
        yield (
            f"{_count(retried)} finished after failures; the lost work is charged to the "
            "experiment, not to the run's figures"
        )
    for answer in (contents.recommendation, contents.comparison):
        if not isinstance(answer, Unanswered):
            yield from answer.notes
    if len(run_table.environments) > 1:
        yield (
            f"the runs come from {len(run_table.environments)} different environments (see Environment), "
            "which may explain differences in time"
        )
    known = {run for _, of in run_table.environments for run in of}
    silent = [run for run in finished if run.id not in known]
    if silent:
        yield f"{_count(silent)} did not report where they ran"
    if any(facts.get("git_dirty") for facts, _ in run_table.environments):
        yield "some runs used code with uncommitted changes; the commit alone does not reproduce it"
    if not isinstance(contents.effects, Unanswered):
        for item in contents.effects.items:
            yield from (f"effects on {item.model.metric}: {check}" for check in item.model.checks)


def _count(runs: Sequence[Run]) -> str:
    named = ", ".join(f"run:{run.id}" for run in runs[:3]) + (", ..." if len(runs) > 3 else "")
    return f"{len(runs)} run{'s' * (len(runs) != 1)} ({named})"


def description_of(spec: str) -> str:
    try:
        document = yaml.safe_load(spec)
    except yaml.YAMLError:
        return ""
    return str(document.get("description") or "") if isinstance(document, dict) else ""
