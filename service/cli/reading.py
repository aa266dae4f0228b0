"""Commands that look: list, runs, show, watch, logs, wait, queue, export."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.connection import connected
from service.cli.exits import ExitCode, Failure
from service.cli.output import Json, console, json_text, note, print_json, say
from service.cli.references import RunRef, experiment_reference, reference
from service.domain.formats import TableFormat

if TYPE_CHECKING:
    from service.client import Client
    from service.domain.records import Event, LogLine

Either = Annotated[
    str, typer.Argument(metavar="ID", help="An experiment, such as 17, or a run, such as run:42.")
]
Filter = Annotated[
    str | None, typer.Option(help="Conditions, such as: precision = 'bf16' and accuracy > 0.9")
]
OrderBy = Annotated[str | None, typer.Option(help="Columns, with ASC or DESC, such as: cost_usd ASC, id")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, help="Show at most this many.")]

_POLL_S = 0.5
_PAGE_LINES = 1000


def list_experiments(
    filter: Filter = None,
    order_by: OrderBy = None,
    limit: Limit = 20,
    archived: Annotated[
        bool, typer.Option("--archived", help="Include archived ones, as a filter does.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List experiments, newest first, without archived ones unless a filter is given."""
    if filter is None and not archived:
        filter = "archived_s IS NULL"
    with connected() as client:
        found = list(islice(client.all_experiments(filter=filter, order_by=order_by), limit + 1))
    if as_json:
        print_json(found[:limit])
        return
    if not found:
        note("no experiments; submit one: stillhouse submit examples/demo.yaml")
        return
    from service.cli.rendering import experiments_lines, experiments_table, print_fitting

    print_fitting(console(), experiments_table(found[:limit]), experiments_lines(found[:limit]))
    _say_more(len(found) > limit, limit)


def runs(filter: Filter = None, order_by: OrderBy = None, limit: Limit = 20, as_json: Json = False) -> None:
    """List runs over all experiments."""
    with connected() as client:
        found = list(islice(client.all_runs(filter=filter, order_by=order_by), limit + 1))
    if as_json:
        print_json(found[:limit])
        return
    if not found:
        note("no runs" + (" match the filter" if filter else ""))
        return
    from service.cli.rendering import print_fitting, runs_lines, runs_table

    shown = found[:limit]
    print_fitting(console(), runs_table(shown, with_experiment=True), runs_lines(shown))
    _say_more(len(found) > limit, limit)


def _say_more(more: bool, limit: int) -> None:
    if more:
        note(f"more than {limit}; raise --limit, or narrow down with --filter")


def show(
    target: Either,
    every_event: Annotated[
        bool, typer.Option("--events", help="Show every event, including routine ones.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the history of an experiment or run: state, attempts, failures, resumes, events."""
    from service.cli.rendering import experiment_story, run_story

    found = reference(target)
    with connected() as client:
        if isinstance(found, RunRef):
            run = client.run(found.id)
            attempts = client.attempts(found.id)
            summary = client.summary(found.id)
            events = [e for e in _all_events(client, run.experiment_id) if e.run_id == run.id]
            if as_json:
                print_json({"run": run, "attempts": attempts, "summary": summary, "events": events})
            else:
                run_story(run, attempts, events, summary, console())
            return
        experiment = client.experiment(found.id)
        runs_of_it = list(client.all_runs(experiment_id=found.id))
        events = list(_all_events(client, found.id))
    if as_json:
        print_json({"experiment": experiment, "runs": runs_of_it, "events": events})
    else:
        experiment_story(experiment, runs_of_it, events, console(), every_event=every_event)


def _all_events(client: Client, experiment_id: int) -> Iterator[Event]:
    after = 0
    while page := client.events(experiment_id, after=after, limit=1000):
        yield from page
        after = page[-1].number


def watch(
    target: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="17 or run:42; unset = the newest experiment.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show live progress and metrics to the end; Ctrl-C leaves the experiment running."""
    from service.cli.following import exit_for, follow_experiment, follow_run

    with connected(patient=True) as client:
        if target is None:
            newest = client.experiments(page_size=1).items
            if not newest:
                raise Failure("there are no experiments yet; submit one", ExitCode.not_found)
            target = str(newest[0].id)
        found = reference(target)
        try:
            if isinstance(found, RunRef):
                exit_for(follow_run(client, found.id, as_json=as_json))
            else:
                exit_for(follow_experiment(client, found.id, as_json=as_json))
        except KeyboardInterrupt:
            note(f"{found} keeps running; to watch it again: stillhouse watch {target}")
            raise typer.Exit(ExitCode.interrupted) from None


def wait(
    target: Either,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.0, help="Give up after this many seconds.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Wait until an experiment or run has ended; the exit code says how."""
    from service.cli.following import exit_for, wait_for_experiment, wait_for_run

    found = reference(target)
    with connected(patient=True) as client:
        ended = (
            wait_for_run(client, found.id, timeout_s=timeout_s)
            if isinstance(found, RunRef)
            else wait_for_experiment(client, found.id, timeout_s=timeout_s)
        )
    if as_json:
        print_json(ended)
    else:
        say(f"{found} {ended.state}")
    exit_for(ended)


def logs(
    target: Either,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the end.")] = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Only lines of this attempt.")] = None,
    as_json: Json = False,
) -> None:
    """Print the log lines of a run, or of all runs of an experiment."""
    found = reference(target)
    with connected(patient=follow) as client:
        if isinstance(found, RunRef):
            several = False
            ids = [client.run(found.id).id]
        else:
            several = True
            ids = [run.id for run in client.all_runs(experiment_id=client.experiment(found.id).id)]
        places = dict.fromkeys(ids, 0)
        everything: list[LogLine] = []
        while True:
            # Asked before the lines are read: what was written before the end is then read too.
            ended = not follow or _has_ended(client, found.id, isinstance(found, RunRef))
            fresh = [line for id in ids for line in _new_lines(client, id, places, attempt)]
            fresh.sort(key=lambda line: line.at_s)
            if as_json and not follow:
                everything += fresh
            else:
                for line in fresh:
                    say(json_text(line) if as_json else _log_text(line, several))
            if ended:
                break
            time.sleep(_POLL_S)
    if as_json and not follow:
        print_json(everything)


def _has_ended(client: Client, id: int, is_run: bool) -> bool:
    from service.domain.states import TERMINAL_EXPERIMENT_STATES, TERMINAL_RUN_STATES

    if is_run:
        return client.run(id).state in TERMINAL_RUN_STATES
    return client.experiment(id).state in TERMINAL_EXPERIMENT_STATES


def _new_lines(client: Client, run_id: int, places: dict[int, int], attempt: int | None) -> Iterator[LogLine]:
    while True:
        lines = client.logs(run_id, after=places[run_id], limit=_PAGE_LINES, attempt=attempt)
        if lines:
            places[run_id] = lines[-1].cursor
        yield from lines
        if len(lines) < _PAGE_LINES:
            return


def _log_text(line: LogLine, several: bool) -> str:
    from service.domain.formats import clock

    about = f"run:{line.run_id} " if several else ""
    level = "" if line.level == "info" else f"{line.level}: "
    return f"{clock(line.at_s)} {about}{level}{line.message}"


def queue(limit: Limit = 20, as_json: Json = False) -> None:
    """Show what is waiting, in order, and why."""
    from service.cli.rendering import queue_table

    with connected() as client:
        answer = client.queue(limit=limit)
    if as_json:
        print_json(answer)
        return
    if answer.items or answer.at_work:
        console().print(queue_table(answer.items, answer.at_work))
        if answer.next_page_token is not None:
            note(f"{len(answer.items)} of {answer.total}; raise --limit to see more")
    else:
        say("nothing is waiting")
    if not answer.schedulers_alive:
        note("no scheduler is running, so nothing will start; run `stillhouse scheduler`")


def cluster(as_json: Json = False) -> None:
    """Show every pool: its schedulers, and the nodes of its Ray cluster."""
    from service.cli.rendering import pools_table

    with connected() as client:
        answer = client.cluster()
    if as_json:
        print_json(answer)
    else:
        console().print(pools_table(answer.pools))


def shares(as_json: Json = False) -> None:
    """Show who is entitled to which part of the devices, and who has it."""
    from service.cli.rendering import shares_table

    with connected() as client:
        answer = client.shares()
    if as_json:
        print_json(answer)
    elif answer:
        console().print(shares_table(answer))
    else:
        say("no one holds or is waiting for devices")


def hardware(
    name: Annotated[str | None, typer.Argument(help="An entry or a short name; unset = all.")] = None,
    as_json: Json = False,
) -> None:
    """Show the hardware catalogue: memory, power, peaks and price, and the source of each."""
    from service.cli.rendering import hardware_sheet, hardware_table

    with connected() as client:
        entries = client.hardware()
    if name is None:
        if as_json:
            print_json(entries)
        else:
            console().print(hardware_table(entries))
        return
    chosen = next((entry for entry in entries if name in (entry.name, *entry.aliases)), None)
    if chosen is None:
        from service.config.hardware import nearest

        known = [known for entry in entries for known in (entry.name, *entry.aliases)]
        raise Failure(f"'{name}' is not in the catalogue; {nearest(name, known)}", ExitCode.not_found)
    if as_json:
        print_json(chosen)
    else:
        console().print(hardware_sheet(chosen))


def export(
    target: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="An experiment, such as 17; unset = all runs.")
    ] = None,
    format: Annotated[TableFormat, typer.Option("--format", help="csv, jsonl or parquet.")] = TableFormat.csv,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File; unset = standard output.")
    ] = None,
    filter: Filter = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            metavar="FILE.zip",
            help="Pack one experiment with checksums: spec, runs, points, environment.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Export everything about runs as a table; --json means --format jsonl."""
    if bundle is not None:
        from service.cli.reporting import export_bundle

        if target is None or output is not None or filter is not None:
            raise Failure("--bundle takes one experiment and no other option", ExitCode.usage)
        export_bundle(target, bundle, as_json=as_json)
        return
    form = TableFormat.jsonl if as_json else format
    number = experiment_reference(target) if target is not None else None
    if output is None and form is TableFormat.parquet and sys.stdout.isatty():
        raise Failure("parquet is binary; give a file with -o, or pipe it", ExitCode.usage)
    with connected() as client:
        if output is None:
            for chunk in client.export_chunks(number, format=form.value, filter=filter):
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            return
        try:
            with output.open("wb") as file:
                for chunk in client.export_chunks(number, format=form.value, filter=filter):
                    file.write(chunk)
        except OSError as error:
            raise Failure(f"{output}: {error.strerror or error}", ExitCode.usage) from None
    note(f"{output}: {output.stat().st_size:,} bytes")
