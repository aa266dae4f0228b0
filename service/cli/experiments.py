"""Commands that look at experiments: list, runs, show, watch, wait, logs, ledger, queue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.connection import Either, Target, connected, reference
from service.cli.terminal import ExitCode, Failure, Json, answer, json_text, note, print_json, print_rows, say

if TYPE_CHECKING:
    from service.client import Client
    from service.domain.ledger import Account, Ledger
    from service.domain.records import Event, LogLine

Filter = Annotated[
    str | None, typer.Option(help="Conditions, such as: precision = 'bf16' and accuracy > 0.9")
]
OrderBy = Annotated[str | None, typer.Option(help="Columns, with ASC or DESC, such as: cost_usd ASC, id")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, help="Show at most this many.")]

_POLL_S = 0.5
_PAGE_LINES = 1000
_MOST_ATTEMPTS = 200


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
        experiments = list(islice(client.all_experiments(filter=filter, order_by=order_by), limit + 1))
    if as_json:
        print_json(experiments[:limit])
        return
    if not experiments:
        note("no experiments; submit one: stillhouse submit examples/demo.yaml")
        return
    from service.cli.tables import print_experiments

    print_experiments(experiments[:limit])
    _note_more(len(experiments) > limit, limit)


def runs(filter: Filter = None, order_by: OrderBy = None, limit: Limit = 20, as_json: Json = False) -> None:
    """List runs over all experiments."""
    with connected() as client:
        listed = list(islice(client.all_runs(filter=filter, order_by=order_by), limit + 1))
    if as_json:
        print_json(listed[:limit])
        return
    if not listed:
        note("no runs" + (" match the filter" if filter else ""))
        return
    from service.cli.tables import print_runs

    print_runs(listed[:limit], with_experiment=True)
    _note_more(len(listed) > limit, limit)


def _note_more(more: bool, limit: int) -> None:
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
    from service.cli.tables import print_experiment, print_run

    ref = reference(target)
    with connected() as client:
        if ref.is_run:
            run = client.run(ref.id)
            attempts = client.attempts(ref.id)
            summary = client.summary(ref.id)
            events = [event for event in _all_events(client, run.experiment_id) if event.run_id == run.id]
            if as_json:
                print_json({"run": run, "attempts": attempts, "summary": summary, "events": events})
            else:
                print_run(run, attempts, events, summary)
            return
        experiment = client.experiment(ref.id)
        its_runs = list(client.all_runs(experiment_id=ref.id))
        events = list(_all_events(client, ref.id))
    if as_json:
        print_json({"experiment": experiment, "runs": its_runs, "events": events})
    else:
        print_experiment(experiment, its_runs, events, every_event=every_event)


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
    from service.cli.progress import exit_for, follow_experiment, follow_run

    with connected(patient=True) as client:
        if target is None:
            newest = client.experiments(page_size=1).items
            if not newest:
                raise Failure("there are no experiments yet; submit one", ExitCode.not_found)
            target = str(newest[0].id)
        ref = reference(target)
        follow = follow_run if ref.is_run else follow_experiment
        try:
            exit_for(follow(client, ref.id, as_json=as_json))
        except KeyboardInterrupt:
            note(f"{ref} keeps running; to watch it again: stillhouse watch {target}")
            raise typer.Exit(ExitCode.interrupted) from None


def wait(
    target: Either,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", min=0.0, help="Give up after this many seconds.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Wait until an experiment or run has ended; the exit code says how."""
    from service.cli.progress import exit_for, wait_for

    ref = reference(target)
    with connected(patient=True) as client:
        ended = wait_for(client, ref, timeout_s=timeout_s)
    answer(ended, as_json, f"{ref} {ended.state}")
    exit_for(ended)


def logs(
    target: Either,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the end.")] = False,
    attempt: Annotated[int | None, typer.Option(min=1, help="Only lines of this attempt.")] = None,
    as_json: Json = False,
) -> None:
    """Print the log lines of a run, or of all runs of an experiment."""
    ref = reference(target)
    with connected(patient=follow) as client:
        if ref.is_run:
            ids = [client.run(ref.id).id]
        else:
            ids = [run.id for run in client.all_runs(experiment_id=client.experiment(ref.id).id)]
        cursors = dict.fromkeys(ids, 0)
        everything: list[LogLine] = []
        while True:
            # The state is read before the lines: what was written before the end is then read too.
            ended = not follow or _has_ended(client, ref)
            fresh = [line for id in ids for line in _new_lines(client, id, cursors, attempt)]
            fresh.sort(key=lambda line: line.at_s)
            if as_json and not follow:
                everything += fresh
            else:
                for line in fresh:
                    say(json_text(line) if as_json else _log_text(line, several=not ref.is_run))
            if ended:
                break
            time.sleep(_POLL_S)
    if as_json and not follow:
        print_json(everything)


def _has_ended(client: Client, ref: Target) -> bool:
    from service.domain.states import TERMINAL_EXPERIMENT_STATES, TERMINAL_RUN_STATES

    if ref.is_run:
        return client.run(ref.id).state in TERMINAL_RUN_STATES
    return client.experiment(ref.id).state in TERMINAL_EXPERIMENT_STATES


def _new_lines(
    client: Client, run_id: int, cursors: dict[int, int], attempt: int | None
) -> Iterator[LogLine]:
    while True:
        lines = client.logs(run_id, after=cursors[run_id], limit=_PAGE_LINES, attempt=attempt)
        if lines:
            cursors[run_id] = lines[-1].cursor
        yield from lines
        if len(lines) < _PAGE_LINES:
            return


def _log_text(line: LogLine, *, several: bool) -> str:
    from service.domain.formats import clock

    about = f"run:{line.run_id} " if several else ""
    level = "" if line.level == "info" else f"{line.level}: "
    return f"{clock(line.at_s)} {about}{level}{line.message}"


def ledger(target: Either, as_json: Json = False) -> None:
    """Show what every attempt took in time, money and energy, and how much was lost or overhead."""
    ref = reference(target)
    with connected() as client:
        charged: Account | Ledger = client.account(ref.id) if ref.is_run else client.ledger(ref.id)
    if as_json:
        print_json(charged)
        return
    from service.domain.ledger import Account
    from service.output.ledger_words import FIGURES, HEADINGS, LEGEND, cells, sentences

    total, accounts = charged.total, [charged] if isinstance(charged, Account) else charged.runs
    if not total.attempts and not total.time_s:
        say(f"{ref}: no attempts yet, so nothing has been charged")
        return
    rows = [
        (f"run:{account.run_id}", str(charge.attempt), *cells(charge))
        for account in accounts
        for charge in account.charges
    ]
    print_rows(("run", "try", *HEADINGS), rows[:_MOST_ATTEMPTS], right=FIGURES)
    if len(rows) > _MOST_ATTEMPTS:
        note(f"{len(rows) - _MOST_ATTEMPTS:,} more attempts: --json has all")
    for sentence in sentences(total, () if isinstance(charged, Account) else charged.overhead):
        say(sentence)
    note(LEGEND)


def queue(limit: Limit = 20, as_json: Json = False) -> None:
    """Show what is waiting, in order, and why."""
    from service.cli.tables import print_queue

    with connected() as client:
        listing = client.queue(limit=limit)
    if as_json:
        print_json(listing)
        return
    if listing.items or listing.at_work:
        print_queue(listing)
        if listing.next_page_token is not None:
            note(f"{len(listing.items)} of {listing.total}; raise --limit to see more")
    else:
        say("nothing is waiting")
    if not listing.schedulers_alive:
        note("no scheduler is running, so nothing will start; run `stillhouse scheduler`")
