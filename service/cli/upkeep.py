"""Commands that look after an installation: doctor, db upgrade, db check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from service.cli.exits import ExitCode, Failure
from service.cli.output import Json, console, print_json, say

database = typer.Typer(no_args_is_help=True, help="Migrate and check the database.")


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


@database.command()
def upgrade(as_json: Json = False) -> None:
    """Migrate the database to this version's schema; does nothing if it is current."""
    from service.cli.connection import read_settings
    from service.db import migrate

    settings = read_settings()
    with _as_failure():
        migrate.upgrade(settings)
    _report(settings.resolved_database_url(), as_json)


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


@contextmanager
def _as_failure() -> Iterator[None]:
    """What the store refuses becomes one line; a database that cannot be used is a failed check."""
    from service.db.errors import StoreError, StoreUnavailable

    try:
        yield
    except StoreUnavailable as error:
        raise Failure(str(error), ExitCode.unreachable) from None
    except StoreError as error:
        raise Failure(str(error), ExitCode.not_succeeded) from None


def _report(url: str, as_json: bool) -> None:
    from sqlalchemy.engine import make_url

    shown = make_url(url).render_as_string(hide_password=True)
    if as_json:
        print_json({"database": shown, "current": True})
    else:
        say(f"{shown}: reachable, migrations current")
