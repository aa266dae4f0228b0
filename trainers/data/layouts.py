"""The parts of a dataset: what files may call them, how they lie on disk, how a missing one is made.

Imports no torch: the service fingerprints a dataset by the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar

from trainers.data.formats import READERS, Row, ending, read_lines
from trainers.errors import BadDataError

TRAIN, VALIDATION, TEST = "train", "validation", "test"
NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {TRAIN: ("train",), VALIDATION: ("validation", "valid", "dev", "trial"), TEST: ("test",)}
)
"""What files call each part; of several names the first that exists is read."""

RULES = 1  # Grows when a rule assigns an example to another part than before

Found = TypeVar("Found")
Readers = Mapping[str, Callable[[Path], Iterator[Row]]]  # Readers of tables by the end of the file's name


class SplitRule(StrEnum):
    """Where the test part comes from."""

    own = "own"  # The dataset has one
    half = "half of validation"  # Every second unit of the validation part, by hash
    held_out = "held out of train"  # `validation_fraction` of the training part's units, by hash
    none = "none"  # Without a test part


def named_parts(find: Callable[[str], Found | None]) -> dict[str, Found]:
    firsts = {
        part: next((one for one in map(find, names) if one is not None), None)
        for part, names in NAMES.items()
    }
    return {part: first for part, first in firsts.items() if first is not None}


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


@dataclass(frozen=True, slots=True)
class SourcePart:
    files: Sequence[Path]
    read: Callable[[], Iterator[Row]]


Layout = Callable[[Path], Mapping[str, SourcePart] | None]
"""Finds the parts of a dataset at a file or folder; None = it is not laid out this way."""


def files_in(
    path: Path,
    accept: Callable[[Path], bool],
    named: Callable[[Path, str], Path | None],
    read: Callable[[Path], Iterator[Row]],
) -> Mapping[str, SourcePart] | None:
    """Returns one acceptable file as the training part, or those that `named` finds for the parts' names."""
    if path.is_file():
        files: Mapping[str, Path] = {TRAIN: path} if accept(path) else {}
    else:
        files = named_parts(partial(named, path))
    if TRAIN not in files:
        return None
    return {part: SourcePart([file], partial(read, file)) for part, file in files.items()}


def tables(path: Path, readers: Readers = READERS) -> Mapping[str, SourcePart] | None:
    """Finds one file of rows (the training part), or a folder with `train.*` and perhaps further parts."""

    def named(folder: Path, name: str) -> Path | None:
        files = (folder / f"{name}{end}" for end in readers)
        return next((file for file in files if file.is_file()), None)

    return files_in(
        path, lambda file: ending(file) in readers, named, lambda file: readers[ending(file)](file)
    )


def published_tables(path: Path, readers: Readers = READERS) -> Mapping[str, SourcePart] | None:
    """Finds tables whose names contain `train`, `dev`, `test` or the like, such as `SICK_train.txt`."""
    with_text = {**readers, ".txt": readers[".tsv"]}

    def accept(file: Path) -> bool:
        if ending(file) not in with_text:
            return False
        return file.suffix != ".txt" or "\t" in next((line for line, _ in read_lines(file)), "")

    return files_in(path, accept, partial(loosely_named, accept), lambda file: with_text[ending(file)](file))


def loosely_named(accept: Callable[[Path], bool], folder: Path, name: str) -> Path | None:
    """Returns the acceptable file whose name contains one of a part's names as a word."""
    word = re.compile(rf"(?<![a-z]){name}(?![a-z])")
    matches = [path for path in sorted(folder.iterdir()) if word.search(path.name.lower())]
    matches = [path for path in matches if path.is_file() and accept(path)]
    if len(matches) > 1:
        raise BadDataError(
            f"{folder}: {matches[0].name} and {matches[1].name} could both be the {name} part; keep one "
            "of them in the folder"
        )
    return matches[0] if matches else None
