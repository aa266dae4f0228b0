"""Which tests `make quick` runs: those that start and draw nothing, as their code shows, in one case each.

A test is left out by its marks, where Hypothesis generates its input, and where it, its fixtures or what they use
in `tests` name one of `STARTS`. Of a test's cases the first runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import pytest

NO_ROOM = ("benchmarks", "browser", "extending", "faults", "gpu")
MARKS = ("slow", "ray", "smoke", "postgresql")
STARTS = {
    "subprocess",
    "multiprocessing",
    "runpy",
    "uvicorn",
    "sync_playwright",
    "train",
    "train_in",
    "spawn",
    "default_rng",
    "Random",
}
"""Processes, servers, browsers, training, samples of many draws."""


def quick(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns the selection, in the order of `items`."""
    first = dict[str, pytest.Item]()
    for item in items:
        if _is_quick(item):
            first.setdefault(item.nodeid.partition("[")[0], item)
    return list(first.values())


def _is_quick(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function) or item.nodeid.split("/")[1] in NO_ROOM:
        return False
    if any(item.get_closest_marker(mark) for mark in MARKS) or hasattr(item.obj, "hypothesis"):
        return False
    fixtures = [found[-1].func for found in item._fixtureinfo.name2fixturedefs.values()]
    return not any(_starts(function) for function in (item.obj, *fixtures))


def _starts(function: Any) -> bool:
    function = inspect.unwrap(getattr(function, "__func__", function))
    return isinstance(function, FunctionType) and _reaches(function)


@cache
def _reaches(function: FunctionType) -> bool:
    """Whether a function of ours names one of `STARTS`, or uses one that does."""
    seen, open_ = set[FunctionType](), [function]
    while open_:
        current = open_.pop()
        if current in seen:
            continue
        seen.add(current)
        names = set(_names(current.__code__))
        if names & STARTS:
            return True
        for name in names:
            open_ += _ours(current.__globals__.get(name))
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _ours(value: Any) -> list[FunctionType]:
    """Functions of ours behind a name: itself, or those of a class."""
    if not getattr(value, "__module__", "").startswith("tests"):
        return []
    if isinstance(value, type):
        return [method for method in vars(value).values() if isinstance(method, FunctionType)]
    value = getattr(value, "__wrapped__", value)
    return [value] if isinstance(value, FunctionType) else []
