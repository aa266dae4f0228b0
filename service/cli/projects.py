"""The `project` group: projects, their members, limits and use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.cli.connection import connected
from service.cli.people import UserName
from service.cli.terminal import Json, answer, note, print_json, print_rows, say
from service.domain.access import Role

if TYPE_CHECKING:
    from service.specs.project_limits import ProjectLimits

project = typer.Typer(no_args_is_help=True, help="Create and change projects, and who is in them.")
member = typer.Typer(no_args_is_help=True, help="Give users roles in a project, or take them away.")
project.add_typer(member, name="member")

ProjectName = Annotated[str, typer.Argument(metavar="PROJECT", help="Name of the project.")]
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
    answer(created, as_json, f"created project {name}; next: stillhouse project member add {name} USER")


@project.command("list")
def list_projects(as_json: Json = False) -> None:
    """List the projects that you see."""
    with connected() as client:
        projects = client.projects()
    if as_json:
        print_json({"items": projects})
        return
    rows = [
        (
            each.name,
            each.title,
            "all" if each.visible_to_all else "members",
            "" if each.archived_s is None else "archived",
        )
        for each in projects
    ]
    print_rows(("name", "title", "visible to", "state"), rows)


@project.command("show")
def show_project(name: ProjectName, as_json: Json = False) -> None:
    """Show a project with its members."""
    with connected() as client:
        detail = client.project(name)
    if as_json:
        print_json(detail)
        return
    say(f"{detail.name}: {detail.title}" if detail.title else detail.name)
    say("visible to all users" if detail.visible_to_all else "visible to its members")
    if detail.archived_s is not None:
        say("archived: takes no new experiments")
    for line in detail.notes.splitlines():
        say(line)
    for one in detail.members:
        say(f"  {one.user}: {one.role}")
    if not detail.members:
        note(f"no members yet; add one: stillhouse project member add {name} USER")


@project.command("set")
def set_project(
    name: ProjectName,
    title: Title = None,
    notes: Notes = None,
    visible: Annotated[
        bool | None, typer.Option("--visible-to-all/--visible-to-members", help="Who sees its experiments.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Change a project; what is not given stays as it is."""
    with connected() as client:
        changed = client.change_project(name, title=title, visible_to_all=visible, notes=notes)
    answer(changed, as_json, f"changed project {name}")


@project.command("usage")
def project_usage(
    name: ProjectName,
    month: Annotated[str | None, typer.Option(metavar="2026-11", help="Calendar month, in UTC.")] = None,
    as_json: Json = False,
) -> None:
    """Show what a project has used in a month, by user, next to its budgets."""
    from service.cli.tables import print_use

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
        str | None, typer.Option("--queued-runs", metavar="N", help="Most queued runs of one user, or none.")
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(metavar="UNIT=N", help="Most use a month: usd=, kwh=, device_hours=; none = no limit."),
    ] = None,
    as_json: Json = False,
) -> None:
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
    with connected() as client:
        limits = client.project_limits(name)
        if changes:
            limits = client.set_project_limits(name, **_changed_limits(limits, changes))
    if as_json:
        print_json(limits)
    else:
        _print_limits(limits)


def _changed_limits(limits: ProjectLimits, changes: Mapping[str, Any]) -> dict[str, Any]:
    # A list of `key=value` changes those keys, and `none` removes a limit.
    from pydantic import ValidationError

    from service.specs.project_limits import ProjectLimits

    document = limits.model_dump(mode="json")
    for field, value in changes.items():
        if isinstance(value, list):
            for item in value:
                key, equals, text = item.partition("=")
                if not equals or not key or not text:
                    raise typer.BadParameter(f"{field}: {item!r} is not of the form key=value, such as cpu=2")
                document[field].pop(key, None)
                if text != "none":
                    document[field][key] = text
        else:
            document[field] = None if value == "none" else value
    try:
        return ProjectLimits.model_validate(document).model_dump(mode="json")
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise typer.BadParameter(f"{path}: {first['msg']}, not {first['input']!r}") from None


def _print_limits(limits: ProjectLimits) -> None:
    from service.specs.project_limits import UNITS

    budgets = limits.budgets.limited()
    for title, text in (
        ("weight", f"{limits.weight:g}"),
        ("guaranteed", _devices(limits.guaranteed) or "none"),
        ("ceiling", _devices(limits.ceiling)),
        ("priorities", ", ".join(f"{role} up to {most}" for role, most in limits.priorities.items())),
        ("runs at a time per user", _count(limits.concurrent_runs_per_user)),
        ("queued runs per user", _count(limits.queued_runs_per_user)),
        ("budgets per month", ", ".join(f"{most:g} {UNITS[unit]}" for unit, most in budgets.items())),
    ):
        say(f"{title:<26}  {text or 'no limit'}")


def _devices(devices: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in devices.items())


def _count(most: int | None) -> str:
    return "no limit" if most is None else f"{most:,}"


@project.command("archive")
def archive_project(
    name: ProjectName,
    undo: Annotated[bool, typer.Option("--undo", help="Accept new experiments again.")] = False,
    as_json: Json = False,
) -> None:
    """Stop accepting new experiments in a project; existing ones stay and keep running."""
    with connected() as client:
        changed = client.archive_project(name, not undo)
    answer(changed, as_json, f"project {name} is {'in use again' if undo else 'archived'}")


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
    answer(changed, as_json, f"{who} is {role} in project {name}")


@member.command("remove")
def remove_member(name: ProjectName, who: UserName, as_json: Json = False) -> None:
    """Take a user's role in a project away; what they submitted stays."""
    with connected() as client:
        changed = client.remove_member(name, who)
    answer(changed, as_json, f"{who} is no longer in project {name}")
