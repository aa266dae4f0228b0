"""Commands about an installation: cluster, shares, hardware, doctor, backup, restore, and the `db` group."""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from service.cli.connection import (
    Client,
    CommandGroup,
    connected,
    experiment_id,
    is_reference,
    read_settings,
    shown_database,
    store_errors,
)
from service.cli.people import seconds
from service.cli.specs import text_of
from service.cli.terminal import (
    Answer,
    ExitCode,
    Failure,
    Json,
    argument,
    console,
    note,
    option,
    print_json,
    print_rows,
    say,
)

if TYPE_CHECKING:
    from service.config.settings import Settings
    from service.db.backup import Contents

database = CommandGroup(no_args_is_help=True, help="Migrate, check and thin the database.")


def cluster(client: Client) -> Answer:
    """Show every pool: its schedulers, and the nodes of its Ray cluster."""
    from service.cli.tables import print_pools

    status = client.cluster()
    return Answer(status, partial(print_pools, status.pools))


def shares(client: Client) -> Answer:
    """Show who is entitled to which part of the devices, and who has it."""
    from service.cli.tables import print_shares

    listed = client.shares()
    return Answer(
        listed, partial(print_shares, listed) if listed else "no one holds or is waiting for devices"
    )


def hardware(
    client: Client,
    name: str | None = argument(None, "An entry or a short name; unset = all."),
) -> Answer:
    """Show the hardware catalogue: memory, power, peaks and price, and the source of each."""
    from service.cli.tables import print_device, print_hardware
    from service.config.hardware import LISTED
    from service.config.suggestions import nearest

    entries = client.hardware()
    if name is None:
        return Answer(entries, partial(print_hardware, entries))
    names = {each: entry for entry in entries for each in (entry.name, *entry.aliases)}
    if name not in names:
        raise Failure(f"'{name}' is not in the catalogue; {nearest(name, names, LISTED)}", ExitCode.not_found)
    return Answer(names[name], partial(print_device, names[name]))


def doctor(as_json: Json = False) -> None:
    """Check what this machine has and lacks, with a fix for each problem."""
    from rich.table import Table
    from rich.text import Text

    from service.local.doctor import FindingHealth, examine

    styles = {FindingHealth.ok: "green", FindingHealth.note: "yellow", FindingHealth.broken: "bold red"}
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
    broken = sum(finding.health is FindingHealth.broken for finding in findings)
    if not as_json:
        say("everything required works" if not broken else f"{broken} broken; see the lines marked ->")
    if broken:
        raise typer.Exit(ExitCode.not_succeeded)


def manifests(
    values: Path = option(
        ..., "YAML file of values (examples/kubernetes has three); - = standard input.", metavar="FILE"
    ),
    kueue: bool = option(False, "Put the Ray clusters into a queue of Kueue, which then admits their nodes."),
) -> Answer:
    """Print Kubernetes manifests of an installation, as plain YAML."""
    from service.config.document import SpecError
    from service.manifests import as_yaml, documents
    from service.manifests.values import read

    text = text_of(values)
    try:
        objects = documents(read(text), kueue=kueue)
    except SpecError as error:
        raise Failure([f"{values}: {line}" for line in error.lines()]) from None
    except ValueError as error:
        raise Failure(f"{values}: {error}") from None
    return Answer({"apiVersion": "v1", "kind": "List", "items": objects}, as_yaml(objects).rstrip())


def backup(
    file: Path = argument(..., "Tar archive to write."),
    checkpoints: bool = option(False, "Include checkpoints, predictions and traces."),
) -> Answer:
    """Back up the database, on request with all checkpoints, while the service runs."""
    from service.db.backup import back_up

    with store_errors():
        made = back_up(read_settings(), file, checkpoints=checkpoints)
    size = f"{made.files} files, {made.size_bytes / 2**20:.1f} MiB"
    return Answer(made, f"{file}: {_counted(made.contents)}, {size}")


def restore(
    target: str | None = argument(
        None, "A deleted experiment, such as 17, or an archive of `stillhouse backup`.", metavar="ID|FILE"
    ),
    replace: bool = option(False, "Restore a backup although the installation has experiments."),
    listed: bool = option(False, "List the deleted experiments that can be restored.", "--list"),
) -> Answer:
    """Restore a deleted experiment; or verify a backup and replace a stopped installation with it."""
    from service.db import roles
    from service.db.backup import restore as restore_backup

    if listed:
        if target is not None or replace:
            raise Failure("--list takes neither an experiment nor a backup")
        return _restorable()
    if target is None:
        raise Failure(
            "restore takes an experiment or a backup; see what is deleted: stillhouse restore --list"
        )
    if is_reference(target):
        number = experiment_id(target)
        if replace:
            raise Failure(f"--replace takes a backup, but '{target}' is an experiment")
        with connected() as client:
            experiment = client.restore(number)
        return Answer(experiment, f"restored experiment {number} ({experiment.name}, {experiment.state})")
    settings = read_settings()
    with store_errors():
        restored = restore_backup(settings, Path(target), replace=replace)
        roles.make_driver_role(settings)  # A backup holds no grants.
    return Answer(restored, f"restored {_counted(restored.contents)}; check with: stillhouse db check")


def _restorable() -> Answer:
    from service.domain.formats import clock

    with connected() as client:
        deleted = client.deleted_experiments()
    if not deleted:
        return Answer(deleted, partial(note, "nothing is deleted that could be restored"))
    rows = []
    for each in deleted:
        times = (clock(each.deleted_s), clock(each.restorable_until_s))
        rows.append((each.id, each.name, each.owner, each.project, each.state, each.run_count, *times))
    headings = ("id", "name", "owner", "project", "state", "runs", "deleted", "until")
    return Answer(deleted, lambda: print_rows(headings, rows, right=("id", "runs")))


@database.command()
def upgrade() -> Answer:
    """Migrate the database to this version's schema; does nothing if it is current.

    With STILLHOUSE_DRIVER_DATABASE_URL, the role of drivers is made or updated as by `db role`.
    """
    from service.db import migrate, roles

    settings = read_settings()
    with store_errors():
        migrate.upgrade(settings)
        roles.make_driver_role(settings)
    return _current(settings)


@database.command()
def role() -> Answer:
    """Make or update the PostgreSQL role that STILLHOUSE_DRIVER_DATABASE_URL names, for drivers.

    It may write runs and what they report, and read no tokens, sessions, subscriptions or audit entries.
    """
    from service.db import roles

    settings = read_settings()
    if settings.driver_database_url is None:
        raise Failure(
            "STILLHOUSE_DRIVER_DATABASE_URL is not set; use postgresql+psycopg://role:password@host/name"
        )
    with store_errors():
        made = roles.make_driver_role(settings)
    if made is None:
        raise Failure(
            "SQLite has no roles: drivers read the whole file; use PostgreSQL to keep tokens from them",
            ExitCode.not_succeeded,
        )
    return Answer({"role": made}, f"role {made}: grants current")


@database.command()
def check() -> Answer:
    """Check that the database is reachable, sound and current; reads all of a SQLite file."""
    from service.db import migrate

    settings = read_settings()
    with store_errors():
        problems = migrate.check(settings)
    if problems:
        raise Failure(problems, ExitCode.not_succeeded)
    return _current(settings)


def _current(settings: Settings) -> Answer:
    shown = shown_database(settings)
    return Answer({"database": shown, "current": True}, f"{shown}: reachable, migrations current")


@database.command()
def prune(
    older_than: float = option(
        ..., "Time since an experiment ended: 12h, 90d, 8w.", parser=seconds, metavar="AGE"
    ),
    keep_every: int = option(10, "Keep the points at every so many steps, the extremes and the ends.", min=2),
) -> Answer:
    """Thin the points of old experiments, and remove what is left of deleted ones.

    Others may write meanwhile. Figures, logs, ledgers and checkpoints stay, and curves look as before.
    """
    from service.scheduling.upkeep import Upkeep
    from service.store import Store

    settings, go_on = read_settings(), threading.Event()
    with store_errors(), closing(Store.open(settings)) as store:
        upkeep = Upkeep(store, settings.model_copy(update={"prune_after_days": None}))
        upkeep.run_once(go_on)
        experiments, points = upkeep.prune(older_than, keep_every, go_on)
    return Answer(
        {"experiments": experiments, "points_removed": points},
        f"removed {points} points of {experiments} experiment{'' if experiments == 1 else 's'}",
    )


@database.command()
def recount() -> Answer:
    """Add up again what experiments have used, where the running sums differ from their rows."""
    from service.store import Store

    with store_errors(), closing(Store.open(read_settings())) as store:
        wrong = [id for id in store.accounting.experiments_with_usage() if store.accounting.wrong_usage(id)]
        for id in wrong:
            store.accounting.recount(id)
    return Answer({"recounted": wrong}, f"recounted {len(wrong)} experiment{'' if len(wrong) == 1 else 's'}")


def _counted(contents: Contents) -> str:
    return f"{contents.experiments} experiments with {contents.runs} runs"
