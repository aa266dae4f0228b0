"""Guarantees and limits of a project, from `projects.settings`; missing fields have defaults. Pure."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from service.config.document import Problem
from service.config.hardware import Hardware, lookup
from service.domain.access import Role
from service.domain.shares import Spending
from service.specs.fields import PRIORITIES
from trainers.config import Section

Devices = dict[str, Annotated[int, Field(ge=0, le=1_000_000)]]
Runs = Annotated[int, Field(ge=0, le=10_000_000)]

UNITS = {"usd": "USD", "kwh": "kWh", "device_hours": "device-hours"}
SET_BY_MAINTAINERS = frozenset({"priorities"})  # Administrators set all fields


class Budgets(Section):
    """What a project may use in a calendar month (UTC); null = no limit."""

    usd: Annotated[float, Field(ge=0)] | None = None
    """List price of the devices that it holds."""
    kwh: Annotated[float, Field(ge=0)] | None = None
    """Energy of the devices that it holds, at their rated power."""
    device_hours: Annotated[float, Field(ge=0)] | None = None
    """Device time, in hours."""

    def limited(self) -> dict[str, float]:
        return self.model_dump(exclude_none=True)


class ProjectLimits(Section):
    """Limits of one project."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"weight": 2.0, "guaranteed": {"cpu": 2}, "ceiling": {"cpu": 4}}}
    )

    weight: float = Field(default=1.0, gt=0, le=1_000_000)
    """Share relative to other projects."""
    guaranteed: Devices = Field(default_factory=dict)
    """Devices by hardware that it gets before others; lent out while idle."""
    ceiling: Devices = Field(default_factory=dict)
    """Most devices by hardware; hardware that is missing has no ceiling."""
    priorities: dict[Role, Literal["low", "normal", "high", "urgent"]] = Field(default_factory=dict)
    """Highest priority class that each role may use; a role that is missing may use all."""
    concurrent_runs_per_user: Runs | None = None
    """Most runs of one user at a time; null = no limit."""
    queued_runs_per_user: Runs | None = None
    """Most queued runs of one user, checked at submission; null = no limit."""
    budgets: Budgets = Budgets()
    """What it may use in a month; when it is used up, nothing more starts."""


NO_LIMITS = ProjectLimits()


def limit_problems(
    limits: ProjectLimits, catalogue: Mapping[str, Hardware], held: Mapping[str, float]
) -> Iterator[Problem]:
    """Yields limits that contradict the catalogue, each other, or the devices held now, by hardware."""
    for field in ("guaranteed", "ceiling"):
        for name in getattr(limits, field):
            path = f"{field}.{name}"
            try:
                entry = lookup(name, catalogue)
            except ValueError as error:
                yield Problem("unknown-hardware", path, str(error))
            else:
                if entry.name != name:
                    yield Problem("unknown-hardware", path, f"'{name}' is an alias; write {entry.name}")
    for name, most in limits.ceiling.items():
        guaranteed, in_use = limits.guaranteed.get(name, 0), held.get(name, 0.0)
        if most < guaranteed:
            yield Problem(
                "invalid-value",
                f"ceiling.{name}",
                f"{most} is below the {guaranteed} guaranteed; raise it, or lower guaranteed.{name}",
            )
        elif most < in_use:
            yield Problem(
                "invalid-value",
                f"ceiling.{name}",
                f"{most} is below the {in_use:g} in use; pause experiments of the project, or set {in_use:g} "
                "or more",
            )


def refused_priority(limits: ProjectLimits, project: str, role: Role | None, priority: int) -> str | None:
    """Returns why a role may not use a priority in a project, in one line; None = it may."""
    most = None if role is None else limits.priorities.get(role)
    if most is None or priority <= PRIORITIES[most]:
        return None
    may = [
        str(other)
        for other in Role
        if other is not Role.viewer and priority <= PRIORITIES[limits.priorities.get(other, "urgent")]
    ]
    who = f"{' or '.join(may)} may" if may else "only an administrator may"
    shown = next((name for name, number in PRIORITIES.items() if number == priority), priority)
    return (
        f"queue.priority: {shown} is above {most}, the highest that a {role} may use in project "
        f"{project}; {who} use it, and a maintainer can change this with: stillhouse project limits {project}"
    )


def queue_cap_problem(project: str, owner: str, waiting: int, more: int, most: int | None) -> Problem | None:
    if most is None or waiting + more <= most:
        return None
    return Problem(
        "too-many-queued",
        "project",
        f"{waiting + more} queued runs of {owner} are more than the {most} that project {project} allows a "
        f"user ({waiting} are queued, {more} would be added); wait, queue fewer, or ask an administrator to "
        "raise queued_runs_per_user",
    )


def spent_budget(limits: ProjectLimits, project: str, spent: Spending, month: str) -> str | None:
    for unit, most in limits.budgets.limited().items():
        if getattr(spent, unit) >= most:
            return (
                f"project {project} has used its budget of {most:g} {UNITS[unit]} for {month} "
                f"({getattr(spent, unit):.4g} used); an administrator can raise it"
            )
    return None
