"""Records as text for people: tables and stories that fit into 80 columns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from service.cli.terminal import console, grid_table, note, print_grid, print_rows, print_table, say, say_dim
from service.domain.access import DEFAULT_POOL, DEFAULT_PROJECT
from service.domain.events import EventKind
from service.domain.formats import (
    ago,
    axis_value,
    clock,
    counts_text,
    duration,
    figure,
    replicate_text,
    short_names,
    title,
)
from service.domain.metrics import headline, score, shared_headline
from service.domain.neighbours import Neighbour, counted, disturbances, in_words, of_time
from service.domain.records import sought_batch
from service.domain.states import RUN_STATES_WITH_RESULT, ExperimentState, RunState
from service.fairness.eta import duration_in_words
from service.scheduling.cluster import start_command
from service.specs.project_limits import UNITS
from trainers.parallel_kinds import STRATEGIES

if TYPE_CHECKING:
    from service.config.hardware import Hardware
    from service.domain.metrics import Span
    from service.domain.records import Attempt, Event, ExperimentDetail, ExperimentStatus, QueueListing, Run
    from service.domain.shares import ProjectUse, Share, StartForecast
    from service.planner.forecast import Forecast
    from service.planner.preview import PlannedRun, Preview
    from service.scheduling.cluster import Pool

_STYLES = {
    "succeeded": "green",
    "running": "cyan",
    "starting": "cyan",
    "incomplete": "dark_orange",
    "failed": "red",
    "cancelled": "yellow",
    "stopped": "yellow",
    "paused": "yellow",
    "preempted": "yellow",
    "queued": "dim",
}

_ROUTINE = frozenset({EventKind.run_starting, EventKind.run_succeeded})
_TO_RETRY = frozenset({ExperimentState.incomplete, ExperimentState.failed})
_RUNS_IN_STORY = 50


def state_text(state: Any) -> Text:
    return Text(str(state), style=_STYLES.get(str(state), ""))


def print_experiments(experiments: Sequence[ExperimentStatus]) -> None:
    rows = []
    for each in experiments:
        done = sum(each.run_states.get(state, 0) for state in RUN_STATES_WITH_RESULT)
        failed = each.run_states.get(RunState.failed, 0)
        runs = f"{done}/{each.run_count}" + f", {failed} failed" * bool(failed)
        rows.append((each.id, each.name, each.owner, state_text(each.state), runs, ago(each.created_s)))
    print_rows(("id", "name", "owner", "state", "runs", "submitted"), rows, right=("id",))


def axis_columns(
    runs: Sequence[Run | PlannedRun],
) -> tuple[list[str], Callable[[Run | PlannedRun], list[str]]]:
    """Returns the headings of the axes of some runs, and a function for a run's cells under them."""
    names = short_names(list(dict.fromkeys(axis for run in runs for axis in run.point)))

    def cells(run: Run | PlannedRun) -> list[str]:
        return [axis_value(run.point[axis]) if axis in run.point else "" for axis in names]

    return [*names.values()], cells


def print_runs(runs: Sequence[Run], *, with_experiment: bool = False) -> None:
    """Prints a row per run with its latest figures; one that reuses another names that one as its state."""
    axes, axis_cells = axis_columns(runs)
    shared = shared_headline(runs)
    judged = title(shared) if shared else "score"
    seed = ["seed", *["repeat"] * any(run.repeat for run in runs)]
    rows = [
        (
            f"run:{run.id}" + (" ref." if run.is_reference else ""),
            *([run.experiment_id] if with_experiment else []),
            *axis_cells(run),
            *(getattr(run, of) for of in seed),
            state_text(run.state) if run.reused_from is None else Text(f"= run:{run.reused_from}", "green"),
            step_text(run),
            figure("total_time_s", run.total_time_s),
            score_text(run, named=shared is None),
        )
        for run in runs
    ]
    experiment = ["exp."] if with_experiment else []
    headings = ("run", *experiment, *axes, *seed, "state", "step", "time", judged)
    print_rows(headings, rows, right=("exp.", *seed, "step", "time", judged))


def score_text(run: Run, latest: Mapping[str, float] | None = None, *, named: bool) -> str:
    """Formats the run's headline figure from its metrics' last values, with its name if `named`."""
    value = score(run, latest)
    if value is None:
        return "-"
    return f"{title(headline(run))} {value:.3f}" if named else f"{value:.3f}"


def step_text(run: Run) -> str:
    """Formats `40/126`, or `40` while the end is unknown, or a dash where nothing is trained."""
    if run.total_steps == 0:
        return "-"
    if run.total_steps is None:
        return "-" if run.step == 0 else str(run.step)
    return f"{run.step}/{run.total_steps}"


def print_experiment(
    experiment: ExperimentDetail, runs: Sequence[Run], events: Sequence[Event], *, every_event: bool = False
) -> None:
    name = (f"experiment {experiment.id}", "bold")
    console().print(Text.assemble(name, f"  {experiment.name}  ", state_text(experiment.state)))
    print_grid(((name, text) for name, text in _experiment_facts(experiment, runs) if text), "dim", "")
    if runs:
        console().print()
        print_runs(runs[:_RUNS_IN_STORY])
        if len(runs) > _RUNS_IN_STORY:
            say_dim(f"and {len(runs) - _RUNS_IN_STORY:,} more runs: stillhouse export {experiment.id}")
    shown = [event for event in events if every_event or not _is_routine(event)]
    _print_events(shown)
    if len(shown) < len(events):
        say_dim(f"{len(events) - len(shown):,} routine events hidden (--events)")


def _experiment_facts(experiment: ExperimentDetail, runs: Sequence[Run]) -> Iterator[tuple[str, str | None]]:
    yield "owner", experiment.owner
    yield "project", experiment.project if experiment.project != DEFAULT_PROJECT else None
    yield "tags", ", ".join(experiment.tags)
    yield "notes", experiment.notes
    for name in ("archived", "submitted", "started", "ended"):
        at_s = getattr(experiment, f"{'created' if name == 'submitted' else name}_s")
        yield name, None if at_s is None else f"{clock(at_s)} ({ago(at_s)})"
    if (study := experiment.study) is not None:
        yield "part", f"{study.part} of study {study.id}: {study.name}"
    yield "runs", counts_text(experiment.run_states) or "none"
    if experiment.state in _TO_RETRY and experiment.run_states.get(RunState.failed):
        yield "to retry", f"stillhouse retry {experiment.id} --failed"
    if experiment.waiting is not None:
        yield "waiting", f"position {experiment.waiting.position}: {experiment.waiting.reason}"
    if experiment.ended_s is None:
        for name in ("cancel", "pause"):
            at_s = getattr(experiment, f"{name}_requested_s")
            yield name, None if at_s is None else f"requested {ago(at_s)}"
    if experiment.attempt > 1:
        yield "attempts", f"{experiment.attempt} drivers so far; now in Ray job {experiment.submission_id}"
    else:
        yield "ray job", experiment.submission_id
    totals = experiment.totals
    used = f"{figure('cost_usd', totals.cost_usd)}, {figure('energy_kwh', totals.energy_kwh)}"
    if totals.co2_kg is not None:
        used += f", {figure('co2_kg', totals.co2_kg)} of CO2"
    used += f", {duration(totals.device_hours * 3600)} of device time"
    if totals.overhead_usd:
        used += f", including {figure('cost_usd', totals.overhead_usd)} of overhead"
    yield "used", used
    for resource in dict.fromkeys(run.waits_for for run in runs if run.waits_for is not None):
        yield "no room", f"runs are waiting for {resource}"
    if experiment.failure_message:
        yield "failure", f"{experiment.failure_class}: {experiment.failure_message}"
    if any(run.is_reference for run in runs):  # The statistics are not loaded for nothing.
        from service.analysis.drift import drifts

        yield from (("drift", drift.sentence()) for _, drift in drifts(runs))
    disturbed = disturbances(run for run in runs if not run.is_reference)
    if disturbed:
        finished = sum(run.state in RUN_STATES_WITH_RESULT for run in runs if not run.is_reference)
        warning = in_words(len(disturbed), finished, counted(disturbed.values()))
        yield "warning", f"{warning}; to remeasure: stillhouse retry {experiment.id} --disturbed"


def _is_routine(event: Event) -> bool:
    if event.kind == EventKind.run_started:  # The start of a later attempt is of interest.
        return (event.attempt or 1) == 1
    return event.kind in _ROUTINE


def print_run(
    run: Run, attempts: Sequence[Attempt], events: Sequence[Event], summary: Mapping[str, Any]
) -> None:
    name = (f"run:{run.id}", "bold")
    console().print(Text.assemble(name, f"  of experiment {run.experiment_id}  ", state_text(run.state)))
    print_grid(_run_facts(run, attempts), "dim", "")
    for attempt in attempts:
        console().print(_attempt_line(attempt))
    if summary:
        console().print()
        rows = [(name, figure(name, value)) for name, value in summary.items()]
        print_table(("figure", "value"), rows, right=("value",))
    _print_events(events)


def _run_facts(run: Run, attempts: Sequence[Attempt]) -> Iterator[tuple[str, str]]:
    distilled = f", distilled from {run.teacher}," if run.teacher else ""
    strategy = strategy_text(run.strategy, attempts)
    yield "point", replicate_text(run) if run.point else f"no axes {replicate_text(run)}"
    batch = f"batch {run.global_batch_size}" if run.global_batch_size else "the largest batch that fits"
    if any(sought_batch(attempt.facts or {}) for attempt in attempts):
        batch += " (the largest that fits)"
    yield "trains", f"{run.student}{distilled} on {run.task}, {run.precision}, {batch}"
    yield "with", f"{run.optimizer} ({run.implementation}), {run.workers} x {run.hardware}, {strategy}"
    phase = f", {run.phase}" if run.phase and not run.ended_s else ""
    yield "progress", f"step {step_text(run)}{phase}"
    if run.waits_for is not None:
        yield "waiting for", run.waits_for
    if run.reused_from is not None:
        yield "reuses", f"run:{run.reused_from}, with the same settings and data"
    if run.checkpoint is not None:
        yield "checkpoint", f"step {run.checkpoint_step}: {run.checkpoint}"
    if run.best_checkpoint is not None:
        best = "" if run.best_score is None else f", {title(headline(run))} {run.best_score:.4f}"
        yield "best", f"step {run.best_step}{best}: {run.best_checkpoint}"
    if run.test_score is not None:
        examples = f"{run.test_examples:,} examples, scored once"
        yield "test", f"{title(headline(run))} {run.test_score:.4f} on {examples}"
    if run.failure_message:
        yield "failure", f"{run.failure_class}: {run.failure_message}"
    if ((attempts[-1].facts if attempts else None) or {}).get("device_shared"):
        yield "device", "shared with other runs: its times include theirs, its energy is modelled"
    for kind in Neighbour:
        if (share := getattr(run, of_time(kind)) or 0.0) >= 0.5:
            yield "neighbours", f"{kind.words} used the node {share:.0f}% of the time"


def strategy_text(strategy: str, attempts: Sequence[Attempt]) -> str:
    """Names a strategy, with the shape of its pipeline where an attempt has reported it."""
    facts = next((attempt.facts for attempt in reversed(attempts) if attempt.facts), {})
    parallel = facts.get("config", {}).get("parallel", {})
    if strategy not in STRATEGIES or not STRATEGIES[strategy].staged or not parallel:
        return strategy
    stages = parallel.get("stages") or parallel["workers"]
    engine = parallel.get("engine") or "torch"
    schedule = "" if engine == "deepspeed" else f", {parallel.get('schedule') or '1f1b'}"
    return f"{strategy} of {stages} stages on {engine}{schedule}"


def _attempt_line(attempt: Attempt) -> Text:
    how = str(attempt.failure_class or attempt.state)
    style = _STYLES.get(how, _STYLES.get(str(attempt.state), ""))
    line = Text.assemble((f"attempt {attempt.number}", "bold"), "  ", (how, style))
    line.append(f"  {clock(attempt.started_s)}")
    if attempt.ended_s is not None:
        line.append(f", {duration(attempt.ended_s - attempt.started_s)}")
    if attempt.resumed_from_step:
        line.append(f", resumed from step {attempt.resumed_from_step}")
    line.append(f", reached step {attempt.last_step}")
    if attempt.workers > 1:
        line.append(f", {attempt.workers} workers")
    if attempt.node:
        line.append(f", on {attempt.node}")
    if attempt.failure_message:
        line.append(f"\n           {attempt.failure_message}", style=style)
    if attempt.summary is not None:
        figures = [
            f"{title(name)} {figure(name, value)}"
            for name in ("total_time_s", "cost_usd", "score")
            if isinstance(value := attempt.summary.get(name), int | float)
        ]
        shown = ", ".join(figures) or "no figures"
        line.append(f"\n           remeasured since; this attempt: {shown}", style="dim")
    return line


def _print_events(events: Sequence[Event]) -> None:
    if not events:
        return
    console().print()
    rows = (
        (clock(event.at_s), f"run:{event.run_id}" if event.run_id is not None else "", event.message)
        for event in events
    )
    print_grid(rows, "dim", "", "")


def print_queue(queue: QueueListing) -> None:
    """Prints what waits, why, and until when; above it, runs at work that wait for capacity."""
    waiting = [(each.experiment, "", "at work", each.reason) for each in queue.at_work]
    waiting += [
        (each.experiment, str(each.position), _start(each.start), each.reason) for each in queue.items
    ]
    several = any(experiment and experiment.pool != DEFAULT_POOL for experiment, *_ in waiting)
    rows = []
    for experiment, position, start, reason in waiting:
        pool = [getattr(experiment, "pool", None)] if several else []
        what = [getattr(experiment, name, None) for name in ("id", "name", "owner", "priority")]
        rows.append((*pool, position, *what, start, reason))
    headings = (*(["pool"] if several else []), "#", "id", "name", "owner", "priority", "starts", "reason")
    print_table(headings, rows, right=("#", "id", "priority"))


def _start(forecast: StartForecast | None) -> str:
    if forecast is None:
        return ""
    if forecast.earliest_s is None:
        return "not in sight"
    now = time.time()
    low = duration_in_words(max(0.0, forecast.earliest_s - now))
    if forecast.latest_s is None:
        return f"in {low} or later"
    high = duration_in_words(max(0.0, forecast.latest_s - now))
    return f"in {low}" if low == high else f"in {low} to {high}"


def print_pools(pools: Sequence[Pool]) -> None:
    rows = []
    for pool in pools:
        ray = "never seen"
        if pool.age_s is not None:
            ray = f"{'reachable' if pool.reachable else 'unreachable'} {duration(pool.age_s)} ago"
        resources = (
            f"{count:g} {name}"
            for name, count in sorted(pool.totals.items())
            if ":" not in name and not name.endswith("memory")
        )
        schedulers = ", ".join(pool.schedulers) or f"none; start one with: {start_command(pool.pool)}"
        nodes = str(sum(node.stays for node in pool.nodes))
        rows.append((pool.pool, schedulers, ray, nodes, ", ".join(resources)))
    headings = ("pool", "schedulers", "Ray", "nodes", "resources")
    print_table(headings, rows, right=("nodes",))
    for pool in pools:
        for node in pool.nodes:
            if node.alive and node.draining:
                say(f"pool {pool.pool}: {node.departure}; nothing starts there")
        for each in pool.to_come:
            say(f"pool {pool.pool}: {each.count} x {each.node_in_words}, can come (group {each.group})")


def print_shares(shares: Sequence[Share]) -> None:
    """Prints the shares of each kind of device: a project per row, and below it its users."""
    rows = []
    for each in shares:
        pool = "" if each.pool == DEFAULT_POOL else f"{each.pool}: "
        whose = (pool + each.hardware, each.project or "other projects")
        amounts = each.held_usd_per_hour, each.entitled_usd_per_hour, each.used_usd
        rows.append(
            (
                *(("", f"  {each.user}") if each.user else whose),
                f"{each.held_devices:g}",
                *map(partial(figure, "price_usd"), amounts),
                f"{each.used_part:.0%}",
                "yes" if each.waits else "",
            )
        )
    right = ("devices", "per hour", "entitled", "used", "of all")
    print_table(("hardware", "who", *right, "waits"), rows, right=right)


def print_use(use: ProjectUse) -> None:
    used = [("all", use.used), *((each.user, each.used) for each in use.users)]
    rows = [(name, *(f"{getattr(part, unit):,.3f}" for unit in UNITS)) for name, part in used]
    units = list(UNITS.values())
    print_table((f"{use.project}, {use.month}", *units), rows, right=units)
    for budget in use.budgets:
        unit = UNITS[budget.unit]
        say(
            f"budget: {budget.used:,.4g} of {budget.budget:,.4g} {unit}, {budget.left:,.4g} left; "
            f"{budget.forecast:,.4g} by the end of the month at this rate"
        )


def print_hardware(entries: Sequence[Hardware]) -> None:
    """Prints the catalogue, one device per row; `print_device` shows the sources."""
    names = ("GiB", "GB/s", "W", "fp32", "tf32", "fp16", "bf16", "USD/h")
    peaks_of = [{str(name): peak for name, peak in (entry.peak_tflops or {}).items()} for entry in entries]
    rows = [
        (
            " = ".join((entry.name, *entry.aliases)),
            *map(_figure, (entry.memory_gib, entry.bandwidth_gb_s, entry.tdp_w)),
            *(_figure(peaks.get(precision)) for precision in names[3:7]),
            f"{entry.price_usd_per_hour:.2f}",
        )
        for entry, peaks in zip(entries, peaks_of, strict=True)
    ]
    table = grid_table(("name", *names), rows, right=names)
    table.caption = "fp32 to bf16: peak TFLOP/s, dense; sources: stillhouse hardware NAME"
    console().print(table)


def print_device(entry: Hardware) -> None:
    peaks = [f"{precision} {peak:g}" for precision, peak in (entry.peak_tflops or {}).items()]
    rows = {
        "name": " = ".join((entry.name, *entry.aliases)),
        "Ray label": entry.accelerator_type or "-",
        "memory": f"{_figure(entry.memory_gib)} GiB, {_figure(entry.bandwidth_gb_s)} GB/s",
        "power": f"{entry.tdp_w:g} W",
        "of that, in training": f"{entry.power_fraction:g}, {entry.power_fraction_source or 'not measured'}",
        "peaks": ", ".join(peaks) + " TFLOP/s, dense" if peaks else "-",
        "source": entry.source or "no data sheet",
        "no data sheet for": ", ".join(entry.without_data_sheet) or "-",
        "price": f"{entry.price_usd_per_hour:.2f} USD/h, {entry.price_date}",
        "price source": entry.price_source,
        **{
            str(market): f"{price.price_usd_per_hour:.2f} USD/h, {price.price_date}; {price.price_source}"
            for market, price in entry.markets.items()
        },
    }
    print_grid(rows.items(), "", "")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def preview_table(runs: Sequence[PlannedRun]) -> Table:
    axes, axis_cells = axis_columns(runs)
    seed = ["seed", *["repeat"] * any(run.repeat for run in runs)]
    rows = []
    for run in runs:
        here = Text("yes", style="green") if run.feasible else Text("no", style="red")
        if run.reused_from is not None:
            here = Text(f"reuses run:{run.reused_from}", style="green")
        few, many = run.min_workers, run.workers
        devices = run.hardware if many == 1 else f"{_range(few, many)} x {run.hardware}"
        cpus = _range(run.cpus // many * few, run.cpus)
        price = _range(f"{run.min_price_usd_per_hour:.2f}", f"{run.price_usd_per_hour:.2f}")
        rows.append(
            (run.index, *axis_cells(run), *(getattr(run, of) for of in seed), devices, cpus, price, here)
        )
    headings = ("#", *axes, *seed, "hardware", "CPUs", "USD/h", "runs here")
    return grid_table(headings, rows, right=("#", *seed, "CPUs", "USD/h"))


def _range(low: object, high: object) -> str:
    return str(high) if low == high else f"{low}-{high}"


def print_preview(planned: Preview) -> None:
    console().print(preview_table(planned.items))
    left = planned.run_count - len(planned.items)
    reused = f", {planned.reused_count:,} reused" if planned.reused_count else ""
    hidden = f", {left:,} not shown (--limit)" if left else ""
    cells = f"{planned.cell_count:,} cell{'s' * (planned.cell_count != 1)}"
    say(f"{cells}, {planned.run_count:,} runs in total{reused}{hidden}")
    for line in _reason_lines(planned):
        say(line)
    for line in exclusive_lines(planned.items):
        say(line)
    for reason in dict.fromkeys(run.not_reused for run in planned.items if run.not_reused):
        note(f"not reused: {reason}")
    if planned.forecast is not None:
        for line in _forecast_lines(planned.forecast):
            say(line)
        for warning in planned.forecast.warnings:
            note(f"warning: {warning}")
    if planned.start is not None:
        say(f"{planned.start.hardware}: {planned.start.words}")
    for line in planned.notes:
        note(f"note: {line}")
    if planned.cluster_age_s is None:
        note("no scheduler has reported the cluster yet: capacity was not checked")


def _reason_lines(planned: Preview) -> Iterator[str]:
    """Yields each reason once, although most are those of many runs."""
    for reason, cells in planned.infeasible_cells.items():
        yield f"{cells:,} of {planned.cell_count:,} cells would end at once: {reason}"
    shown: dict[str, list[int]] = {}
    for run in planned.items:
        if run.reason is not None and run.reason not in planned.infeasible_cells:
            shown.setdefault(run.reason, []).append(run.index)
    for reason, runs in shown.items():
        whole = len(runs) == runs[-1] - runs[0] + 1
        which = f"{runs[0]} to {runs[-1]}" if whole and len(runs) > 1 else ", ".join(map(str, runs))
        yield f"not here, # {which}: {reason}"


def exclusive_lines(runs: Sequence[PlannedRun]) -> list[str]:
    """Returns what it costs to measure runs alone; nothing where none is."""
    shapes = {
        (run.hardware, run.cpus, run.at_a_time, run.at_a_time_shared): None
        for run in runs
        if run.at_a_time_shared is not None and run.feasible
    }
    return [
        f"measure: exclusive: a run on {hardware} holds {cpus} CPUs, {alone} at a time instead of {shared}"
        for hardware, cpus, alone, shared in shapes
    ]


def _forecast_lines(forecast: Forecast) -> list[str]:
    lines = []
    if forecast.runs:
        shown: list[tuple[str, Span, Callable[[float], str]]] = [
            ("cost", forecast.cost_usd, lambda usd: figure("cost_usd", usd)),
            ("energy", forecast.energy_kwh, lambda kwh: figure("energy_kwh", kwh)),
            ("device time", forecast.device_hours, lambda hours: duration(3600 * hours)),
        ]
        if forecast.co2_kg is not None:
            shown.insert(2, ("CO2", forecast.co2_kg, lambda kg: figure("co2_kg", kg)))
        lines.append(f"forecast of {forecast.runs:,} runs, with 90% intervals:")
        lines += [f"  {name} {text(s.middle)} ({text(s.low)} to {text(s.high)})" for name, s, text in shown]
        lines += [f"  {words}" for words in forecast.basis]
    return [*lines, *(f"  no forecast for {words}" for words in forecast.unknown)]
