"""Tasks and metrics that other packages declare as entry points, where an administrator has enabled them.

`STILLHOUSE_EXTENSIONS` lists distributions, separated by commas; the code of others is never imported. A
mistake is kept for whoever reads the settings, so that no import fails.
"""

import os
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from typing import TypeVar

from trainers.registry import Entry

VARIABLE = "STILLHOUSE_EXTENSIONS"
TASKS, METRICS = "stillhouse.tasks", "stillhouse.metrics"

E = TypeVar("E", bound=Entry)

problems: list[str] = []  # What is wrong with what is enabled, one line each


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def named(text: str) -> frozenset[str]:
    """Returns the distributions that a value of the variable lists, as packaging compares their names."""
    return frozenset(_canonical(part) for part in text.split(",") if part.strip())


ENABLED = named(os.environ.get(VARIABLE, ""))


def add(registry: dict[str, E], group: str, kind: type[E]) -> None:
    """Adds the entries of a group of entry points to a registry; each has the name that it is declared by."""
    for name in sorted(ENABLED):
        try:
            points = distribution(name).entry_points.select(group=group)
        except PackageNotFoundError:
            problems.append(f"no distribution '{name}' is installed here; install it, or leave it out")
            continue
        for point in points:
            try:
                info = point.load()
            except Exception as error:
                problems.append(f"{name}: {point.value} cannot be loaded ({type(error).__name__}: {error})")
                continue
            if not isinstance(info, kind) or info.name != point.name:
                problems.append(f"{name}: {point.value} is not a {kind.__name__} named '{point.name}'")
            elif registry.setdefault(info.name, info) is not info:
                problems.append(f"{name}: '{info.name}' exists already; give it another name")


@cache
def _declared(group: str) -> dict[str, str]:
    """Returns the distribution of each installed entry point, by the entry's name."""
    return {
        point.name: _canonical(point.dist.name)
        for point in entry_points(group=group)
        if point.dist is not None
    }


def why_unknown(group: str, name: str) -> str | None:
    """Returns where a name that is not registered is declared, and how it is enabled; None = nowhere."""
    package = _declared(group).get(name)
    if package is None or package in ENABLED:
        return None
    return (
        f"it is in package {package}, which is not enabled here; an administrator enables it by "
        f"{VARIABLE}={package}"
    )
