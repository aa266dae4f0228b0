"""Configurations at their best value of a nuisance axis, such as the learning rate. Pure.

The value is chosen for each configuration by its mean on the validation part, never on the test part.
Choosing is selection, so there are two kinds of claims:

- If every chosen configuration ran at least two seeds that not all of its tried values ran, such seeds chose
  nothing. Figures and claims are over them alone, and the family is all pairs of the chosen.
- Otherwise the same seeds chose and test. Claims are then those that `compare --claims` makes of the chosen
  points: the family is all pairs of whatever was tried, from which any may be picked.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from service.analysis.answers import AnalysisError, BadQuestion, BestValue, ComparisonAnswer, Tuning
from service.analysis.cells import Side, sides
from service.analysis.claims import Family
from service.analysis.question import Question
from service.analysis.ranking import Configuration, label_of
from service.analysis.repeats import means_by_seed
from service.analysis.run_table import RunTable
from service.analysis.uncertainty import Resolution
from service.domain.metrics import Metric
from service.domain.records import Run

_FEWEST_FRESH = 2  # As many as a claim needs


class AtBest(Question):
    """The runs of another question at the best value of some axes, which its points then lack."""

    def __init__(self, tried: Question, over: Sequence[str]) -> None:
        self._tried = tried
        self._over = tuple(dict.fromkeys(tried.axis(name, "best_over") for name in over))
        if len(self._over) == len(tried.axes):
            raise BadQuestion("best_over", "a comparison needs an axis besides those of best_over")
        for axis in self._over:
            if len({json.dumps(run.point.get(axis)) for run in tried.run_table.runs}) < 2:
                raise BadQuestion("best_over", f"{axis} has only one value; leave it out")
        self.tuning, runs = self._chosen()
        self._chosen_labels = {label_of({**of.point, **of.chosen}) for of in self.tuning.best}
        super().__init__(replace(tried.run_table, runs=runs))

    def compare(self, **asked: Any) -> ComparisonAnswer:
        return replace(super().compare(**asked), tuning=self.tuning)

    def _chosen(self) -> tuple[Tuning, tuple[Run, ...]]:
        tried, metric = self._tried, self._tried.validated_by
        arms: dict[str, list[Configuration]] = {}
        for cell in tried.cells([metric]):
            arms.setdefault(label_of(self._rest(cell.point)), []).append(cell)
        runs_of: dict[str, list[Run]] = {}
        for run in tried.run_table.runs:
            runs_of.setdefault(label_of(run.point), []).append(run)
        seeds_of = {label: {run.seed for run in runs} for label, runs in runs_of.items()}
        best: list[BestValue] = []
        left_out: dict[str, str] = {}
        winners: list[tuple[Configuration, set[int]]] = []
        for label, cells in arms.items():
            shared = set.intersection(*(seeds_of[cell.label] for cell in cells))
            deciding = shared or set.union(*(seeds_of[cell.label] for cell in cells))
            values = {
                cell.label: [
                    of for seed, of in means_by_seed(cell.figures[metric.name]).items() if seed in deciding
                ]
                for cell in cells
            }
            most = max(map(len, values.values()))
            if not most:
                reasons = sorted({why for cell in cells for why in cell.failures.values()})
                left_out[label] = "; ".join(reasons) or f"has no {metric.name}"
                continue
            # A mean over those seeds that survived would flatter.
            eligible = [cell for cell in cells if len(values[cell.label]) == most]
            pick = max if metric.better == "higher" else min
            winner = pick(eligible, key=lambda cell: statistics.fmean(values[cell.label]))
            winners.append((winner, seeds_of[winner.label] - deciding if len(cells) > 1 else deciding))
            best.append(
                BestValue(
                    label=label,
                    point=self._rest(winner.point),
                    chosen={axis: winner.point.get(axis) for axis in self._over},
                    mean=statistics.fmean(values[winner.label]),
                    seeds=most,
                    tried=len(cells),
                    fewer_seeds=tuple(
                        label_of({axis: cell.point.get(axis) for axis in self._over})
                        for cell in cells
                        if cell not in eligible
                    ),
                )
            )
        if not best:
            raise AnalysisError(f"no configuration has {metric.name}, by which the best would be chosen")
        fresh = all(len(seeds) >= _FEWEST_FRESH for _, seeds in winners)
        runs = [
            replace(run, point=self._rest(run.point))
            for winner, seeds in winners
            for run in runs_of[winner.label]
            if not fresh or run.seed in seeds
        ]
        runs.sort(key=lambda run: (run.experiment_id, run.index))
        return Tuning(self._over, metric, fresh, tuple(best), left_out), tuple(runs)

    def _rest(self, point: Mapping[str, Any]) -> dict[str, Any]:
        return {axis: value for axis, value in point.items() if axis not in self._over}

    def _family(self, every: Sequence[Side], metric: Metric, margin: float | None, alpha: float) -> Family:
        if not self.tuning.fresh:
            if any(side.point.keys() != set(self.axes) for side in every):
                raise AnalysisError(
                    "the seeds that are compared also chose the best values, so a claim about means over "
                    "other axes cannot be corrected; compare by all axes, or run the chosen "
                    "configurations with fresh seeds"
                )
            every = [*every, *self._rivals({side.label for side in every}, metric)]
        return super()._family(every, metric, margin, alpha)

    def _rivals(self, compared: set[str], metric: Metric) -> list[Side]:
        """What was tried and not chosen, of the compared configurations."""
        every, _ = sides(self._tried.cells([metric]), self._tried.axes, [metric.name])
        among = compared | self.tuning.left_out.keys()
        return [
            side
            for side in every
            if side.label not in self._chosen_labels and label_of(self._rest(side.point)) in among
        ]

    def resolution(self, metric: str) -> Resolution:
        return self._tried.resolution(metric)

    def _scores_of_run(self, id: int) -> Mapping[str, float] | None:
        return self._tried._scores_of_run(id)

    def _notes(self, metrics: Sequence[Metric]) -> list[str]:
        return [*super()._notes(metrics), *_words(self.tuning, self.run_table)]


def _words(tuning: Tuning, compared: RunTable) -> list[str]:
    over = ", ".join(tuning.axes)
    counts = sorted({of.tried for of in tuning.best})
    first = f"each configuration is at its best {over} by mean {tuning.metric.name} on validation"
    if len(counts) == 1:
        notes = [f"{first}; {counts[0]} values were tried for each"]
    else:
        notes = [
            f"{first}; between {counts[0]} and {counts[-1]} values were tried, which favours configurations "
            "with more of them"
        ]
    for of in tuning.best:
        if of.fewer_seeds:
            fewer = "; ".join(of.fewer_seeds)
            notes.append(f"{of.label}: not eligible, because fewer seeds have a result: {fewer}")
    notes += [f"{label} is left out: {reason}" for label, reason in tuning.left_out.items()]
    if tuning.fresh:
        seeds = ", ".join(map(str, sorted({run.seed for run in compared.runs})[:20]))
        notes.append(f"figures and claims are over seeds that chose nothing: {seeds}")
    else:
        notes.append(
            "the same seeds chose and are compared, so the figures flatter, and claims are corrected over "
            "all that was tried; for figures and claims of the chosen alone, run them with at least two "
            "fresh seeds and compare both experiments together"
        )
    return notes
