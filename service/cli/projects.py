"""The `project` group: projects, their members, limits and use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.connection import Client, CommandGroup
from service.cli.people import UserName
from service.cli.terminal import Answer, note, option, print_rows, say
from service.domain.access import Role

if TYPE_CHECKING:
    from service.domain.people import ProjectDetail
    from service.specs.project_limits import ProjectLimits

project = CommandGroup(no_args_is_help=True, help="Create and change projects, and who is in them.")
member = CommandGroup(no_args_is_help=True, help="Give users roles in a project, or take them away.")
project.add_typer(member, name="member")

ProjectName = Annotated[str, typer.Argument(metavar="PROJECT", help="Name of the project.")]
Title = Annotated[str | None, typer.Option(help="Title for people.")]
Notes = Annotated[str | None, typer.Option(help="Notes.")]


@project.command("create")
def create_project(
    client: Client,
    name: ProjectName,
    title: Title = None,
    notes: Notes = None,
    visible: bool = option(False, "Let every user see its experiments.", "--visible-to-all"),
) -> Answer:
    """Create a project."""
    created = client.create_project(name, title=title or "", visible_to_all=visible, notes=notes or "")
    return Answer(created, f"created project {name}; next: stillhouse project member add {name} USER")


@project.command("list")
def list_projects(client: Client) -> Answer:
    """List the projects that you see."""
    projects = client.projects()
    rows = []
    for each in projects:
        state = "" if each.archived_s is None else "archived"
        rows.append((each.name, each.title, "all" if each.visible_to_all else "members", state))
    return Answer({"items": projects}, lambda: print_rows(("name", "title", "visible to", "state"), rows))


@project.command("show")
def show_project(client: Client, name: ProjectName) -> Answer:
    """Show a project with its members."""
    detail = client.project(name)
    return Answer(detail, partial(_print_project, detail))


def _print_project(project: ProjectDetail) -> None:
    say(f"{project.name}: {project.title}" if project.title else project.name)
    say("visible to all users" if project.visible_to_all else "visible to its members")
    if project.archived_s is not None:
        say("archived: takes no new experiments")
    for line in project.notes.splitlines():
        say(line)
    for one in project.members:
        say(f"  {one.user}: {one.role}")
    if not project.members:
        note(f"no members yet; add one: stillhouse project member add {project.name} USER")


@project.command("set")
def set_project(
    client: Client,
    name: ProjectName,
    title: Title = None,
    notes: Notes = None,
    visible: bool | None = option(None, "Who sees its experiments.", "--visible-to-all/--visible-to-members"),
) -> Answer:
    """Change a project; what is not given stays as it is."""
    changed = client.change_project(name, title=title, visible_to_all=visible, notes=notes)
    return Answer(changed, f"changed project {name}")


@project.command("usage")
def project_usage(
    client: Client,
    name: ProjectName,
    month: str | None = option(None, "Calendar month, in UTC.", metavar="2026-11"),
) -> Answer:
    """Show what a project has used in a month, by user, next to its budgets."""
    from service.cli.tables import print_use

    use = client.project_use(name, month)
    return Answer(use, partial(print_use, use))


@project.command("limits")
def project_limits(
    client: Client,
    name: ProjectName,
    weight: float | None = option(None, "Share relative to other projects."),
    guaranteed: list[str] | None = option(None, "Devices that it gets before others.", metavar="HARDWARE=N"),
    ceiling: list[str] | None = option(None, "Most devices; none = no limit.", metavar="HARDWARE=N"),
    priority: list[str] | None = option(
        None, "Highest priority class of a role; none = no limit.", metavar="ROLE=CLASS"
    ),
    concurrent: str | None = option(
        None, "Most runs of one user at a time, or none.", "--concurrent-runs", metavar="N"
    ),
    queued: str | None = option(None, "Most queued runs of one user, or none.", "--queued-runs", metavar="N"),
    budget: list[str] | None = option(
        None, "Most use a month: usd=, kwh=, device_hours=; none = no limit.", metavar="UNIT=N"
    ),
) -> Answer:
    """Show a project's limits, or set those that are given."""
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
    limits = client.project_limits(name)
    if changes:
        limits = client.set_project_limits(name, **_changed_limits(limits, changes))
    return Answer(limits, partial(_print_limits, limits))


def _changed_limits(limits: ProjectLimits, changes: Mapping[str, Any]) -> dict[str, Any]:
    # A list of `key=value` changes those keys, and `none` removes a limit.
    from pydantic import ValidationError

    from service.specs.project_limits import ProjectLimits

    document = limits.model_dump(mode="json")
    for field, value in changes.items():
        if not isinstance(value, list):
            document[field] = None if value == "none" else value
            continue
        for item in value:
            key, _, text = item.partition("=")
            if not key or not text:
                raise typer.BadParameter(f"{field}: {item!r} is not of the form key=value, such as cpu=2")
            document[field].pop(key, None)
            if text != "none":
                document[field][key] = text
    try:
        return ProjectLimits.model_validate(document).model_dump(mode="json")
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise typer.BadParameter(f"{path}: {first['msg']}, not {first['input']!r}") from None


def _print_limits(limits: ProjectLimits) -> None:
    from service.specs.project_limits import UNITS

    def count(most: int | None) -> str:
        return "" if most is None else f"{most:,}"

    def devices(most: Mapping[str, int]) -> str:
        return ", ".join(f"{count} {name}" for name, count in most.items())

    budgets = limits.budgets.limited()
    for title, text in (
        ("weight", f"{limits.weight:g}"),
        ("guaranteed", devices(limits.guaranteed) or "none"),
        ("ceiling", devices(limits.ceiling)),
        ("priorities", ", ".join(f"{role} up to {most}" for role, most in limits.priorities.items())),
        ("runs at a time per user", count(limits.concurrent_runs_per_user)),
        ("queued runs per user", count(limits.queued_runs_per_user)),
        ("budgets per month", ", ".join(f"{most:g} {UNITS[unit]}" for unit, most in budgets.items())),
    ):
        say(f"{title:<26}  {text or 'no limit'}")


@project.command("archive")
def archive_project(
    client: Client,
    name: ProjectName,
    undo: bool = option(False, "Accept new experiments again."),
) -> Answer:
    """Stop accepting new experiments in a project; existing ones stay and keep running."""
    changed = client.archive_project(name, not undo)
    return Answer(changed, f"project {name} is {'in use again' if undo else 'archived'}")


@member.command("add")
def add_member(
    client: Client,
    name: ProjectName,
    who: UserName,
    role: Role = option(Role.member, "Each includes those before it."),
) -> Answer:
    """Give a user a role in a project, or change it."""
    changed = client.set_member(name, who, role.value)
    return Answer(changed, f"{who} is {role} in project {name}")


@member.command("remove")
def remove_member(client: Client, name: ProjectName, who: UserName) -> Answer:
    """Take a user's role in a project away; what they submitted stays."""
    changed = client.remove_member(name, who)
    return Answer(changed, f"{who} is no longer in project {name}")
