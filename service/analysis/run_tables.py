"""Reads from the store what an analysis needs, in a handful of statements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from service.analysis.answers import EVERYTHING, Selection
from service.analysis.run_table import Facts, RunTable, UnitScores, no_scores
from service.db import run_table_statements
from service.domain.grid import AxisValue
from service.domain.ledger import Sum
from service.domain.neighbours import disturbances
from service.domain.records import PointRow, Run
from service.domain.states import RUN_STATES_WITH_RESULT, RunState
from service.specs.fields import axis_names
from service.store import Store
from service.store.reading import as_float
from trainers.telemetry.kernels import KERNEL_FIGURES

_ENVIRONMENT = (
    "packages", "python", "platform", "cpu", "cpus", "threads", "device", "gpu", "cuda", "git_commit",
    "git_dirty", "optimizer_library", "precision_implementation", "attention",
)  # fmt: skip
_WITHOUT_EFFECT = frozenset({"max_restarts"})
"""Fields that may be axes and change nothing that is measured."""


def read_run_table(
    store: Store,
    experiment_ids: Sequence[int],
    selection: Selection = EVERYTHING,
    *,
    unit_scores: UnitScores = no_scores,
) -> RunTable:
    """Returns the runs of one or several experiments with everything needed to judge them.

    Raises:
        NotFound: there is no such experiment.
        FilterError: the filter cannot be understood.
    """
    ids = list(dict.fromkeys(experiment_ids))
    experiments = tuple(store.experiment(id) for id in ids)
    every = [run for id in ids for run in store.all_runs(id, selection.filter)]
    runs = [run for run in every if not run.is_reference]
    summaries: dict[int, Mapping[str, Any]] = {}
    data: dict[int, Facts] = {}
    environments: dict[str, tuple[Facts, list[int]]] = {}
    wanted = {run.id for run in every}
    shared: set[int] = set()
    alike: dict[str, Facts] = {}  # Ten thousand runs on the same data share one record of it.
    with store.database.read() as connection:
        for id, summary in connection.execute(run_table_statements.summaries(ids)):
            if id in wanted:
                summaries[id] = summary
        for id, facts in connection.execute(run_table_statements.current_facts(ids)):
            if id not in wanted:
                continue
            if isinstance(of := facts.get("data"), dict):
                data[id] = alike.setdefault(json.dumps(of, sort_keys=True), of)
            if facts.get("device_shared"):
                shared.add(id)
            environment = {name: facts[name] for name in _ENVIRONMENT if name in facts}
            if environment:
                key = json.dumps(environment, sort_keys=True, default=str)
                environments.setdefault(key, (environment, []))[1].append(id)
    runs = with_their_differences(store, ids, runs)
    disturbed = disturbances(runs)
    left_out = {run.id for run in runs if run.id in disturbed} if selection.undisturbed else frozenset()
    if selection.with_overhead:
        shares = {id: OverheadShare.of(store.ledger(id).total, store.run_counts(id)) for id in ids}
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
        disturbed=disturbed,
        left_out=tuple(run for run in runs if run.id in left_out),
        with_overhead=selection.with_overhead,
        references=tuple(run for run in every if run.is_reference),
        unit_scores=unit_scores,
    )


def with_their_differences(store: Store, experiment_ids: Sequence[int], runs: Sequence[Run]) -> list[Run]:
    """Returns runs with each field in which their experiments differ written into their points."""
    if len(experiment_ids) < 2:
        return list(runs)
    with store.database.read() as connection:
        rows = connection.execute(run_table_statements.resolved_specs(experiment_ids))
        specs = {(experiment, cell): json.loads(canonical) for experiment, cell, canonical in rows}
    return with_differing_fields(runs, specs)


def with_differing_fields(
    runs: Sequence[Run], specs: Mapping[tuple[int, str], Mapping[str, Any]]
) -> list[Run]:
    """Writes each field in which the experiments differ into the points of their runs.

    Without this a cell of one experiment would be taken for that of another with, say, another learning rate.
    """
    present = {(run.experiment_id, run.cell) for run in runs}
    resolved = {key: _flat(spec) for key, spec in specs.items() if key in present}
    axes = dict.fromkeys(name for run in runs for name in run.point)
    differing = [
        name
        for name in axis_names()
        if name not in axes
        and name not in _WITHOUT_EFFECT
        and len({json.dumps(flat.get(name)) for flat in resolved.values()}) > 1
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
    """Points by run id and name; runs without any are left out."""
    found: dict[int, dict[str, list[PointRow]]] = {}
    for run in runs:
        series = {
            name: rows for name, rows in store.points(run.id, names, max_points=max_points).items() if rows
        }
        if series:
            found[run.id] = series
    return found


def read_kernels(store: Store, experiment_ids: Sequence[int]) -> dict[int, dict[str, dict[str, float]]]:
    """Figures by run id and the kernel's name; runs that were not profiled are left out."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    profiled: dict[int, int] = {}
    with store.database.read() as connection:
        statement = run_table_statements.kernel_measurements(experiment_ids, KERNEL_FIGURES)
        for run, attempt, scope, name, value in connection.execute(statement):
            if profiled.get(run) != attempt:  # A later attempt's window replaces an earlier one's.
                found[run], profiled[run] = {}, attempt
            found[run].setdefault(scope.removeprefix("kernel:"), {})[name] = as_float(value)
    return found


def _flat(spec: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in spec.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": of for inner, of in value.items()}
        else:
            flat[name] = value
    return flat


_TIMES = ("total_time_s", "train_time_s")


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
        shares = {**dict.fromkeys(_TIMES, self.time_s), "cost_usd": self.cost_usd}
        return {
            name: figures[name] + share for name, share in shares.items() if figures.get(name) is not None
        }
