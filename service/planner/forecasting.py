"""Forecasts of a spec from what this installation has run."""

import contextlib
import functools
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import sqlalchemy as sa

from service.config.document import Problem, SpecError
from service.config.hardware import Hardware
from service.db import schema
from service.domain.metrics import Span, finite
from service.domain.states import RunState
from service.planner.forecast import (
    Cell,
    CountExamples,
    Forecast,
    GridForecast,
    Past,
    RunForecast,
    forecast,
    forecast_run,
    nothing_counted,
    of_its_kind,
    too_small,
)
from service.specs.experiment import ExperimentSpec, read_stored
from service.specs.fields import Budget
from service.specs.model_fit import student_flops
from service.specs.project_limits import UNITS
from service.store import NotFound, Store
from trainers.data.storage import Place

_r = schema.runs.c

_SPANS = {"usd": "cost_usd", "kwh": "energy_kwh", "device_hours": "device_hours"}  # Of a forecast, by unit
MOST_CELLS = 500  # Grid points that are looked at; of a larger grid every n-th, which then stands for n
FEW_CELLS = 12  # The same where only the time of a run is asked for
MOST_PAST = 500  # Finished runs that are looked at
_LOOKED_THROUGH = 20_000  # Finished runs, the newest, among which like ones are looked for


def forecast_of(
    spec: ExperimentSpec,
    store: Store,
    catalogue: Mapping[str, Hardware],
    *,
    reused: Collection[int] = (),
    count: CountExamples = nothing_counted,
) -> GridForecast:
    """Returns the forecast of a whole grid; runs at the positions `reused` are not trained."""
    cells = _cells(spec, catalogue, reused, store.settings.roots("model"))
    past, site = read_past(store, [cell.spec for cell in cells]), store.settings.site(spec.pool)
    return forecast(spec, cells, past, catalogue, site, count)


def run_time_of(spec: ExperimentSpec, store: Store, catalogue: Mapping[str, Hardware]) -> Span | None:
    """Returns the seconds that one run of a spec takes, whichever it is; None = not known."""
    cells = _cells(spec, catalogue, (), store.settings.roots("model"), most=FEW_CELLS)
    past = read_past(store, [cell.spec for cell in cells])
    found = [forecast_run(cell.spec, cell.student, of_its_kind(cell.spec, past), catalogue) for cell in cells]
    times = [each.time_s for each in found if isinstance(each, RunForecast)]
    if not times:
        return None
    return Span(
        min(each.low for each in times),
        statistics.median(each.middle for each in times),
        max(each.high for each in times),
    )


def budget_problems(spec: ExperimentSpec, store: Store, catalogue: Mapping[str, Hardware]) -> list[Problem]:
    """Returns budget limits that not even the smallest run fits into; reads nothing without limits."""
    if spec.budget == Budget(when_reached=spec.budget.when_reached, runs=spec.budget.runs):
        return []
    found = forecast_of(spec, store, catalogue)
    return [Problem("budget-too-small", path, message) for path, message in too_small(spec, found)]


def beyond_projects_budget(spec: ExperimentSpec, found: Forecast, store: Store) -> tuple[str, ...]:
    """Returns a line for each of its project's monthly budgets that a grid would use up."""
    lines = []
    with contextlib.suppress(NotFound):
        use = store.projects.use(spec.project)
        for budget in use.budgets:
            span, left = getattr(found, _SPANS[budget.unit]), max(0.0, budget.left)
            if span.middle > budget.left:
                lines.append(
                    f"project {spec.project} has {left:.4g} of {budget.budget:g} {UNITS[budget.unit]} left "
                    f"for {use.month}, and these runs are forecast to take {span.middle:.4g} ({span.low:.4g} "
                    f"to {span.high:.4g}); the last of them would wait for the next month or a larger budget"
                )
    return tuple(lines)


def read_past(store: Store, specs: list[ExperimentSpec]) -> list[Past]:
    newest = (
        sa.select(_r.id)
        .where(_r.state == RunState.succeeded, _r.reused_from.is_(None))
        .order_by(_r.id.desc())
        .limit(_LOOKED_THROUGH)
        .subquery()
    )
    statement = (
        sa.select(
            schema.cell_specs.c.canonical,
            _r.global_batch_size,
            _r.total_steps,
            _r.total_time_s,
            _r.energy_kwh,
            schema.run_summaries.c.summary,
        )
        .join(newest, newest.c.id == _r.id)
        .join(
            schema.cell_specs,
            (schema.cell_specs.c.experiment_id == _r.experiment_id) & (schema.cell_specs.c.cell == _r.cell),
        )
        .outerjoin(schema.run_summaries, schema.run_summaries.c.run_id == _r.id)
        .where(
            _r.task.in_(list({str(spec.task.name) for spec in specs})),
            _r.student.in_(list({spec.model.name for spec in specs})),
            _r.hardware.in_(list({spec.hardware for spec in specs})),
            _r.total_time_s.is_not(None),
            _r.total_steps.is_not(None),
        )
        .order_by(_r.id.desc())
        .limit(MOST_PAST)
    )
    with store.database.read() as connection:
        rows = connection.execute(statement).all()
    return [
        Past(
            spec=read_stored(canonical).with_batch(batch),
            steps=steps,
            total_time_s=total_time_s,
            setup_time_s=finite((summary or {}).get("setup_time_s")) or 0.0,
            energy_kwh=energy_kwh,
        )
        for canonical, batch, steps, total_time_s, energy_kwh, summary in rows
    ]


def _cells(
    spec: ExperimentSpec,
    catalogue: Mapping[str, Hardware],
    reused: Collection[int],
    roots: Sequence[Place],
    most: int = MOST_CELLS,
) -> list[Cell]:
    each = spec.runs_per_cell
    count = spec.grid_count() // each
    every = -(-count // most)
    each_stands_for = count / len(range(0, count, every))
    taken_over = Counter(index // each for index in reused)
    flops_of = functools.cache(functools.partial(student_flops, roots=roots))
    cells = []
    for number, point in enumerate(spec.search.expected_points()):
        if number % every:
            continue
        try:
            resolved = spec.at(point, catalogue)
        except SpecError:
            continue  # Marked in the preview, and never run.
        cells.append(
            Cell(resolved, (each - taken_over[number]) * each_stands_for, flops_of(resolved.model.name))
        )
    if cells and (repeated := spec.run_count() - spec.grid_count()):
        cells.append(replace(cells[0], runs=repeated))
    return cells
