"""The three parts of a dataset, what its files may call them, and how a missing one is made.

Imports no torch: the service fingerprints a dataset by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, TypeVar

TRAIN, VALIDATION, TEST = "train", "validation", "test"
NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {TRAIN: ("train",), VALIDATION: ("validation", "valid", "dev", "trial"), TEST: ("test",)}
)
"""What files call each part; of several names the first that exists is read."""

_RULES = 1
"""Grows when a rule assigns an example to another part than before."""

Found = TypeVar("Found")


class SplitRule(StrEnum):
    """Where the test part comes from."""

    own = "own"
    """The dataset has one."""
    half = "half of validation"
    """Every second unit of the validation part, by hash."""
    held_out = "held out of train"
    """`validation_fraction` of the training part's units, by hash."""
    none = "none"
    """There is no test part."""


def named_parts(find: Callable[[str], Found | None]) -> dict[str, Found]:
    """Returns the parts that exist; `find` looks one up by one of its names."""
    parts: dict[str, Found] = {}
    for part, names in NAMES.items():
        found = next((one for one in map(find, names) if one is not None), None)
        if found is not None:
            parts[part] = found
    return parts


def used_parts(parts: Mapping[str, Found], test: Literal["auto", "none"]) -> Mapping[str, Found]:
    """Returns the parts that a run reads.

    Without a test part (`task.test`) the test file stands in for a missing validation file.
    """
    if test == "auto":
        return parts
    used = {TRAIN: parts[TRAIN]}
    for part in (VALIDATION, TEST):
        if part in parts:
            return {**used, VALIDATION: parts[part]}
    return used


def split_rule(parts: Mapping[str, object], test: Literal["auto", "none"]) -> SplitRule:
    if test == "none":
        return SplitRule.none
    if TEST in parts:
        return SplitRule.own
    return SplitRule.half if VALIDATION in parts else SplitRule.held_out


def rule_identity(parts: Mapping[str, object], test: Literal["auto", "none"]) -> dict[str, str | int | float]:
    return {"test.rule": f"{split_rule(parts, test)} (version {_RULES})"}
