"""Commands about people: users, tokens, projects and the audit log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.connection import connected
from service.cli.output import Json, console, note, print_json, say
from service.domain.access import Role, Scope
from service.domain.formats import seconds_of

if TYPE_CHECKING:
    from service.domain.people import AuditRow, Project, ProjectDetail, Token, User

user = typer.Typer(no_args_is_help=True, help="Add, list, disable and enable users.")
token = typer.Typer(no_args_is_help=True, help="Create, list and revoke tokens.")
project = typer.Typer(no_args_is_help=True, help="Create and change projects, and who is in them.")
member = typer.Typer(no_args_is_help=True, help="Give users roles in a project, or take them away.")
project.add_typer(member, name="member")

UserName = Annotated[str, typer.Argument(metavar="USER", help="Name of the user.")]
ProjectName = Annotated[str, typer.Argument(metavar="PROJECT", help="Name of the project.")]


def length_of_time(text: str) -> str:
    """A length of time such as 90d, unchanged.

    Raises:
        BadParameter: it is not one.
    """
    try:
        seconds_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


# -- Users -----------------------------------------------------------------------------------------


@user.command("add")
def add_user(
    name: UserName,
    email: Annotated[str | None, typer.Option(help="Where messages go.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Let them do everything.")] = False,
    service: Annotated[
        bool, typer.Option("--service", help="A service account, such as of a CI system.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Add a user, who becomes a member of the project default."""
    with connected() as client:
        added = client.add_user(
            name, kind="service" if service else "person", email=email, administrator=admin
        )
    if as_json:
        print_json(added)
    else:
        say(f"added {name}; next: stillhouse token create --user {name} --name NAME --scope submit")


@user.command("list")
def list_users(as_json: Json = False) -> None:
    """List all users."""
    with connected() as client:
        users = client.users()
    if as_json:
        print_json({"items": users})
    else:
        _print_users(users)


@user.command("disable")
def disable_user(name: UserName, as_json: Json = False) -> None:
    """Refuse a user's tokens and sessions; what they submitted stays and runs."""
    _set_disabled(name, True, as_json)


@user.command("enable")
def enable_user(name: UserName, as_json: Json = False) -> None:
    """Accept a disabled user's tokens again."""
    _set_disabled(name, False, as_json)


def _set_disabled(name: str, disabled: bool, as_json: bool) -> None:
    with connected() as client:
        changed = client.change_user(name, disabled=disabled)
    if as_json:
        print_json(changed)
    else:
        say(f"user {name} is {'disabled' if disabled else 'enabled'}")


def _print_users(users: Sequence[User]) -> None:
    from service.cli.rendering import grid_table, print_fitting
    from service.domain.formats import clock

    table = grid_table("name", "kind", "role", "e-mail", "added", "state")
    lines = []
    for found in users:
        cells = (
            found.name,
            str(found.kind),
            "administrator" if found.administrator else "",
            found.email or "",
            clock(found.created_s),
            "" if found.disabled_s is None else "disabled",
        )
        table.add_row(*cells)
        lines.append(", ".join(filter(None, cells)))
    print_fitting(console(), table, lines)


# -- Tokens ----------------------------------------------------------------------------------------


@token.command("create")
def create_token(
    name: Annotated[str, typer.Option(help="Name for people, such as the machine that it is on.")],
    scope: Annotated[
        Scope, typer.Option(help="What it may be used for; each includes those before it.")
    ] = Scope.submit,
    of: Annotated[
        str | None, typer.Option("--user", metavar="USER", help="Whom it stands for; default: you.")
    ] = None,
    only: Annotated[
        str | None, typer.Option("--project", metavar="PROJECT", help="Only project that it is for.")
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(
            parser=length_of_time, metavar="AGE", help="When it ends: 12h, 90d, 8w; default: never."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a token; it is shown only once."""
    with connected() as client:
        made = client.create_token(name, scope=scope.value, user=of, project=only, expires=expires)
    if as_json:
        print_json(made)
        return
    say(made.secret)
    note(f"token {made.id} of {made.user}, scope {made.scope}; it is not shown again")
    note("use it as STILLHOUSE_TOKEN, or in Authorization: Bearer")


@token.command("list")
def list_tokens(
    of: Annotated[
        str | None, typer.Option("--user", metavar="USER", help="Of this user; default: you.")
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Of all users.")] = False,
    as_json: Json = False,
) -> None:
    """List tokens, the newest first; their secrets are not stored."""
    with connected() as client:
        tokens = client.tokens(user=of, everyone=everyone)
    if as_json:
        print_json({"items": tokens})
    else:
        _print_tokens(tokens)


@token.command("revoke")
def revoke_token(
    id: Annotated[int, typer.Argument(metavar="NUMBER", min=1, help="Number of the token.")],
    as_json: Json = False,
) -> None:
    """End a token at once."""
    with connected() as client:
        revoked = client.revoke_token(id)
    if as_json:
        print_json(revoked)
    else:
        say(f"token {id} ({revoked.name} of {revoked.user}) is revoked")


def _print_tokens(tokens: Sequence[Token]) -> None:
    from service.cli.rendering import grid_table, print_fitting
    from service.domain.formats import clock

    table = grid_table(
        "id", "user", "name", "scope", "project", "begins", "state", "last used", right=("id",)
    )
    lines = []
    now = time.time()
    for found in tokens:
        if found.revoked_s is not None:
            state = "revoked"
        elif found.expires_s is None:
            state = "never expires"
        else:
            ended = found.expires_s <= now
            state = f"{'expired' if ended else 'until'} {clock(found.expires_s)}"
        used = "never" if found.last_used_s is None else clock(found.last_used_s)
        cells = (
            str(found.id), found.user, found.name, str(found.scope), found.project or "all", found.prefix,
            state, used,
        )  # fmt: skip
        table.add_row(*cells)
        lines.append(
            f"{found.id} {found.name} of {found.user}: {found.scope}, project {found.project or 'all'}, "
            f"{found.prefix}..., {state}, last used: {used}"
        )
    print_fitting(console(), table, lines)


# -- Projects --------------------------------------------------------------------------------------


Title = Annotated[str | None, typer.Option(help="Title for people.")]
Notes = Annotated[str | None, typer.Option(help="Notes.")]


@project.command("create")
def create_project(
    name: ProjectName,
    title: Title = None,
    notes: Notes = None,
    visible: Annotated[
        bool, typer.Option("--visible-to-all", help="Let every user see its experiments.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Create a project."""
    with connected() as client:
        created = client.create_project(name, title=title or "", visible_to_all=visible, notes=notes or "")
    _answer(created, as_json, f"created project {name}; next: stillhouse project member add {name} USER")


@project.command("list")
def list_projects(as_json: Json = False) -> None:
    """List the projects that you see."""
    with connected() as client:
        projects = client.projects()
    if as_json:
        print_json({"items": projects})
    else:
        _print_projects(projects)


@project.command("show")
def show_project(name: ProjectName, as_json: Json = False) -> None:
    """Show a project with its members."""
    with connected() as client:
        found = client.project(name)
    if as_json:
        print_json(found)
        return
    say(f"{found.name}: {found.title}" if found.title else found.name)
    say("visible to all users" if found.visible_to_all else "visible to its members")
    if found.archived_s is not None:
        say("archived: takes no new experiments")
    for line in found.notes.splitlines():
        say(line)
    for one in found.members:
        say(f"  {one.user}: {one.role}")
    if not found.members:
        note(f"no members yet; add one: stillhouse project member add {name} USER")


@project.command("set")
def set_project(
    name: ProjectName,
    title: Title = None,
    notes: Notes = None,
    visible: Annotated[
        bool | None,
        typer.Option("--visible-to-all/--visible-to-members", help="Who sees its experiments."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Change a project; what is not given stays as it is."""
    with connected() as client:
        changed = client.change_project(name, title=title, visible_to_all=visible, notes=notes)
    _answer(changed, as_json, f"changed project {name}")


@project.command("usage")
def project_usage(
    name: ProjectName,
    month: Annotated[str | None, typer.Option(metavar="2026-11", help="Calendar month, in UTC.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a project has used in a month, by user, next to its budgets."""
    from service.cli.project_limits import print_use

    with connected() as client:
        use = client.project_use(name, month)
    if as_json:
        print_json(use)
    else:
        print_use(use)


@project.command("limits")
def project_limits(
    name: ProjectName,
    weight: Annotated[float | None, typer.Option(help="Share relative to other projects.")] = None,
    guaranteed: Annotated[
        list[str] | None, typer.Option(metavar="HARDWARE=N", help="Devices that it gets before others.")
    ] = None,
    ceiling: Annotated[
        list[str] | None, typer.Option(metavar="HARDWARE=N", help="Most devices; none = no limit.")
    ] = None,
    priority: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE=CLASS", help="Highest priority class of a role; none = no limit."),
    ] = None,
    concurrent: Annotated[
        str | None,
        typer.Option("--concurrent-runs", metavar="N", help="Most runs of one user at a time, or none."),
    ] = None,
    queued: Annotated[
        str | None,
        typer.Option("--queued-runs", metavar="N", help="Most queued runs of one user, or none."),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="UNIT=N", help="Most use a month: usd=, kwh=, device_hours=; none = no limit."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a project's limits, or set those that are given."""
    from service.cli.project_limits import changed_limits, print_limits

    options = {
        "weight": weight,
        "guaranteed": guaranteed,
        "ceiling": ceiling,
        "priorities": priority,
        "concurrent_runs_per_user": concurrent,
        "queued_runs_per_user": queued,
        "budgets": budget,
    }
    changes = {field: value for field, value in options.items() if value not in (None, [])}
    with connected() as client:
        limits = client.project_limits(name)
        if changes:
            limits = client.set_project_limits(
                name, **changed_limits(limits, changes).model_dump(mode="json")
            )
    if as_json:
        print_json(limits.model_dump(mode="json"))
    else:
        print_limits(limits)


@project.command("archive")
def archive_project(
    name: ProjectName,
    undo: Annotated[bool, typer.Option("--undo", help="Accept new experiments again.")] = False,
    as_json: Json = False,
) -> None:
    """Stop accepting new experiments in a project; existing ones stay and keep running."""
    with connected() as client:
        changed = client.archive_project(name, not undo)
    _answer(changed, as_json, f"project {name} is {'in use again' if undo else 'archived'}")


@member.command("add")
def add_member(
    name: ProjectName,
    who: UserName,
    role: Annotated[Role, typer.Option(help="Each includes those before it.")] = Role.member,
    as_json: Json = False,
) -> None:
    """Give a user a role in a project, or change it."""
    with connected() as client:
        changed = client.set_member(name, who, role.value)
    _answer(changed, as_json, f"{who} is {role} in project {name}")


@member.command("remove")
def remove_member(name: ProjectName, who: UserName, as_json: Json = False) -> None:
    """Take a user's role in a project away; what they submitted stays."""
    with connected() as client:
        changed = client.remove_member(name, who)
    _answer(changed, as_json, f"{who} is no longer in project {name}")


def _answer(changed: ProjectDetail, as_json: bool, text: str) -> None:
    if as_json:
        print_json(changed)
    else:
        say(text)


def _print_projects(projects: Sequence[Project]) -> None:
    from service.cli.rendering import grid_table, print_fitting

    table = grid_table("name", "title", "visible to", "state")
    lines = []
    for found in projects:
        cells = (
            found.name,
            found.title,
            "all" if found.visible_to_all else "members",
            "" if found.archived_s is None else "archived",
        )
        table.add_row(*cells)
        lines.append(", ".join(filter(None, cells)))
    print_fitting(console(), table, lines)


# -- Audit log -------------------------------------------------------------------------------------


class AuditFormat(StrEnum):
    """How the audit log is exported."""

    jsonl = "jsonl"
    csv = "csv"


def audit(
    since: Annotated[
        str, typer.Option(parser=length_of_time, metavar="AGE", help="How far back: 12h, 7d, 8w.")
    ] = "7d",
    actor: Annotated[str | None, typer.Option(metavar="USER", help="By this user.")] = None,
    action: Annotated[str | None, typer.Option(help="An action, or a kind: token.revoke, token.")] = None,
    object: Annotated[
        str | None, typer.Option(help="What was changed: experiment:17, project:nlp, user.")
    ] = None,
    export: Annotated[
        AuditFormat | None, typer.Option(help="Write the rows to standard output in this format.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show who changed what, with which token, from where, the oldest first."""
    chosen = {
        "since_s": time.time() - seconds_of(since), "actor": actor, "action": action, "object": object,
    }  # fmt: skip
    with connected() as client:
        if export is not None:
            import sys

            for chunk in client.export_audit(export.value, **chosen):
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            return
        rows = list(client.audit(**chosen))
    if as_json:
        print_json({"items": rows})
        return
    for row in rows:
        say(_audit_line(row))
    if not rows:
        note(f"no changes in the last {since}")


def _audit_line(row: AuditRow) -> str:
    from service.cli.output import json_text
    from service.domain.formats import clock

    source = ", ".join(
        filter(None, (f"token {row.token_id}" if row.token_id is not None else "", row.address or ""))
    )
    who = f"{row.actor} ({source})" if source else row.actor
    names = dict.fromkeys([*(row.before or {}), *(row.after or {})])
    changes = []
    for name in names:
        old, new = (json_text((side or {}).get(name)) for side in (row.before, row.after))
        if row.before is None:
            changes.append(f"{name}={new}")
        elif row.after is None:
            changes.append(f"{name}={old}")
        else:
            changes.append(f"{name} {old} -> {new}")
    return f"{clock(row.at_s)}  {who}  {row.action} {row.object_id}  {', '.join(changes)}".rstrip()
