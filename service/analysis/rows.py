"""The rows behind a question, and the words of the question: figures, axes, sides, weights. Pure.

A word that no run has is a `BadQuestion` that names the nearest known one.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from service.analysis.answers import AnalysisError, BadQuestion, Criterion
from service.analysis.cells import Side, add_figures, cells_of, configurations
from service.analysis.claims import UnitScores
from service.analysis.drift import drifts
from service.analysis.ranking import Configuration, label_of
from service.analysis.recommend import Constraint
from service.analysis.run_table import Column, RunTable
from service.analysis.uncertainty import Resolution, resolution_of
from service.analysis.words import metric_of
from service.domain.formats import axis_value, point_text, short_name
from service.domain.grid import fields_of
from service.domain.metrics import (
    MARGINS,
    Metric,
    answer_headlines,
    better_of,
    default_metrics,
    evaluation_metrics,
    headline,
    shared_headline,
)
from service.domain.neighbours import DISTURBED_PCT, Neighbour, counted, in_words, of_time
from service.domain.records import Run
from service.domain.states import RunState
from trainers.data.layouts import SplitRule
from trainers.metrics import SCORES, on_test

MOST_SCORES = 2_000_000  # Scores of units held at once; runs beyond them are claimed about over seeds alone


class Rows:
    def __init__(self, run_table: RunTable) -> None:
        run_table.check_comparable()
        self.run_table = run_table
        self.axes = run_table.axes
        self._finished = run_table.finished
        self._is_finished = np.array([run.state is RunState.succeeded for run in run_table.runs], dtype=bool)
        self._columns: dict[str, Column] = {}
        self._added: set[str] = set()  # Figures that the cells have
        self._read_scores: dict[int, Mapping[str, float] | None] = {}

    # -- Words of the question ---------------------------------------------------------------

    def metric(self, text: str) -> Metric:
        return self._metric(text, "metric")

    def named_metric(self, name: str) -> Metric:
        """A figure by its name alone, for questions in which neither direction wins."""
        return Metric(name, better_of(name, self.judged_by.name) or "higher")

    def _metric(self, text: str, parameter: str) -> Metric:
        return metric_of(text, self.figure_names, parameter, self.judged_by.name)

    @functools.cached_property
    def figure_names(self) -> dict[str, None]:
        return self.run_table.figure_names()

    def _metrics(self, names: Sequence[str]) -> list[Metric]:
        if not names:
            return self._default_metrics
        return list(dict.fromkeys(self._metric(name, "metric") for name in names))

    @functools.cached_property
    def _default_metrics(self) -> list[Metric]:
        runs = self.run_table.runs
        names = default_metrics(runs)
        steps = [run.total_steps for run in runs if run.total_steps is not None]
        if steps and not any(steps):
            names = evaluation_metrics(runs, self.figure_names) or names
        return [Metric(name, better_of(name) or "higher") for name in names]

    @functools.cached_property
    def judged_by(self) -> Metric:
        """The headline metric of the runs' task, on the test part where all runs have one."""
        name = answer_headlines(self.run_table.runs)[0]
        return Metric(name, better_of(name) or "higher")

    @functools.cached_property
    def validated_by(self) -> Metric:
        """The same on the validation part, which has a value at each evaluation."""
        name = shared_headline(self.run_table.runs) or headline(self.run_table.runs[0])
        return Metric(name, better_of(name) or "higher")

    def _axes(self, by: Sequence[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.axis(name, "by") for name in by)) if by else self.axes

    def axis(self, name: str, parameter: str) -> str:
        """Accepts the last part of a name, or a field of linked axes, where only one axis has it."""
        known = self.axes
        if name in known:
            return name
        ending = [
            axis
            for axis in known
            if any(name in (part, part.rsplit(".", 1)[-1]) for part in (axis, *fields_of(axis)))
            or name == short_name(axis)
        ]
        if len(ending) == 1:
            return ending[0]
        raise BadQuestion(parameter, f"unknown axis '{name[:100]}'; axes: {', '.join(known) or 'none'}")

    def _point(self, text: str, parameter: str) -> dict[str, Any]:
        values_by_axis: dict[str, Any] = {}
        for part in text.split(","):
            name, separator, written = part.partition("=")
            if not separator:
                raise BadQuestion(
                    parameter, f"'{part.strip()[:100]}' is not AXIS=VALUE, such as precision=fp32"
                )
            axis = self.axis(name.strip(), parameter)
            values = dict.fromkeys(
                axis_value(run.point[axis]) for run in self.run_table.runs if axis in run.point
            )
            if written.strip() not in values:
                raise BadQuestion(
                    parameter, f"no run has {axis}={written.strip()[:100]}; values: {', '.join(values)}"
                )
            values_by_axis[axis] = written.strip()
        return {axis: values_by_axis[axis] for axis in self.axes if axis in values_by_axis}

    def _full(self, point: Mapping[str, Any], every: Sequence[Side]) -> Mapping[str, Any]:
        return next(side.point for side in every if is_at(side.point, point))

    def _margins(self, margins: Mapping[str, float] | None) -> dict[str, float]:
        read: dict[str, float] = dict(MARGINS)
        for name, value in (margins or {}).items():
            metric = self._metric(name, "margin")
            if not 0 < value < math.inf:
                raise BadQuestion("margin", f"margin {value:g} of {metric.name} is not a positive number")
            read[metric.name] = value
        return read

    def _criterion(self, name: str, weight: float) -> Criterion:
        metric = self._metric(name, "weight")
        if not 0 <= weight < math.inf:
            raise BadQuestion("weight", f"weight {weight:g} of {metric.name} is not a number of 0 or more")
        return Criterion(metric.name, weight, metric.better)

    def _constraint(self, name: str, kind: Any, bound: float, parameter: str) -> Constraint:
        metric = self._metric(name, parameter)
        if not math.isfinite(bound) or (kind == "within_of_best" and bound < 0):
            raise BadQuestion(
                parameter, f"{bound:g} is not a bound for {metric.name}; give a number of 0 or more"
            )
        return Constraint(metric.name, kind, bound, metric.better)

    # -- Rows ------------------------------------------------------------------------------

    def cells(self, metrics: Iterable[Metric]) -> list[Configuration]:
        """Returns all cells, with these figures and those that were asked for before."""
        runs, positions = self.run_table.runs, self._positions
        for name in {metric.name for metric in metrics} - self._added:
            add_figures(self._cells, runs, positions, name, self._column(name))
            self._added.add(name)
        return self._cells

    @functools.cached_property
    def _cells(self) -> list[Configuration]:
        return configurations(self.run_table.runs, self._positions)

    @functools.cached_property
    def _positions(self) -> list[list[int]]:
        return cells_of(self.run_table.runs)

    def _column(self, name: str) -> Column:
        if name not in self._columns:
            self._columns[name] = self.run_table.column(name)
        return self._columns[name]

    def resolution(self, metric: str) -> Resolution:
        """By the smallest number of examples that a finished run was judged on."""
        part = "test_examples" if metric.startswith("test_") else "validation_examples"
        fewest = min(self._known(part).tolist(), default=None)
        return resolution_of(metric, headline=self.judged_by.name, examples=fewest)

    def _known(self, name: str) -> Column:
        column = self._column(name)
        return column[self._is_finished & np.isfinite(column)]

    def _unit_scores(self, metric: str, sides: Iterable[Side]) -> dict[str, UnitScores]:
        """Scores of each unit by seed; only the test headline has any."""
        if self.judged_by.name == self.validated_by.name or metric not in (self.judged_by.name, "test_score"):
            return {}
        known = {side.label: side.unit_scores(metric, self._scores_of_run) for side in sides}
        return {label: scores for label, scores in known.items() if scores}

    def _scores_of_run(self, id: int) -> Mapping[str, float] | None:
        if id not in self._read_scores:
            scores = None
            if sum(len(of) for of in self._read_scores.values() if of) < MOST_SCORES:
                scores = self.run_table.unit_scores(self._runs_by_id[id])
            self._read_scores[id] = scores
        return self._read_scores[id]

    @functools.cached_property
    def _runs_by_id(self) -> dict[int, Run]:
        return {run.id: run for run in self.run_table.runs}

    def _having(self, name: str) -> list[int]:
        positions: list[int] = np.flatnonzero(self._is_finished & np.isfinite(self._column(name))).tolist()
        return positions

    def _has(self, name: str) -> bool:
        return bool(self._having(name))

    def _some_lack(self, name: str) -> bool:
        having = set(self._having(name))
        return any(
            any(self._is_finished[at] for at in cell) and having.isdisjoint(cell) for cell in self._positions
        )

    def _candidates(self, metrics: Sequence[Metric]) -> tuple[list[Configuration], dict[str, str]]:
        candidates: list[Configuration] = []
        left_out: dict[str, str] = {}
        for cell in self.cells(metrics):
            missing = [metric.name for metric in metrics if not cell.figures[metric.name]]
            if not missing:
                candidates.append(cell)
            elif len(missing) == len(metrics) and cell.failures:
                left_out[cell.label] = "; ".join(sorted(set(cell.failures.values())))
            else:
                left_out[cell.label] = f"has no {', '.join(missing)}"
        if not candidates:
            first = next(iter(left_out.items()))
            raise AnalysisError(
                f"no configuration has {', '.join(metric.name for metric in metrics)}; {first[0]}: {first[1]}"
            )
        return candidates, left_out

    def _notes(self, metrics: Sequence[Metric]) -> list[str]:
        finished = self._finished
        notes = [*self.run_table.chosen, *self._part_notes(metrics), *self._data_notes()]
        for metric in metrics:
            absent = self._is_finished & np.isnan(self._column(metric.name))
            without = [self.run_table.runs[at] for at in np.flatnonzero(absent).tolist()]
            if finished and len(without) == len(finished):
                notes.append(f"no run has {metric.name}")
            elif without:
                notes.append(f"without {metric.name}: {_runs(without)}")
        if any(metric.name == "energy_kwh" for metric in metrics):
            notes += _energy_notes(finished)
        if any(metric.name == "co2_kg" for metric in metrics):
            notes += _co2_notes(finished)
        if of := [run for run in finished if run.id in self.run_table.shared]:
            notes.append(
                f"{len(of)} of {len(finished)} runs shared a device with other runs (queue.share_device), "
                f"which their times include: {_runs(of)}"
            )
        batches: dict[str, set[int]] = {}
        for run in finished:
            if run.id in self.run_table.sought:
                batches.setdefault(label_of(run.point), set()).add(run.global_batch_size)
        if batches:
            sizes = (f"{' and '.join(map(str, sorted(of)))} ({label})" for label, of in batches.items())
            notes.append(f"batch.global_size largest was found to be {', '.join(sizes)}")
        notes += self._disturbance_notes()
        if self.run_table.with_overhead:
            notes.append("time and cost include an even share of each experiment's overhead; energy does not")
        for _, trend in drifts(self.run_table.references):
            notes += trend.notes()
        seeds = {run.seed for run in finished}
        if len(seeds) == 1:
            notes.append(
                "one seed per configuration, repeated: claims on time, cost and energy hold for this seed, "
                "and nothing can be claimed of other figures"
                if any(run.repeat for run in finished)
                else "one seed per configuration: the spread is unknown, so nothing can be claimed"
            )
        return notes

    def _part_notes(self, metrics: Sequence[Metric]) -> list[str]:
        finished = self._finished
        if not finished:
            return []
        name = self.validated_by.name
        if self.judged_by.name != name:
            notes = [f"judged by {name} on test ({self._examples('test_examples')} examples)"]
            validated = [metric.name for metric in metrics if metric.name in SCORES]
            if validated:
                names, tested = ", ".join(validated), ", ".join(filter(None, map(on_test, validated)))
                notes.append(
                    f"on validation, which also selected the checkpoints: {names}; on test: {tested}"
                )
            return notes
        rules = {str(self.run_table.data.get(run.id, {}).get("test.rule", "")) for run in finished}
        if all(rule.startswith(SplitRule.none) for rule in rules):
            why = "the spec has task.test: none"
        else:
            without = [run for run in finished if run.test_score is None]
            everyone = len(without) == len(finished)
            why = "no run has test figures" if everyone else f"without test figures: {_runs(without)}"
        count = self._examples("validation_examples")
        return [f"judged by {name} on validation{f' ({count} examples)' if count else ''}: {why}"]

    def _data_notes(self) -> list[str]:
        axes = self.run_table.data_axes
        if not axes:
            return []
        own = "validation" if self.judged_by.name == self.validated_by.name else "test"
        files = {
            next(
                (
                    facts[f"{part}.sha256"]
                    for part in (own, "validation", "train")
                    if f"{part}.sha256" in facts
                ),
                "",
            )
            for run in self._finished
            if (facts := self.run_table.data.get(run.id))
        }
        if len(files) < 2:
            return []
        return [
            f"each value of {', '.join(map(short_name, axes))} is judged on its own {own} data, so "
            f"a difference may be one of these; with the same {own} file in each, only training differs"
        ]

    def _examples(self, name: str) -> str:
        """Number of examples that finished runs were judged on; the fewest and the most where it differs."""
        known = self._known(name)
        if not len(known):
            return ""
        fewest, most = int(known.min()), int(known.max())
        return f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"

    def _disturbance_notes(self) -> list[str]:
        notes = []
        runs = self.run_table.runs
        of_cells = {
            point_text(cell.point) or cell.label: finished
            for cell, positions in zip(self._cells, self._positions, strict=True)
            if (finished := [runs[at] for at in positions if self._is_finished[at]])
        }
        causes = {run.id: of for run in self._finished if (of := self.run_table.disturbed.get(run.id))}
        if causes:
            having = [label for label, runs in of_cells.items() if any(run.id in causes for run in runs)]
            where = f" ({_some(having)})" if len(having) < len(of_cells) else ""
            notes.append(
                f"{in_words(len(causes), len(self._finished), counted(causes.values()))}{where}; they may be "
                "slower than their configuration: leave them out with --undisturbed, or remeasure them with "
                "retry --disturbed"
            )
        if left_out := self.run_table.left_out:
            count = len(left_out)
            notes.append(
                f"{count} disturbed run{'s are' if count != 1 else ' is'} left out: {_runs(left_out)}"
            )
        if crowded := self._unlike_company(of_cells):
            notes.append(crowded)
        return notes

    def _unlike_company(self, of_cells: Mapping[str, Sequence[Run]]) -> str | None:
        """Names configurations that ran next to runs of their own experiment where others ran alone."""
        column = of_time(Neighbour.same_experiment)
        beside: dict[bool, list[str]] = {True: [], False: []}
        for label, runs in of_cells.items():
            shares = [share for run in runs if (share := getattr(run, column)) is not None]
            with_company = sum(share > DISTURBED_PCT for share in shares)
            if shares and with_company in (0, len(shares)):
                beside[with_company > 0].append(label)
        if not beside[True] or not beside[False]:
            return None
        alone, crowded = _some(beside[False]), _some(beside[True])
        return (
            f"measured under different conditions: {crowded} next to runs of the same experiment; "
            f"{alone} without"
        )


def is_at(point: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Values may be given as they are or as text."""
    return all(axis in point and axis_value(point[axis]) == axis_value(of) for axis, of in wanted.items())


def _some(labels: Sequence[str]) -> str:
    return "; ".join(labels) if len(labels) <= 3 else f"{len(labels)} configurations"


def _runs(runs: Sequence[Run]) -> str:
    named = ", ".join(f"run:{run.id}" for run in runs[:5])
    return named + (f" and {len(runs) - 5} more" if len(runs) > 5 else "")


def _energy_notes(finished: Sequence[Run]) -> list[str]:
    sources = sorted({run.energy_provenance for run in finished if run.energy_provenance is not None})
    if sources == ["modelled"]:
        return ["energy is modelled from rated power and time, not measured"]
    if len(sources) > 1:
        return [
            f"energy has different provenances ({', '.join(sources)}); it is left out for configurations "
            "that mix them"
        ]
    return []


def _co2_notes(finished: Sequence[Run]) -> list[str]:
    sources = {run.node_energy_source for run in finished if run.co2_kg is not None}
    of = [f"the energy of whole nodes ({source})" for source in sorted(filter(None, sources))]
    of += ["the energy of the devices alone"] * (None in sources)
    note = f"CO2 is from {' or '.join(of)}, the site's PUE and its carbon intensity"
    mixed = "; it is left out for configurations that mix these" * (len(of) > 1)
    return [note + mixed] if of else []
