"""A project's limits on the command line: `cpu=2` to a field and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer
from pydantic import ValidationError

from service.cli.output import console, say
from service.cli.rendering import use_table
from service.domain.shares import ProjectUse
from service.specs.project_limits import UNITS, ProjectLimits

_NONE = "none"


def changed_limits(limits: ProjectLimits, changes: Mapping[str, Any]) -> ProjectLimits:
    """Returns limits with some fields changed.

    Args:
        limits: as they are.
        changes: by field; a list of `key=value` changes those keys, and `none` removes a limit.

    Raises:
        BadParameter: a change is not valid.
    """
    document = limits.model_dump(mode="json")
    for field, value in changes.items():
        if isinstance(value, list):
            for item in value:
                key, equals, text = item.partition("=")
                if not equals or not key or not text:
                    raise typer.BadParameter(f"{field}: {item!r} is not of the form key=value, such as cpu=2")
                document[field].pop(key, None)
                if text != _NONE:
                    document[field][key] = text
        else:
            document[field] = None if value == _NONE else value
    try:
        return ProjectLimits.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise typer.BadParameter(f"{path}: {first['msg']}, not {first['input']!r}") from None


def print_limits(limits: ProjectLimits) -> None:
    """Prints limits, one a line."""
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


def print_use(use: ProjectUse) -> None:
    """Prints what a project has used in a month."""
    console().print(use_table(use))
    for budget in use.budgets:
        unit = UNITS[budget.unit]
        say(
            f"budget: {budget.used:,.4g} of {budget.budget:,.4g} {unit}, {budget.left:,.4g} left; "
            f"{budget.forecast:,.4g} by the end of the month at this rate"
        )


def _devices(devices: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in devices.items())


def _count(most: int | None) -> str:
    return "no limit" if most is None else f"{most:,}"
