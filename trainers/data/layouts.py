"""The parts of a dataset: what files may call them, how they lie on disk, how a missing one is made.

Imports no torch: the service fingerprints a dataset by the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar

from trainers.data.formats import HEADERLESS, READERS, Row, ending, read_lines, read_tsv
from trainers.errors import BadDataError

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
    """Returns the parts that a run reads; an unused test part stands in for a missing validation part."""
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


@dataclass(frozen=True, slots=True)
class SourcePart:
    files: Sequence[Path]
    read: Callable[[], Iterator[Row]]


Readers = Mapping[str, Callable[[Path], Iterator[Row]]]
"""Readers of tables by the end of the file's name."""

_PUBLISHED: Readers = {**READERS, ".txt": read_tsv}
_PUBLISHED_HEADERLESS: Readers = {**HEADERLESS, ".txt": HEADERLESS[".tsv"]}

Layout = Callable[[Path], Mapping[str, SourcePart] | None]
"""Finds the parts of a dataset at a file or folder; None = it is not laid out this way."""


def tables(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds one file of rows (the training part), or a folder with `train.*` and perhaps further parts."""
    return _tables(path, READERS)


def headerless_tables(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds the same of delimited files whose first line is a row."""
    return _tables(path, HEADERLESS)


def published_tables(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds tables whose names contain `train`, `dev`, `test` or the like, such as `SICK_train.txt`."""
    return _published(path, _PUBLISHED)


def headerless_published_tables(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds the same of delimited files whose first line is a row."""
    return _published(path, _PUBLISHED_HEADERLESS)


def loosely_named(folder: Path, accept: Callable[[Path], bool]) -> Mapping[str, Path]:
    """Returns the acceptable file of each part whose name contains one of the part's names as a word."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]

    def find(name: str) -> Path | None:
        word = re.compile(rf"(?<![a-z]){name}(?![a-z])")
        found = [path for path in files if word.search(path.name.lower()) and accept(path)]
        if len(found) > 1:
            raise BadDataError(
                f"{folder}: {found[0].name} and {found[1].name} could both be the {name} part; keep one "
                "of them in the folder"
            )
        return found[0] if found else None

    return named_parts(find)


def table(path: Path) -> SourcePart:
    return _table(path, READERS)


def _published(path: Path, readers: Readers) -> Mapping[str, SourcePart] | None:
    def accept(file: Path) -> bool:
        return ending(file) in readers and (file.suffix != ".txt" or _has_tabs(file))

    if path.is_file():
        return {TRAIN: _table(path, readers)} if accept(path) else None
    found = loosely_named(path, accept)
    return {part: _table(file, readers) for part, file in found.items()} if TRAIN in found else None


def _has_tabs(file: Path) -> bool:
    return "\t" in next((line for line, _ in read_lines(file)), "")


def _tables(path: Path, readers: Readers) -> Mapping[str, SourcePart] | None:
    if path.is_file():
        return {TRAIN: _table(path, readers)} if ending(path) in readers else None
    found = named_parts(lambda name: _named(path, name, readers))
    return {part: _table(file, readers) for part, file in found.items()} if TRAIN in found else None


def _table(path: Path, readers: Readers) -> SourcePart:
    return SourcePart([path], lambda: readers[ending(path)](path))


def _named(folder: Path, name: str, readers: Readers) -> Path | None:
    files = (folder / f"{name}{end}" for end in readers)
    return next((file for file in files if file.is_file()), None)
