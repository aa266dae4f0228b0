"""Answers as text for people: tables and stories that fit into 80 columns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from service.domain.access import DEFAULT_POOL, DEFAULT_PROJECT
from service.domain.events import EventKind
from service.domain.formats import (
    ago,
    axis_value,
    clock,
    counts_text,
    duration,
    figure,
    point_text,
    scale_for,
    short_names,
    title,
)
from service.domain.metrics import headline, score, shared_headline
from service.domain.neighbours import Neighbour, counted, disturbances, in_words, of_time
from service.domain.states import RUN_STATES_WITH_RESULT
from service.fairness.explanations import duration_in_words
from service.scheduling.pools import start_command
from service.specs.project_limits import UNITS

if TYPE_CHECKING:
    from service.analysis.answers import ComparedRow, ComparisonAnswer
    from service.config.hardware import Hardware
    from service.domain.outlook import StartForecast
    from service.domain.records import (
        Attempt,
        Event,
        ExperimentDetail,
        ExperimentStatus,
        QueueEntry,
        Run,
        WaitingAtWork,
    )
    from service.domain.shares import ProjectUse, Share
    from service.planner.forecast import Forecast, Span
    from service.planner.preview import PlannedRun
    from service.scheduling.cluster import Pool

_STYLES = {
    "succeeded": "green",
    "running": "cyan",
    "starting": "cyan",
    "failed": "red",
    "cancelled": "yellow",
    "stopped": "yellow",
    "paused": "yellow",
    "queued": "dim",
}


_ROUTINE = frozenset({EventKind.run_starting, EventKind.run_succeeded})
_RUNS_IN_STORY = 50


def state_text(state: Any) -> Text:
    """A state in its colour."""
    return Text(str(state), style=_STYLES.get(str(state), ""))


def grid_table(*headings: str, right: Iterable[str] = ()) -> Table:
    """A table in the house's form: no frame, one rule under the headings."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for heading in headings:
        is_number = heading in set(right)
        table.add_column(heading, justify="right" if is_number else "left", no_wrap=is_number)
    return table


def print_fitting(console: Console, table: Table, otherwise: Iterable[str]) -> None:
    """Print a table, or plain lines when its columns would have to be cut."""
    wanted = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    if wanted <= console.width:
        console.print(table)
    else:
        for line in otherwise:
            console.print(Text(line), soft_wrap=True)


def experiments_table(experiments: Sequence[ExperimentStatus]) -> Table:
    """One line per experiment."""
    table = grid_table("id", "name", "owner", "state", "runs", "submitted", right=("id",))
    for experiment in experiments:
        done = sum(experiment.run_states.get(state, 0) for state in RUN_STATES_WITH_RESULT)
        table.add_row(
            str(experiment.id),
            experiment.name,
            experiment.owner,
            state_text(experiment.state),
            f"{done}/{experiment.run_count}",
            ago(experiment.created_s),
        )
    return table


def experiments_lines(experiments: Sequence[ExperimentStatus]) -> list[str]:
    """What `experiments_table` says, for a terminal too narrow for it."""
    return [
        f"{experiment.id} {experiment.state} {experiment.name} "
        f"({counts_text(experiment.run_states)}), {experiment.owner}, {ago(experiment.created_s)}"
        for experiment in experiments
    ]


def runs_table(runs: Sequence[Run], *, with_experiment: bool = False) -> Table:
    """One line per run with its latest figures."""
    names = short_names(list(dict.fromkeys(axis for run in runs for axis in run.point)))
    headings = ["run", *(["exp."] if with_experiment else []), *names.values(), "seed", "state", "step"]
    shared = shared_headline(runs)
    judged = title(shared) if shared else "score"
    table = grid_table(*headings, "time", judged, right=("exp.", "seed", "step", "time", judged))
    for run in runs:
        table.add_row(
            f"run:{run.id}" + (" ref." if run.is_reference else ""),
            *([str(run.experiment_id)] if with_experiment else []),
            *(axis_value(run.point[axis]) if axis in run.point else "" for axis in names),
            str(run.seed),
            _run_state(run),
            step_text(run),
            figure("total_time_s", run.total_time_s),
            score_text(run, named=shared is None),
        )
    return table


def _run_state(run: Run) -> Text:
    """Its state, or whose figures it shows."""
    return state_text(run.state) if run.reused_from is None else Text(f"= run:{run.reused_from}", "green")


def runs_lines(runs: Sequence[Run]) -> list[str]:
    """What `runs_table` says, for a terminal too narrow for it."""
    return [
        f"run:{run.id} {_run_state(run)} {step_text(run)} {point_text(run.point)} seed={run.seed}"
        + (f" {headline(run)}={value:.3f}" if (value := score(run)) is not None else "")
        for run in runs
    ]


def score_text(run: Run, latest: Mapping[str, float] | None = None, *, named: bool) -> str:
    """The figure by which the run is judged first; with its name where a table has several.

    Args:
        run: the run.
        latest: last value of each of its metrics, where they are known.
        named: whether the name goes with it.
    """
    value = score(run, latest)
    if value is None:
        return "-"
    return f"{title(headline(run))} {value:.3f}" if named else f"{value:.3f}"


def step_text(run: Run) -> str:
    """`40/126`, or `40` while the end is not known, or a dash where nothing is trained."""
    if run.total_steps == 0:
        return "-"
    if run.total_steps is None:
        return "-" if run.step == 0 else str(run.step)
    return f"{run.step}/{run.total_steps}"


def print_comparison(answer: ComparisonAnswer, console: Console) -> None:
    """A comparison with what its reader must know."""
    print_fitting(console, comparison_table(answer), comparison_lines(answer))
    for line in _comparison_notes(answer):
        _say_dim(console, line)


def comparison_table(answer: ComparisonAnswer) -> Table:
    """Rows of a comparison: mean ± standard deviation over seeds; the best mean is marked `*`."""
    names = short_names(answer.axes)
    scales = {
        metric.name: scale_for(
            metric.name,
            [spread.mean for row in answer.rows if (spread := row.figures[metric.name]) is not None],
        )
        for metric in answer.metrics
    }
    table = grid_table(*names.values())
    table.add_column("runs", justify="right", no_wrap=True)
    for metric in answer.metrics:
        unit = scales[metric.name].unit
        heading = f"{title(metric.name)}\n{unit}" if unit else title(metric.name)
        table.add_column(heading, justify="right", no_wrap=True)
    for position, row in enumerate(answer.rows):
        cells = []
        for metric in answer.metrics:
            text = scales[metric.name].spread(row.figures[metric.name])
            best = answer.best.get(metric.name) == position
            cells.append(Text(text + ("*" if best else " "), style="bold green" if best else ""))
        table.add_row(
            *(axis_value(row.point[axis]) for axis in answer.axes),
            f"{row.finished}/{row.planned}",
            *cells,
        )
    return table


def comparison_lines(answer: ComparisonAnswer) -> list[str]:
    """What `comparison_table` says, for a terminal too narrow for it."""
    lines = []
    for position, row in enumerate(answer.rows):
        lines.append(f"{point_text(row.point) or 'all runs'} ({row.finished} of {row.planned} runs)")
        for metric in answer.metrics:
            spread = row.figures[metric.name]
            scale = scale_for(metric.name, [spread.mean] if spread else [])
            best = " *" if answer.best.get(metric.name) == position else ""
            lines.append(f"  {title(metric.name)} {scale.spread(spread)} {scale.unit}".rstrip() + best)
    return lines


def _comparison_notes(answer: ComparisonAnswer) -> list[str]:
    """How to read the table, what its rows lack, and what the answer itself says."""
    spreads = [spread for row in answer.rows for spread in row.figures.values() if spread is not None]
    notes = []
    if any(spread.sd is not None for spread in spreads):
        notes.append("mean ± standard deviation between seeds; * best mean; not tested for significance")
    elif spreads:
        notes.append("* best value; not tested for significance")
    for row in answer.rows:
        notes.extend(_row_notes(row))
    return [*notes, *answer.notes]


def _row_notes(row: ComparedRow) -> list[str]:
    name = point_text(row.point) or "all runs"
    notes = [f"{name}: {count} failed ({reason})" for reason, count in row.failures.items()]
    if row.incomplete:
        notes.append(f"{name}: {row.incomplete} ended early, counted as incomplete results")
    return notes


def experiment_story(
    experiment: ExperimentDetail,
    runs: Sequence[Run],
    events: Sequence[Event],
    console: Console,
    *,
    every_event: bool = False,
) -> None:
    """An experiment from submission to end: where it stands, its runs, what happened.

    Args:
        experiment: with its totals.
        runs: all of them; a long list is cut, with a note.
        events: all of them.
        console: Console to print to.
        every_event: also what happens to every run that goes well.
    """
    console.print(
        Text.assemble(
            (f"experiment {experiment.id}", "bold"), f"  {experiment.name}  ", state_text(experiment.state)
        )
    )
    facts = [("owner", experiment.owner)]
    if experiment.project != DEFAULT_PROJECT:
        facts.append(("project", experiment.project))
    if experiment.tags:
        facts.append(("tags", ", ".join(experiment.tags)))
    if experiment.notes:
        facts.append(("notes", experiment.notes))
    if experiment.archived_s is not None:
        facts.append(("archived", _when(experiment.archived_s)))
    facts.append(("submitted", _when(experiment.created_s)))
    if experiment.started_s is not None:
        facts.append(("started", _when(experiment.started_s)))
    if experiment.ended_s is not None:
        facts.append(("ended", _when(experiment.ended_s)))
    facts.append(("runs", counts_text(experiment.run_states) or "none"))
    if experiment.waiting is not None:
        facts.append(("waiting", f"position {experiment.waiting.position}: {experiment.waiting.reason}"))
    if experiment.cancel_requested_s is not None and experiment.ended_s is None:
        facts.append(("cancel", f"requested {ago(experiment.cancel_requested_s)}"))
    if experiment.pause_requested_s is not None and experiment.ended_s is None:
        facts.append(("pause", f"requested {ago(experiment.pause_requested_s)}"))
    if experiment.attempt > 1:
        facts.append(("attempts", f"{experiment.attempt} Ray jobs so far; now {experiment.submission_id}"))
    elif experiment.submission_id:
        facts.append(("ray job", experiment.submission_id))
    totals = experiment.totals
    facts.append(
        (
            "used",
            f"{figure('cost_usd', totals.cost_usd)}, {figure('energy_kwh', totals.energy_kwh)}, "
            f"{duration(totals.device_hours * 3600)} of device time"
            + (
                f", including {figure('cost_usd', totals.overhead_usd)} of overhead"
                if totals.overhead_usd
                else ""
            ),
        )
    )
    waiting = dict.fromkeys(run.waits_for for run in runs if run.waits_for is not None)
    facts += [("no room", f"runs are waiting for {what}") for what in waiting]
    if experiment.failure_message:
        facts.append(("failure", f"{experiment.failure_class}: {experiment.failure_message}"))
    facts += [("drift", sentence) for sentence in _drift(runs)]
    disturbed = disturbances(run for run in runs if not run.is_reference)
    if disturbed:
        finished = sum(run.state in RUN_STATES_WITH_RESULT for run in runs if not run.is_reference)
        said = in_words(len(disturbed), finished, counted(disturbed.values()))
        facts.append(("warning", f"{said}; to remeasure: stillhouse retry {experiment.id} --disturbed"))
    _print_facts(console, facts)
    if runs:
        console.print()
        shown = runs[:_RUNS_IN_STORY]
        print_fitting(console, runs_table(shown), runs_lines(shown))
        if len(runs) > len(shown):
            _say_dim(console, f"and {len(runs) - len(shown):,} more runs: stillhouse export {experiment.id}")
    told = [event for event in events if every_event or not _is_routine(event)]
    _print_events(console, told)
    if len(told) < len(events):
        _say_dim(console, f"{len(events) - len(told):,} routine events hidden (--events)")


def _drift(runs: Sequence[Run]) -> list[str]:
    """What the reference runs say; nothing where there are none."""
    if not any(run.is_reference for run in runs):
        return []  # The statistics are not loaded for nothing.
    from service.analysis.drift import drifts

    return [found.sentence() for _, found in drifts(runs)]


def _is_routine(event: Event) -> bool:
    """Whether an event says only that a run goes as it should; a later attempt's start is worth telling."""
    if event.kind == EventKind.run_started:
        return (event.attempt or 1) == 1
    return event.kind in _ROUTINE


def run_story(
    run: Run,
    attempts: Sequence[Attempt],
    events: Sequence[Event],
    summary: Mapping[str, Any],
    console: Console,
) -> None:
    """A run from its first attempt to its figures."""
    console.print(
        Text.assemble(
            (f"run:{run.id}", "bold"), f"  of experiment {run.experiment_id}  ", state_text(run.state)
        )
    )
    facts = [
        ("point", f"{point_text(run.point) or 'no axes'} seed={run.seed}"),
        (
            "trains",
            f"{run.student}"
            + (f", distilled from {run.teacher}," if run.teacher else "")
            + f" on {run.task}, {run.precision}, batch {run.global_batch_size}",
        ),
        (
            "with",
            f"{run.optimizer} ({run.implementation}), {run.workers} x {run.hardware}, "
            + strategy_text(run.strategy, attempts),
        ),
        ("progress", f"step {step_text(run)}" + (f", {run.phase}" if run.phase and not run.ended_s else "")),
    ]
    if run.waits_for is not None:
        facts.append(("waiting for", run.waits_for))
    if run.reused_from is not None:
        facts.append(("reuses", f"run:{run.reused_from}, with the same settings and data"))
    if run.checkpoint is not None:
        facts.append(("checkpoint", f"step {run.checkpoint_step}: {run.checkpoint}"))
    if run.best_checkpoint is not None:
        best = "" if run.best_score is None else f", {title(headline(run))} {run.best_score:.4f}"
        facts.append(("best", f"step {run.best_step}{best}: {run.best_checkpoint}"))
    if run.test_score is not None:
        facts.append(
            (
                "test",
                f"{title(headline(run))} {run.test_score:.4f} on {run.test_examples:,} examples, scored once",
            )
        )
    if run.failure_message:
        facts.append(("failure", f"{run.failure_class}: {run.failure_message}"))
    told = (attempts[-1].facts if attempts else None) or {}
    if told.get("device_shared"):
        facts.append(("device", "shared with other runs: its times include theirs, its energy is modelled"))
    facts += [
        ("neighbours", f"{kind.words} used the node {share:.0f}% of the time")
        for kind in Neighbour
        if (share := getattr(run, of_time(kind)) or 0.0) >= 0.5
    ]
    _print_facts(console, facts)
    for attempt in attempts:
        console.print(_attempt_line(attempt))
    if summary:
        console.print()
        figures = grid_table("figure", "value", right=("value",))
        for name, value in summary.items():
            figures.add_row(name, figure(name, value))
        console.print(figures)
    _print_events(console, events)


def strategy_text(strategy: str, attempts: Sequence[Attempt]) -> str:
    """A strategy with the shape of its pipeline, where an attempt has told of it."""
    told = next((attempt.facts for attempt in reversed(attempts) if attempt.facts), {})
    parallel = told.get("config", {}).get("parallel", {})
    if strategy != "pipeline" or not parallel:
        return strategy
    stages = parallel.get("stages") or parallel["workers"]
    engine = parallel.get("engine") or "torch"
    schedule = "" if engine == "deepspeed" else f", {parallel.get('schedule') or '1f1b'}"
    return f"pipeline of {stages} stages on {engine}{schedule}"


def _attempt_line(attempt: Attempt) -> Text:
    line = Text.assemble((f"attempt {attempt.number}", "bold"), "  ", state_text(attempt.state))
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
        line.append(f"\n           {attempt.failure_class}: {attempt.failure_message}", style="red")
    if attempt.summary is not None:
        told = [
            f"{title(name)} {figure(name, value)}"
            for name in ("total_time_s", "cost_usd", "score")
            if isinstance(value := attempt.summary.get(name), int | float)
        ]
        line.append(
            f"\n           remeasured since; this attempt: {', '.join(told) or 'no figures'}", style="dim"
        )
    return line


def _print_facts(console: Console, facts: Sequence[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    console.print(table)


def _print_events(console: Console, events: Sequence[Event]) -> None:
    if not events:
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for event in events:
        about = f"run:{event.run_id}" if event.run_id is not None else ""
        table.add_row(clock(event.at_s), about, event.message)
    console.print()
    console.print(table)


def queue_table(entries: Sequence[QueueEntry], at_work: Sequence[WaitingAtWork] = ()) -> Table:
    """What waits, why, and until when; first what is at work and waits for capacity, without a position."""
    rows = [(each.experiment, "", "at work", each.reason) for each in at_work]
    rows += [(each.experiment, str(each.position), _start(each.start), each.reason) for each in entries]
    several = any(experiment and experiment.pool != DEFAULT_POOL for experiment, *_ in rows)
    pool = ("pool",) if several else ()
    table = grid_table(
        *pool, "#", "id", "name", "owner", "priority", "starts", "reason", right=("#", "id", "priority")
    )
    for experiment, position, start, reason in rows:
        what = ("", "", "", "")
        if experiment is not None:
            what = (str(experiment.id), experiment.name, experiment.owner, str(experiment.priority))
        its_pool = (experiment.pool if experiment is not None else "",) if several else ()
        table.add_row(*its_pool, position, *what, start, reason)
    return table


def _start(forecast: StartForecast | None) -> str:
    """When a waiting experiment will start, from now."""
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


def pools_table(pools: Sequence[Pool]) -> Table:
    """Pools, one per row: who serves each, and what its cluster has."""
    table = grid_table("pool", "schedulers", "Ray", "nodes", "resources", right=("nodes",))
    for pool in pools:
        if pool.age_s is None:
            ray = "never seen"
        else:
            ray = f"{'reachable' if pool.reachable else 'unreachable'} {duration(pool.age_s)} ago"
        table.add_row(
            pool.pool,
            ", ".join(pool.schedulers) or f"none; start one with: {start_command(pool.pool)}",
            ray,
            str(sum(node.alive for node in pool.nodes)),
            ", ".join(
                f"{count:g} {name}"
                for name, count in sorted(pool.totals.items())
                if ":" not in name and not name.endswith("memory")
            ),
        )
    return table


def shares_table(shares: Sequence[Share]) -> Table:
    """Shares of each kind of device: a project per row, and below it its users."""
    right = ("devices", "USD/h", "entitled", "used USD", "of all")
    table = grid_table("hardware", "who", *right, "waits", right=right)
    for share in shares:
        pool = "" if share.pool == DEFAULT_POOL else f"{share.pool}: "
        project = share.project or "other projects"
        table.add_row(
            "" if share.user else f"{pool}{share.hardware}",
            f"  {share.user}" if share.user else project,
            f"{share.held_devices:g}",
            f"{share.held_usd_per_hour:.2f}",
            f"{share.entitled_usd_per_hour:.2f}",
            f"{share.used_usd:.2f}",
            f"{share.used_part:.0%}",
            "yes" if share.waits else "",
        )
    return table


def use_table(use: ProjectUse) -> Table:
    """What a project has used in a month: all of it, then each user's part."""
    table = grid_table(f"{use.project}, {use.month}", *UNITS.values(), right=tuple(UNITS.values()))
    for name, used in [("all", use.used), *((each.user, each.used) for each in use.users)]:
        table.add_row(name, *(f"{getattr(used, unit):,.3f}" for unit in UNITS))
    return table


def hardware_table(entries: Sequence[Hardware]) -> Table:
    """The catalogue, one device per row; `hardware_sheet` has the sources."""
    names = ("GiB", "GB/s", "W", "fp32", "tf32", "fp16", "bf16", "USD/h")
    table = grid_table("name", *names, right=names)
    for entry in entries:
        peaks = {str(precision): peak for precision, peak in (entry.peak_tflops or {}).items()}
        table.add_row(
            " = ".join((entry.name, *entry.aliases)),
            _figure(entry.memory_gib),
            _figure(entry.bandwidth_gb_s),
            _figure(entry.tdp_w),
            *(_figure(peaks.get(precision)) for precision in names[3:7]),
            f"{entry.price_usd_per_hour:.2f}",
        )
    table.caption = "fp32 to bf16: peak TFLOP/s, dense; sources: stillhouse hardware NAME"
    return table


def hardware_sheet(entry: Hardware) -> Table:
    """All that is known of a device, with its sources."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    peaks = [f"{precision} {peak:g}" for precision, peak in (entry.peak_tflops or {}).items()]
    rows = {
        "name": " = ".join((entry.name, *entry.aliases)),
        "Ray label": entry.accelerator_type or "-",
        "memory": f"{_figure(entry.memory_gib)} GiB, {_figure(entry.bandwidth_gb_s)} GB/s",
        "power": f"{entry.tdp_w:g} W",
        "peaks": ", ".join(peaks) + " TFLOP/s, dense" if peaks else "-",
        "source": entry.source or "no data sheet",
        "no data sheet for": ", ".join(entry.without_data_sheet) or "-",
        "price": f"{entry.price_usd_per_hour:.2f} USD/h, {entry.price_date}",
        "price source": entry.price_source,
    }
    for word, value in rows.items():
        table.add_row(word, value)
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def preview_table(runs: Sequence[PlannedRun]) -> Table:
    """The runs that a spec would make, with what each reserves."""
    names = short_names(list(dict.fromkeys(axis for run in runs for axis in run.point)))
    table = grid_table(
        "#", *names.values(), "seed", "hardware", "CPUs", "USD/h", "runs here",
        right=("#", "seed", "CPUs", "USD/h"),
    )  # fmt: skip
    for run in runs:
        here = Text("yes", style="green") if run.feasible else Text(run.reason or "no", style="red")
        if run.reused_from is not None:
            here = Text(f"reuses run:{run.reused_from}", style="green")
        few, many = run.min_workers, run.workers
        hardware = run.hardware if many == 1 else f"{spanned(str(few), str(many))} x {run.hardware}"
        cpus = spanned(str(run.cpus // many * few), str(run.cpus))
        price = spanned(f"{run.min_price_usd_per_hour:.2f}", f"{run.price_usd_per_hour:.2f}")
        table.add_row(
            str(run.index),
            *(axis_value(run.point[axis]) if axis in run.point else "" for axis in names),
            str(run.seed),
            hardware,
            cpus,
            price,
            here,
        )
    return table


def exclusive_lines(runs: Sequence[PlannedRun]) -> list[str]:
    """What it costs that runs are measured alone; nothing where none is."""
    found = {
        (run.hardware, run.cpus, run.at_a_time, run.at_a_time_shared): None
        for run in runs
        if run.at_a_time_shared is not None and run.feasible
    }
    return [
        f"measure: exclusive: a run on {hardware} holds {cpus} CPUs, {alone} at a time instead of {shared}"
        for hardware, cpus, alone, shared in found
    ]


def spanned(low: str, high: str) -> str:
    """A range as people write it: `1-4`, or `4` where both ends are the same."""
    return high if low == high else f"{low}-{high}"


def forecast_lines(forecast: Forecast) -> list[str]:
    """What a whole grid will take, and what that rests on."""
    lines = []
    if forecast.runs:
        shown: list[tuple[str, Span, Callable[[float], str]]] = [
            ("cost", forecast.cost_usd, lambda usd: figure("cost_usd", usd)),
            ("energy", forecast.energy_kwh, lambda kwh: figure("energy_kwh", kwh)),
            ("device time", forecast.device_hours, lambda hours: duration(3600 * hours)),
        ]
        lines.append(f"forecast of {forecast.runs:,} runs, with 90% intervals:")
        lines += [f"  {name} {text(s.middle)} ({text(s.low)} to {text(s.high)})" for name, s, text in shown]
        lines += [f"  {words}" for words in forecast.basis]
    return [*lines, *(f"  no forecast for {words}" for words in forecast.unknown)]


def _say_dim(console: Console, text: str) -> None:
    console.print(Text(text, style="dim"), soft_wrap=True)


def _when(at_s: float) -> str:
    return f"{clock(at_s)} ({ago(at_s)})"
