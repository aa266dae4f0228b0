"""What an answer rests on, as read from the store: the runs, all their figures, and their data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from service.analysis.answers import EVERYTHING, AnalysisError, NotComparable, Selection
from service.config.hardware import on_demand_ratio
from service.db import schema
from service.domain.grid import AxisValue, fields_of, varied_fields
from service.domain.ledger import Account, Sum
from service.domain.metrics import finite
from service.domain.neighbours import Neighbour, disturbances
from service.domain.records import Experiment, PointRow, Run, sought_batch
from service.domain.states import RUN_STATES_WITH_RESULT, RunState
from service.specs.fields import axis_names
from service.specs.models import RUN
from service.store import Store
from service.store.runs import as_float
from trainers.telemetry.kernels import KERNEL_FIGURES

_r = schema.runs.c

Facts = Mapping[str, Any]
Column = npt.NDArray[np.float64]

_OF_THE_CONFIGURATION = frozenset({"max_length", "tokenizer.sha256"})
"""Facts of the data as it is fed that belong to what is compared, not to the question."""
_OF_AN_AXIS = {"train_examples": "task.train_examples", "train.selected": "task.train_examples"}
"""Facts that may differ when the axis that sets them is one of the grid's."""
_DATA_FIELDS = frozenset({"task.path", "task.detokenise"})
"""Fields that choose the data: where an experiment has one of them as an axis, each value has its own."""
_TEACHER = "teacher.sha256"
UnitScores = Callable[[Run], Mapping[str, float] | None]
"""Each test unit's share of a run's headline, by the unit's name; None where that is not known."""
_ENVIRONMENT = (
    "packages", "python", "platform", "cpu", "cpus", "threads", "device", "gpu", "cuda", "git_commit",
    "git_dirty", "optimizer_library", "precision_implementation", "attention",
)  # fmt: skip
_WITHOUT_EFFECT = frozenset({"max_restarts"})  # Fields that may be axes and change nothing that is measured
_TIMES = ("total_time_s", "train_time_s")
_COSTS = ("cost_usd", "train_cost_usd")


def no_scores(run: Run) -> None:
    del run


@dataclass(frozen=True, slots=True)
class RunTable:
    """Runs as read from the store, with everything needed to judge them; mappings are by run id."""

    experiments: tuple[Experiment, ...]
    runs: tuple[Run, ...]  # In grid order; fields in which several experiments differ are axes
    summaries: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # All final figures
    data: Mapping[int, Facts] = field(default_factory=dict)  # Trained and judged on; not of unstarted runs
    environments: Sequence[tuple[Facts, tuple[int, ...]]] = ()  # Machines and versions, with ids of runs
    shared: frozenset[int] = frozenset()  # Ids of runs whose device other runs might use at the same time
    sought: frozenset[int] = frozenset()  # Ids of runs that found their batch: `batch.global_size: largest`
    disturbed: Mapping[int, tuple[Neighbour, ...]] = field(default_factory=dict)
    on_markets: Mapping[int, tuple[Account, float]] = field(default_factory=dict)
    """By run on another market than on-demand: its charges, and the on-demand price over its own."""
    left_out: tuple[Run, ...] = ()  # Disturbed runs that are not among `runs`, on request
    with_overhead: bool = False  # Time and cost of the runs have a share of their experiment's overhead
    references: tuple[Run, ...] = ()  # Runs that only measure how the machine drifted; in no answer
    unit_scores: UnitScores = no_scores  # Reads a run's scores of the test part's units
    chosen: tuple[str, ...] = ()  # What of the experiments was chosen from other parts of their study

    def column(self, name: str) -> Column:
        """Returns a figure of all runs (N,), in the metric's unit; NaN where a run has no finite one."""
        if name in Run.__dataclass_fields__:
            values = [getattr(run, name) for run in self.runs]
        else:
            values = [None] * len(self.runs)
        summaries = self.summaries
        if summaries and None in values:
            values = [
                summaries.get(run.id, {}).get(name) if value is None else value
                for run, value in zip(self.runs, values, strict=True)
            ]
        try:
            column = np.array(values, dtype=float)
        except (TypeError, ValueError):  # A word in some summary.
            column = np.array([finite(value) for value in values], dtype=float)
        column[~np.isfinite(column)] = np.nan
        return column

    def figure_names(self) -> dict[str, None]:
        names: dict[str, None] = {}
        for summary in self.summaries.values():
            for name, value in summary.items():
                if name not in names and finite(value) is not None:
                    names[name] = None
        return names

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.state is RunState.succeeded]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for run in self.runs for name in run.point))

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes over the data, which an experiment itself has: a difference between two is an accident."""
        return tuple(
            axis
            for axis in self.axes
            if _DATA_FIELDS.intersection(fields_of(axis))
            and len({(run.experiment_id, run.point.get(axis)) for run in self.runs})
            > len({run.experiment_id for run in self.runs})
        )

    def check_comparable(self) -> None:
        if self.left_out and not any(run.state in RUN_STATES_WITH_RESULT for run in self.runs):
            count = len(self.left_out)
            raise AnalysisError(
                f"no undisturbed run has a result: {count} {'was' if count == 1 else 'were'} disturbed; "
                f"remeasure with: stillhouse retry {self.left_out[0].experiment_id} --disturbed"
            )
        if not self.runs:
            raise AnalysisError("there is nothing to compare: the experiment has no runs")
        tasks = list(dict.fromkeys(run.task for run in self.runs))
        if len(tasks) > 1:
            raise NotComparable(
                f"the runs are of different tasks ({', '.join(tasks)}); "
                f"compare runs of one task, for instance with the filter: task = '{tasks[0]}', or rank over "
                "tasks with: stillhouse tasks"
            )
        varied = varied_fields(self.axes)
        data_axes = self.data_axes
        seen: dict[tuple[AxisValue | None, ...], tuple[Any, int]] = {}
        for run in self.runs:
            dataset = tuple(run.point.get(axis) for axis in data_axes)
            for name, value in self.data.get(run.id, {}).items():
                if name in _OF_THE_CONFIGURATION or _OF_AN_AXIS.get(name) in varied:
                    continue
                if name == _TEACHER and (run.teacher or "").startswith(RUN):
                    continue  # A run never changes, and the spec has which one it is.
                first, number = seen.setdefault((*dataset, name), (value, run.id))
                if first != value:
                    raise NotComparable(
                        f"the runs differ in their data: {name} is {_short(first)} in run:{number} "
                        f"and {_short(value)} in run:{run.id}; compare runs on the same data, for "
                        "instance with a filter"
                    )


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text


def read_run_table(
    store: Store,
    experiment_ids: Sequence[int],
    selection: Selection = EVERYTHING,
    *,
    unit_scores: UnitScores = no_scores,
) -> RunTable:
    ids = list(dict.fromkeys(experiment_ids))
    experiments = tuple(store.experiments.get(id) for id in ids)
    every = [run for id in ids for run in store.runs.all_of(id, selection.filter)]
    runs = [run for run in every if not run.is_reference]
    summaries: dict[int, Mapping[str, Any]] = {}
    data: dict[int, Facts] = {}
    environments: dict[str, tuple[Facts, list[int]]] = {}
    wanted = {run.id for run in every}
    shared: set[int] = set()
    sought: set[int] = set()
    alike: dict[str, Facts] = {}  # Ten thousand runs on the same data share one record of it.
    with store.database.read() as connection:
        of_summaries = (
            sa.select(schema.run_summaries.c.run_id, schema.run_summaries.c.summary)
            .join(schema.runs, _r.id == schema.run_summaries.c.run_id)
            .where(_r.experiment_id.in_(list(ids)))
        )
        for id, summary in connection.execute(of_summaries):
            if id in wanted:
                summaries[id] = summary
        a = schema.attempts.c
        source = schema.runs.alias("source")
        current_facts = (
            sa.select(_r.id, a.facts)
            .join(source, source.c.id == sa.func.coalesce(_r.reused_from, _r.id))
            .join(schema.attempts, (source.c.id == a.run_id) & (source.c.attempt == a.number))
            .where(_r.experiment_id.in_(list(ids)), a.facts.is_not(None))
            .order_by(_r.id)
        )
        for id, facts in connection.execute(current_facts):
            if id not in wanted:
                continue
            if isinstance(of := facts.get("data"), dict):
                data[id] = alike.setdefault(json.dumps(of, sort_keys=True), of)
            if facts.get("device_shared"):
                shared.add(id)
            if sought_batch(facts):
                sought.add(id)
            environment = {name: facts[name] for name in _ENVIRONMENT if name in facts}
            if environment:
                key = json.dumps(environment, sort_keys=True, default=str)
                environments.setdefault(key, (environment, []))[1].append(id)
    runs = with_their_differences(store, ids, runs)
    disturbed = disturbances(runs)
    left_out = {run.id for run in runs if run.id in disturbed} if selection.undisturbed else frozenset()
    on_markets = _on_markets(store, runs)
    if selection.with_overhead:
        shares = {
            id: OverheadShare.of(store.accounting.ledger(id).total, store.experiments.run_counts(id))
            for id in ids
        }
        runs = [shares[run.experiment_id].added_to(run) for run in runs]
        summaries = {
            run.id: shares[run.experiment_id].added_to_summary(summaries[run.id])
            for run in runs
            if run.id in summaries
        }
    return RunTable(
        experiments=experiments,
        runs=tuple(run for run in runs if run.id not in left_out),
        summaries=summaries,
        data=data,
        environments=tuple((facts, tuple(of)) for facts, of in environments.values()),
        shared=frozenset(shared),
        sought=frozenset(sought),
        disturbed=disturbed,
        on_markets=on_markets,
        left_out=tuple(run for run in runs if run.id in left_out),
        with_overhead=selection.with_overhead,
        references=tuple(run for run in every if run.is_reference),
        unit_scores=unit_scores,
        chosen=tuple(f"experiment {id}: {words}" for id, words in store.studies.chosen(ids).items()),
    )


def _on_markets(store: Store, runs: Sequence[Run]) -> dict[int, tuple[Account, float]]:
    catalogue = store.settings.catalogue()
    ratios = {name: on_demand_ratio(name, catalogue) for name in {run.hardware for run in runs}}
    wanted = {run.id: ratio for run in runs if (ratio := ratios[run.hardware]) is not None}
    experiments = {run.experiment_id for run in runs if run.id in wanted}
    accounts = (account for id in experiments for account in store.accounting.ledger(id).runs)
    return {each.run_id: (each, wanted[each.run_id]) for each in accounts if each.run_id in wanted}


def with_their_differences(store: Store, experiment_ids: Sequence[int], runs: Sequence[Run]) -> list[Run]:
    if len(experiment_ids) < 2:
        return list(runs)
    with store.database.read() as connection:
        c = schema.cell_specs.c
        resolved_specs = sa.select(c.experiment_id, c.cell, c.canonical).where(
            c.experiment_id.in_(list(experiment_ids))
        )
        rows = connection.execute(resolved_specs)
        specs = {(experiment, cell): json.loads(canonical) for experiment, cell, canonical in rows}
    return with_differing_fields(runs, specs)


def with_differing_fields(
    runs: Sequence[Run], specs: Mapping[tuple[int, str], Mapping[str, Any]]
) -> list[Run]:
    """Writes differing fields into points, so that cells of experiments that differ in them stay apart."""
    present = {(run.experiment_id, run.cell) for run in runs}
    resolved = {key: flat_spec(spec) for key, spec in specs.items() if key in present}
    axes = dict.fromkeys(name for run in runs for name in run.point)
    differing = [
        name
        for name in axis_names()
        if name not in axes
        and name not in _WITHOUT_EFFECT
        and len({json.dumps(flat.get(name)) for flat in resolved.values() if _has_effect(name, flat)}) > 1
    ]
    if not differing and all(run.point.keys() == axes.keys() for run in runs):
        return list(runs)
    return [
        replace(
            run,
            point={
                name: run.point[name]
                if name in run.point
                else _axis_value(resolved[run.experiment_id, run.cell].get(name))
                for name in (*axes, *differing)
            },
        )
        for run in runs
    ]


def _axis_value(value: Any) -> AxisValue:
    """A list, such as `model.layers`, becomes its JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def read_curves(
    store: Store, runs: Sequence[Run], names: Sequence[str], *, max_points: int | None = None
) -> dict[int, dict[str, list[PointRow]]]:
    curves: dict[int, dict[str, list[PointRow]]] = {}
    for run in runs:
        series = {
            name: rows
            for name, rows in store.series.points(run.id, names, max_points=max_points).items()
            if rows
        }
        if series:
            curves[run.id] = series
    return curves


def read_kernels(store: Store, experiment_ids: Sequence[int]) -> dict[int, dict[str, dict[str, float]]]:
    """Figures by run id and the kernel's name; runs that were not profiled are left out."""
    kernels: dict[int, dict[str, dict[str, float]]] = {}
    profiled: dict[int, int] = {}
    with store.database.read() as connection:
        m = schema.measurements.c
        source = schema.runs.alias("source")
        statement = (
            sa.select(_r.id, m.attempt, m.scope, m.name, m.value)
            .join(source, source.c.id == sa.func.coalesce(_r.reused_from, _r.id))
            .join(schema.measurements, m.run_id == source.c.id)
            .where(
                _r.experiment_id.in_(list(experiment_ids)),
                m.name.in_(list(KERNEL_FIGURES)),
                m.scope.startswith("kernel:", autoescape=True),
                m.attempt >= source.c.first_attempt,
            )
            .order_by(_r.id, m.attempt)
        )
        for run, attempt, scope, name, value in connection.execute(statement):
            if profiled.get(run) != attempt:  # A later attempt's window replaces an earlier one's.
                kernels[run], profiled[run] = {}, attempt
            kernels[run].setdefault(scope.removeprefix("kernel:"), {})[name] = as_float(value)
    return kernels


def flat_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all fields by dotted name; a section within a section is there as a whole too."""
    flat = {name: value for name, value in spec.items() if not isinstance(value, dict)}
    for name, section in spec.items():
        if isinstance(section, dict):
            flat |= {f"{name}.{inner}": of for inner, of in (section | flat_spec(section)).items()}
    return flat


def _has_effect(name: str, flat: Mapping[str, Any]) -> bool:
    return flat.get("model.teacher") is not None or not name.startswith("distillation.")


@dataclass(frozen=True, slots=True)
class OverheadShare:
    time_s: float
    cost_usd: float

    @classmethod
    def of(cls, total: Sum, counts: Mapping[RunState, int]) -> OverheadShare:
        results = max(1, sum(counts.get(state, 0) for state in RUN_STATES_WITH_RESULT))
        return cls(total.overhead_s / results, total.overhead_usd / results)

    def added_to(self, run: Run) -> Run:
        """Figures that the run lacks stay unknown."""
        added = self._added({name: getattr(run, name) for name in (*_TIMES, "cost_usd")})
        return replace(run, **added)  # type: ignore[arg-type]

    def added_to_summary(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        return {**summary, **self._added(summary)}

    def _added(self, figures: Mapping[str, Any]) -> dict[str, float]:
        shares = {**dict.fromkeys(_TIMES, self.time_s), **dict.fromkeys(_COSTS, self.cost_usd)}
        return {
            name: figures[name] + share for name, share in shares.items() if figures.get(name) is not None
        }
