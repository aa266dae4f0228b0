"""Commands that look at experiments: list, runs, show, study, watch, wait, logs, ledger, queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.connection import Client, Either, connected, reference
from service.cli.terminal import (
    Answer,
    ExitCode,
    Failure,
    Json,
    argument,
    json_text,
    note,
    option,
    print_json,
    print_rows,
    say,
)

if TYPE_CHECKING:
    from service.domain.ledger import Account, Ledger
    from service.domain.records import Event, LogLine, QueueListing

Filter = Annotated[
    str | None, typer.Option(help="Conditions, such as: precision = 'bf16' and accuracy > 0.9")
]
OrderBy = Annotated[str | None, typer.Option(help="Columns, with ASC or DESC, such as: cost_usd ASC, id")]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, help="Show at most this many.")]

_POLL_S = 0.5
_PAGE_LINES = 1000
_MOST_ATTEMPTS = 200


def list_experiments(
    client: Client,
    filter: Filter = None,
    order_by: OrderBy = None,
    limit: Limit = 20,
    archived: bool = option(False, "Include archived ones, as a filter does."),
) -> Answer:
    """List experiments, newest first, without archived ones unless a filter is given."""
    from service.cli.tables import print_experiments

    if filter is None and not archived:
        filter = "archived_s IS NULL"
    found = client.all_experiments(filter=filter, order_by=order_by)
    none = "no experiments; submit one: stillhouse submit examples/demo.yaml"
    return _first(found, limit, print_experiments, none)


def runs(client: Client, filter: Filter = None, order_by: OrderBy = None, limit: Limit = 20) -> Answer:
    """List runs over all experiments."""
    from service.cli.tables import print_runs

    found = client.all_runs(filter=filter, order_by=order_by)
    none = "no runs" + (" match the filter" if filter else "")
    return _first(found, limit, partial(print_runs, with_experiment=True), none)


def _first(found: Iterator[Any], limit: int, table: Callable[[list[Any]], object], none: str) -> Answer:
    listed = list(islice(found, limit + 1))
    if not listed:
        return Answer([], partial(note, none))
    answer = Answer(listed[:limit], partial(table, listed[:limit]))
    if len(listed) > limit:
        answer.text += (partial(note, f"more than {limit}; raise --limit, or narrow down with --filter"),)
    return answer


def show(
    client: Client,
    target: Either,
    every_event: bool = option(False, "Show every event, including routine ones.", "--events"),
) -> Answer:
    """Show the history of an experiment or run: state, attempts, failures, resumes, events."""
    from service.cli.answer_tables import longest_kernels, print_kernels
    from service.cli.tables import print_experiment, print_run

    if target.is_run:
        run = client.run(target.id)
        attempts, summary = client.attempts(target.id), client.summary(target.id)
        events = [event for event in _all_events(client, run.experiment_id) if event.run_id == run.id]
        profiled = summary.get("kernel_launches_per_step") is not None
        kernels = longest_kernels(run, client.measurements(run.id)) if profiled else []
        return Answer(
            {"run": run, "attempts": attempts, "summary": summary, "kernels": kernels, "events": events},
            partial(print_run, run, attempts, events, summary),
            partial(print_kernels, kernels),
        )
    experiment = client.experiment(target.id)
    runs = list(client.all_runs(experiment_id=target.id))
    events = list(_all_events(client, target.id))
    return Answer(
        {"experiment": experiment, "runs": runs, "events": events},
        partial(print_experiment, experiment, runs, events, every_event=every_event),
    )


def _all_events(client: Client, experiment_id: int) -> Iterator[Event]:
    after = 0
    while page := client.events(experiment_id, after=after, limit=1000):
        yield from page
        after = page[-1].number


def study(
    number: int | None = argument(
        None, "A study, such as 2; unset = list the newest.", metavar="[ID]", min=1
    ),
    watch: bool = option(False, "Show changes until all parts have ended.", "--watch"),
    as_json: Json = False,
) -> None:
    """Show the parts of a study, their experiments, and what was chosen from them."""
    from service.cli.progress import answer_of, follow_study, print_studies

    with connected(patient=watch) as client:
        if number is None:
            found = client.studies(limit=20)
            Answer(found, partial(print_studies, found)).print(as_json=as_json)
            return
        one = client.study(number)
        if watch:
            one = follow_study(client, one, as_json=as_json)
    answer_of(one, ended=watch).print(as_json=as_json)


def watch(
    target: str | None = argument(None, "17 or run:42; unset = the newest experiment.", metavar="[ID]"),
    as_json: Json = False,
) -> None:
    """Show live progress and metrics to the end; Ctrl-C leaves the experiment running."""
    from service.cli.progress import exit_code, follow_experiment, follow_run

    with connected(patient=True) as client:
        if target is None:
            newest = client.experiments(page_size=1).items
            if not newest:
                raise Failure("there are no experiments yet; submit one", ExitCode.not_found)
            target = str(newest[0].id)
        ref = reference(target)
        follow = follow_run if ref.is_run else follow_experiment
        try:
            raise typer.Exit(exit_code(follow(client, ref.id, as_json=as_json)))
        except KeyboardInterrupt:
            note(f"{ref} keeps running; to watch it again: stillhouse watch {target}")
            raise typer.Exit(ExitCode.interrupted) from None


def wait(
    target: Either,
    timeout_s: float | None = option(None, "Give up after this many seconds.", "--timeout", min=0.0),
) -> Answer:
    """Wait until an experiment or run has ended; the exit code says how."""
    from service.cli.progress import exit_code, wait_for

    with connected(patient=True) as client:
        ended = wait_for(client, target, timeout_s=timeout_s)
    return Answer(ended, f"{target} {ended.state}", code=exit_code(ended))


def logs(
    target: Either,
    follow: bool = option(False, "Follow until the end.", "--follow", "-f"),
    attempt: int | None = option(None, "Only lines of this attempt.", min=1),
    as_json: Json = False,
) -> None:
    """Print the log lines of a run, or of all runs of an experiment."""
    from service.cli.progress import look

    with connected(patient=follow) as client:
        if target.is_run:
            ids = [client.run(target.id).id]
        else:
            ids = [run.id for run in client.all_runs(experiment_id=client.experiment(target.id).id)]
        cursors = dict.fromkeys(ids, 0)
        everything: list[LogLine] = []
        while True:
            # The state is read before the lines: what was written before the end is then read too.
            ended = not follow or look(client, target)[1]
            fresh = [line for id in ids for line in _new_lines(client, id, cursors, attempt)]
            fresh.sort(key=lambda line: line.at_s)
            if as_json and not follow:
                everything += fresh
            else:
                for line in fresh:
                    say(json_text(line) if as_json else _log_text(line, several=not target.is_run))
            if ended:
                break
            time.sleep(_POLL_S)
    if as_json and not follow:
        print_json(everything)


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


def ledger(client: Client, target: Either) -> Answer:
    """Show what every attempt took in time, money and energy, and how much was lost or overhead."""
    charged: Account | Ledger = client.account(target.id) if target.is_run else client.ledger(target.id)
    if not charged.total.attempts and not charged.total.time_s:
        return Answer(charged, f"{target}: no attempts yet, so nothing has been charged")
    return Answer(charged, partial(_print_ledger, charged))


def _print_ledger(charged: Account | Ledger) -> None:
    from service.domain.ledger import Account
    from service.output.ledger_words import FIGURES, HEADINGS, LEGEND, cells, sentences

    accounts, overhead = ([charged], ()) if isinstance(charged, Account) else (charged.runs, charged.overhead)
    rows = [
        (f"run:{account.run_id}", charge.attempt, *cells(charge))
        for account in accounts
        for charge in account.charges
    ]
    print_rows(("run", "try", *HEADINGS), rows[:_MOST_ATTEMPTS], right=FIGURES)
    if len(rows) > _MOST_ATTEMPTS:
        note(f"{len(rows) - _MOST_ATTEMPTS:,} more attempts: --json has all")
    for sentence in sentences(charged.total, overhead):
        say(sentence)
    note(LEGEND)


def queue(client: Client, limit: Limit = 20) -> Answer:
    """Show what is waiting, in order, and why."""
    listing = client.queue(limit=limit)
    return Answer(listing, partial(_print_queue, listing))


def _print_queue(listing: QueueListing) -> None:
    from service.cli.tables import print_queue

    if listing.items or listing.at_work:
        print_queue(listing)
        if listing.next_page_token is not None:
            note(f"{len(listing.items)} of {listing.total}; raise --limit to see more")
    else:
        say("nothing is waiting")
    if not listing.schedulers_alive:
        note("no scheduler is running, so nothing will start; run `stillhouse scheduler`")
