"""Commands that look after an installation: doctor, backup, restore, and the `db` group."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.exits import ExitCode, Failure
from service.cli.output import Json, console, note, print_json, say
from service.cli.references import experiment_reference, is_reference
from service.domain.formats import seconds_of

if TYPE_CHECKING:
    from service.db.backup import Contents
    from service.domain.records import DeletedExperiment

database = typer.Typer(no_args_is_help=True, help="Migrate, check and thin the database.")


def doctor(as_json: Json = False) -> None:
    """Check what this machine has and lacks, with a fix for each problem."""
    from rich.table import Table
    from rich.text import Text

    from service.cli.connection import read_settings
    from service.local.doctor import Health, examine

    styles = {Health.ok: "green", Health.note: "yellow", Health.broken: "bold red"}
    findings = []
    screen = console()
    for finding in examine(read_settings()):
        findings.append(finding)
        if as_json:
            continue
        table = Table.grid(padding=(0, 1))
        table.add_column(width=6)
        table.add_column(width=16, overflow="fold")
        table.add_column(overflow="fold")
        detail = Text(finding.detail)
        if finding.fix:
            detail.append(f"\n-> {finding.fix}", style="bold")
        table.add_row(Text(str(finding.health), style=styles[finding.health]), finding.subject, detail)
        screen.print(table)
    if as_json:
        print_json(findings)
    broken = sum(finding.health is Health.broken for finding in findings)
    if not as_json:
        say("everything required works" if not broken else f"{broken} broken; see the lines marked ->")
    if broken:
        raise typer.Exit(ExitCode.not_succeeded)


def backup(
    file: Annotated[Path, typer.Argument(help="Tar archive to write.")],
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Include checkpoints, predictions and traces.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Back up the database, on request with all checkpoints, while the service runs."""
    from service.cli.connection import read_settings
    from service.db.backup import back_up

    with _as_failure():
        made = back_up(read_settings(), file, checkpoints=checkpoints)
    if as_json:
        print_json(made)
    else:
        say(f"{file}: {_counted(made.contents)}, {made.files} files, {made.size_bytes / 2**20:.1f} MiB")


def restore(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="ID|FILE", help="A deleted experiment, such as 17, or an archive of `stillhouse backup`."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Restore a backup although the installation has experiments.")
    ] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="List the deleted experiments that can be restored.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Restore a deleted experiment; or verify a backup and replace a stopped installation with it."""
    from service.cli.connection import connected, read_settings
    from service.db import roles
    from service.db.backup import restore as restore_backup

    if listed:
        if target is not None or replace:
            raise Failure("--list takes neither an experiment nor a backup", ExitCode.usage)
        with connected() as client:
            found = client.deleted_experiments()
        if as_json:
            print_json(found)
        elif found:
            _print_deleted(found)
        else:
            note("nothing is deleted that could be restored")
        return
    if target is None:
        raise Failure(
            "restore takes an experiment or a backup; see what is deleted: stillhouse restore --list",
            ExitCode.usage,
        )
    if is_reference(target):
        number = experiment_reference(target)
        if replace:
            raise Failure(f"--replace takes a backup, but '{target}' is an experiment", ExitCode.usage)
        with connected() as client:
            experiment = client.restore(number)
        if as_json:
            print_json(experiment)
        else:
            say(f"restored experiment {number} ({experiment.name}, {experiment.state})")
        return
    settings = read_settings()
    with _as_failure():
        restored = restore_backup(settings, Path(target), replace=replace)
        roles.make_driver_role(settings)  # A backup holds no grants.
    if as_json:
        print_json(restored)
    else:
        say(f"restored {_counted(restored.contents)}; check with: stillhouse db check")


def _print_deleted(found: Sequence[DeletedExperiment]) -> None:
    from service.cli.rendering import grid_table, print_fitting
    from service.domain.formats import clock

    table = grid_table(
        "id", "name", "owner", "project", "state", "runs", "deleted", "until", right=("id", "runs")
    )
    lines = []
    for each in found:
        deleted, until = clock(each.deleted_s), clock(each.restorable_until_s)
        table.add_row(
            str(each.id), each.name, each.owner, each.project, each.state, str(each.run_count), deleted, until
        )
        lines.append(
            f"{each.id} {each.name} of {each.owner}, project {each.project}: {each.state}, "
            f"{each.run_count} runs, deleted {deleted}, can be restored until {until}"
        )
    print_fitting(console(), table, lines)


@database.command()
def upgrade(as_json: Json = False) -> None:
    """Migrate the database to this version's schema; does nothing if it is current.

    With STILLHOUSE_DRIVER_DATABASE_URL, the role of drivers is made or updated as by `db role`.
    """
    from service.cli.connection import read_settings
    from service.db import migrate, roles

    settings = read_settings()
    with _as_failure():
        migrate.upgrade(settings)
        roles.make_driver_role(settings)
    _report(settings.resolved_database_url(), as_json)


@database.command()
def role(as_json: Json = False) -> None:
    """Make or update the PostgreSQL role that STILLHOUSE_DRIVER_DATABASE_URL names, for drivers.

    It may write runs and what they report, and read no tokens, sessions, subscriptions or audit entries.
    """
    from service.cli.connection import read_settings
    from service.db import roles

    settings = read_settings()
    if settings.driver_database_url is None:
        raise Failure(
            "STILLHOUSE_DRIVER_DATABASE_URL is not set; use postgresql+psycopg://role:password@host/name",
            ExitCode.usage,
        )
    with _as_failure():
        made = roles.make_driver_role(settings)
    if made is None:
        raise Failure(
            "SQLite has no roles: drivers read the whole file; use PostgreSQL to keep tokens from them",
            ExitCode.not_succeeded,
        )
    if as_json:
        print_json({"role": made})
    else:
        say(f"role {made}: grants current")


@database.command()
def check(as_json: Json = False) -> None:
    """Check that the database is reachable, sound and current; reads all of a SQLite file."""
    from service.cli.connection import read_settings
    from service.db import migrate

    settings = read_settings()
    with _as_failure():
        problems = migrate.check(settings)
    if problems:
        raise Failure(problems, ExitCode.not_succeeded)
    _report(settings.resolved_database_url(), as_json)


def _age_s(text: str) -> float:
    """Seconds of an age such as 90d.

    Raises:
        BadParameter: it is not one.
    """
    try:
        return seconds_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@database.command()
def prune(
    older_than: Annotated[
        float,
        typer.Option(parser=_age_s, metavar="AGE", help="Time since an experiment ended: 12h, 90d, 8w."),
    ],
    keep_every: Annotated[
        int, typer.Option(min=2, help="Keep the points at every so many steps, the extremes and the ends.")
    ] = 10,
    as_json: Json = False,
) -> None:
    """Thin the points of old experiments, and remove what is left of deleted ones.

    Others may write meanwhile. Figures, logs, ledgers and checkpoints stay, and curves look as before.
    """
    from service.cli.connection import read_settings
    from service.scheduling.upkeep import Upkeep
    from service.store import Store

    settings, go_on = read_settings(), threading.Event()
    with _as_failure(), closing(Store.open(settings)) as store:
        upkeep = Upkeep(store, settings.model_copy(update={"prune_after_days": None}))
        upkeep.run_once(go_on)
        experiments, points = upkeep.prune(older_than, keep_every, go_on)
    if as_json:
        print_json({"experiments": experiments, "points_removed": points})
    else:
        say(f"removed {points} points of {experiments} experiment{'' if experiments == 1 else 's'}")


@database.command()
def recount(as_json: Json = False) -> None:
    """Add up again what experiments have used, where the running sums differ from their rows."""
    from service.cli.connection import read_settings
    from service.store import Store

    with _as_failure(), closing(Store.open(read_settings())) as store:
        wrong = [id for id in store.experiments_with_usage() if store.wrong_usage(id)]
        for id in wrong:
            store.recount(id)
    if as_json:
        print_json({"recounted": wrong})
    else:
        say(f"recounted {len(wrong)} experiment{'' if len(wrong) == 1 else 's'}")


@contextmanager
def _as_failure() -> Iterator[None]:
    """What the store refuses becomes one line; a database that cannot be used is a failed check."""
    from service.db.errors import Conflict, StoreError, StoreUnavailable

    try:
        yield
    except StoreUnavailable as error:
        raise Failure(str(error), ExitCode.unreachable) from None
    except Conflict as error:
        raise Failure(str(error), ExitCode.conflict) from None
    except StoreError as error:
        raise Failure(str(error), ExitCode.not_succeeded) from None


def _counted(contents: Contents) -> str:
    return f"{contents.experiments} experiments with {contents.runs} runs"


def _report(url: str, as_json: bool) -> None:
    from sqlalchemy.engine import make_url

    shown = make_url(url).render_as_string(hide_password=True)
    if as_json:
        print_json({"database": shown, "current": True})
    else:
        say(f"{shown}: reachable, migrations current")
