"""The parts of a dataset: what files may call them, how they lie on disk, how a missing one is made.

Imports no torch: the service fingerprints a dataset by the same rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain
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

_NUMBERED = r"[-_.](?P<number>\d+)(?:-of-(?P<count>\d+))?(?![a-z0-9])"
"""Behind a part's name, the number of a shard: `train-00003-of-00010.parquet`."""

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
    named: Callable[[Path, str], Sequence[Path]],
    read: Callable[[Path], Iterator[Row]],
) -> Mapping[str, SourcePart] | None:
    """Returns one acceptable file as the training part, or those that `named` finds for the parts' names."""
    if path.is_file():
        files: Mapping[str, Sequence[Path]] = {TRAIN: [path]} if accept(path) else {}
    else:
        files = named_parts(lambda name: named(path, name) or None)
    if TRAIN not in files:
        return None
    return {part: SourcePart(of, partial(_rows_of, of, read)) for part, of in files.items()}


def _rows_of(files: Sequence[Path], read: Callable[[Path], Iterator[Row]]) -> Iterator[Row]:
    return chain.from_iterable(map(read, files))


def tables(path: Path, readers: Readers = READERS) -> Mapping[str, SourcePart] | None:
    """Finds one file of rows (the training part), or a folder with `train.*` and perhaps further parts."""
    return files_in(
        path,
        lambda file: ending(file) in readers,
        partial(part_files, readers),
        lambda file: readers[ending(file)](file),
    )


def part_files(readers: Readers, folder: Path, name: str) -> Sequence[Path]:
    """Returns `train.jsonl`, or its shards such as `train-00000-of-00010.jsonl`, or the files of `train/`."""
    for end in readers:
        if (file := folder / f"{name}{end}").is_file():
            return [file]
    inside = folder / name
    files = _shards(name, _readable(folder, readers)) or (
        _readable(inside, readers) if inside.is_dir() else []
    )
    for file in files:
        if readers[ending(file)] != readers[ending(files[0])]:
            raise BadDataError(
                f"{file.parent}: {files[0].name} and {file.name} could both be of the {name} part; keep "
                "the files of one format"
            )
    return files


def _readable(folder: Path, readers: Readers) -> list[Path]:
    files = (file for file in sorted(folder.iterdir()) if file.name[0] not in "._")
    return [file for file in files if ending(file) in readers and file.is_file()]


def _shards(name: str, files: Iterable[Path], before: str = "") -> list[Path]:
    """Returns the files with a number behind the part's name, by number; `before` matches what precedes."""
    pattern, shards = re.compile(before + name + _NUMBERED), dict[int, Path]()
    counts: set[int] = set()
    for file in files:
        if (match := pattern.match(file.name.lower())) is None:
            continue
        if (other := shards.setdefault(int(match["number"]), file)) != file:
            raise BadDataError(
                f"{file.parent}: {other.name} and {file.name} are both shard {match['number']} of the {name} "
                "part; keep one of them"
            )
        counts.add(int(match["count"] or 0))
    ordered = [shards[number] for number in sorted(shards)]
    if (count := max(counts, default=0)) and (len(counts) > 1 or len(shards) != count):
        first = min(*shards, 1)
        missing = next((number for number in range(first, first + count) if number not in shards), None)
        raise BadDataError(
            f"{ordered[0].parent}: {len(shards)} shards of the {name} part, but {ordered[-1].name} is "
            f"one of {count}"
            + ("" if missing is None else f"; number {missing} is missing")
            + "; copy all shards of one series there"
        )
    return ordered


def published_tables(path: Path, readers: Readers = READERS) -> Mapping[str, SourcePart] | None:
    """Finds tables whose names contain `train`, `dev`, `test` or the like, such as `SICK_train.txt`."""
    with_text = {**readers, ".txt": readers[".tsv"]}

    def accept(file: Path) -> bool:
        return ending(file) in with_text and (file.suffix != ".txt" or has_tabs(file))

    return files_in(path, accept, partial(loosely_named, accept), lambda file: with_text[ending(file)](file))


def has_tabs(file: Path) -> bool:
    """Whether there are tabs in the first line."""
    return "\t" in next((line for line, _ in read_lines(file)), "")


def loosely_named(accept: Callable[[Path], bool], folder: Path, name: str) -> Sequence[Path]:
    """Returns the acceptable file, or shards, whose name contains one of a part's names as a word."""
    word = re.compile(rf"(?<![a-z]){name}(?![a-z])")
    matches = [path for path in sorted(folder.iterdir()) if word.search(path.name.lower())]
    matches = [path for path in matches if path.is_file() and accept(path)]
    if len(matches) > 1:
        before = word.split(matches[0].name.lower())[0]
        if len(shards := _shards(name, matches, re.escape(before))) == len(matches):
            return shards
        raise BadDataError(
            f"{folder}: {matches[0].name} and {matches[1].name} could both be the {name} part; keep one "
            "of them in the folder"
        )
    return matches
