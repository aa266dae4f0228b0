"""What plots are drawn from: each part is read or answered when a plot first needs it, and kept.

The report and the API make one `Material` per document or request, so that curves need no analysis, and the
trade-off no points.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from service.analysis import answers
from service.analysis.question import Question
from service.analysis.ranking import label_of
from service.analysis.run_table import RunTable, UnitScores, no_scores, read_run_table
from service.domain.ledger import Ledger
from service.domain.records import Run
from service.domain.states import RunState
from service.output.plots import curves
from service.output.plots.plot import Options
from service.output.run_files import TracedStep
from service.store import Store
from trainers.checkpoints.predictions import LabelCounts
from trainers.metrics import SCORES

Answer = TypeVar("Answer")

CURVES = (
    "loss",
    *(name for name, score in SCORES.items() if score.drawn),
    "flipped_signs_pct",
    "near_zero_pct",
)
"""Points that a report draws over steps, where runs have them."""
MOST_TRACED = 8  # Most runs of which a report draws a step
TIME_PARTS = (
    "setup_time_s", "data_wait_time_s", "forward_time_s", "backward_time_s", "bubble_time_s",
    "optimizer_time_s", "communication_time_s", "checkpoint_time_s", "validation_time_s", "test_time_s",
    "profiling_time_s",
)  # fmt: skip
"""The parts that sum to a run's time, in the order in which they are stacked."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    reason: str


@dataclass(frozen=True, slots=True)
class ByLabel:
    """A configuration's counts by label of the test part, summed over `runs`."""

    point: Mapping[str, object]
    runs: tuple[int, ...]
    counts: LabelCounts


def answered(ask: Callable[[], Answer]) -> Answer | Unanswered:
    try:
        return ask()
    except answers.AnalysisError as error:
        return Unanswered(str(error))


class Material:
    """Runs, answers, curves and charges of some experiments; the functions read a run's files."""

    def __init__(
        self,
        store: Store,
        experiment_ids: Sequence[int],
        selection: answers.Selection = answers.EVERYTHING,
        *,
        traced: Callable[[Run], TracedStep | None] = lambda run: None,
        unit_scores: UnitScores = no_scores,
        label_counts: Callable[[Run], LabelCounts | None] = lambda run: None,
        made_at_s: float | None = None,
    ) -> None:
        self.store = store
        self.experiment_ids = tuple(dict.fromkeys(experiment_ids))
        self.selection = selection
        self.made_at_s = time.time() if made_at_s is None else made_at_s
        self._traced, self._unit_scores, self._label_counts = traced, unit_scores, label_counts
        self._frontiers: dict[tuple[str, ...], answers.FrontierAnswer] = {}

    @cached_property
    def run_table(self) -> RunTable:
        return read_run_table(self.store, self.experiment_ids, self.selection, unit_scores=self._unit_scores)

    @cached_property
    def question(self) -> Question:
        return Question(self.run_table)

    @cached_property
    def recommendation(self) -> answers.Recommendation | Unanswered:
        """Also for each hardware, where it is an axis of its own."""
        several = len({run.point.get("hardware") for run in self.run_table.runs}) > 1
        question = self.question  # Raises: nothing can be answered of runs that cannot be compared.
        return answered(lambda: question.recommend(per="hardware" if several else None))

    @cached_property
    def effects(self) -> answers.EffectsAnswer | Unanswered:
        """On the metrics of the project's question."""
        return answered(self.question.effects)

    def frontier(self, metrics: Sequence[str] = ()) -> answers.FrontierAnswer:
        key = tuple(metrics)
        if key not in self._frontiers:
            self._frontiers[key] = self.question.frontier(metrics=key)
        return self._frontiers[key]

    @cached_property
    def point_names(self) -> list[str]:
        return self.store.series.point_names(self.experiment_ids)

    def curves(self, options: Options) -> curves.CurveSet:
        return curves.read(self.store, self.experiment_ids, self.selection, options)

    @cached_property
    def ledgers(self) -> tuple[Ledger, ...]:
        """Of all runs, by experiment."""
        return tuple(self.store.accounting.ledger(id) for id in self.experiment_ids)

    @cached_property
    def breakdown(self) -> Mapping[str, Mapping[str, float]]:
        """Mean seconds of each part of a run's time by configuration, over the runs that have it."""
        seconds: dict[str, dict[str, list[float]]] = {}
        columns = {part: self.run_table.column(part).tolist() for part in TIME_PARTS}
        for position, run in enumerate(self.run_table.runs):
            if run.state is RunState.succeeded:
                parts = seconds.setdefault(label_of(run.point), {})
                for part, column in columns.items():
                    if math.isfinite(column[position]):
                        parts.setdefault(part, []).append(column[position])
        return {
            label: {part: sum(values) / len(values) for part, values in parts.items()}
            for label, parts in seconds.items()
            if parts
        }

    @cached_property
    def steps(self) -> Mapping[int, TracedStep]:
        """A step of the first run of each configuration that traced some, as far as they are drawn."""
        steps: dict[int, TracedStep] = {}
        seen: set[str] = set()
        for run in self.run_table.finished:
            label = label_of(run.point)
            if label in seen or len(steps) == MOST_TRACED:
                continue
            if (step := self._traced(run)) is not None:
                steps[run.id] = step
                seen.add(label)
        return steps

    @cached_property
    def by_label(self) -> ByLabel | None:
        """Of the recommended configuration, else of the first; None = there are no counts."""
        chosen, finished = self.recommendation, self.run_table.finished
        if not finished:
            return None
        label = label_of(finished[0].point) if isinstance(chosen, Unanswered) else chosen.winner
        runs = [run for run in finished if label_of(run.point) == label]
        counted = {run.id: counts for run in runs if (counts := self._label_counts(run)) is not None}
        if not counted:
            return None
        return ByLabel(runs[0].point, tuple(counted), LabelCounts.added_up(list(counted.values())))
