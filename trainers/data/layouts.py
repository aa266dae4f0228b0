"""The parts of a dataset: what files may call them, how they lie on disk, how a missing one is made.

Imports no torch: the service fingerprints a dataset by the same rules.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, TypeVar

from trainers.data.formats import READERS, SEVERAL, Reader, Row, ending, read_lines, splits_in
from trainers.errors import BadDataError

TRAIN, VALIDATION, TEST = "train", "validation", "test"
_EVALUATION = ("eval", "evaluation")
NAMES: Mapping[str, tuple[str, ...]] = {
    TRAIN: ("train", "training"),
    VALIDATION: ("validation", "valid", "val", "dev", "devel", "development", "testa", "trial", *_EVALUATION),
    TEST: ("test", "testing", "testb", *_EVALUATION),
}
"""Names of files by part; the first one that exists, and is not an earlier part's, is read."""

RULES = 1  # Grows when a rule assigns an example to another part than before

_NUMBERED = r"[-_.](?P<number>\d+)(?:-of-(?P<count>\d+))?(?![a-z0-9])"
"""Behind a part's name, the number of a shard: `train-00003-of-00010.parquet`."""

Found = TypeVar("Found")
Readers = Mapping[str, Reader]  # By the end of the file's name


class AmbiguousPartError(BadDataError):
    """Several files could be the same part."""


class SplitRule(StrEnum):
    """Where the test part comes from."""

    own = "own"  # The dataset has one
    half = "half of validation"  # Every second unit of the validation part, by hash
    held_out = "held out of train"  # `validation_fraction` of the training part's units, by hash
    none = "none"  # Without a test part


def named_parts(find: Callable[[str], Found | None]) -> dict[str, Found]:
    parts: dict[str, Found] = {}
    for part, names in NAMES.items():
        for name in names:
            if (found := find(name)) is not None and found not in parts.values():
                parts[part] = found
                break
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
    """Finds one file of rows (the training part), or a folder with files for `train` and perhaps others.

    A part's file is called `train.csv`, or its name contains `train` as a word, as in `SICK_train.txt`; a
    `.txt` file with tabs is read as `.tsv`.
    """

    def reader_of(file: Path) -> Reader | None:
        end = ending(file)
        plain = end in readers and (path.is_file() or file.stem in chain.from_iterable(NAMES.values()))
        return readers[".tsv"] if end == ".txt" and not plain and has_tabs(file) else readers.get(end)

    def read(file: Path) -> Iterator[Row]:
        reader = reader_of(file)
        assert reader is not None
        return reader(file)

    ends: set[str] = set()

    def alike(file: Path) -> bool:
        return reader_of(file) is not None and (not ends or _plain(file) in ends)

    def named(folder: Path, name: str) -> Sequence[Path]:
        files = part_files(readers, folder, name) or loosely_named(alike, folder, name)
        # The training part comes first: a file that is only like another part's has its format.
        ends.update(map(_plain, files))
        return files

    return files_in(path, lambda file: reader_of(file) is not None, named, read)


def several_tables(path: Path, *, header: bool, parts: Mapping[str, str]) -> Mapping[str, SourcePart] | None:
    """Finds the sheets of a workbook, the tables of a database or the splits of a saved dataset."""
    if path.is_file() and ending(path) in SEVERAL:
        found, files = SEVERAL[ending(path)](path, header=header), [path]
    elif any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        found, files = splits_in(path, header=header), [file for file in path.rglob("*") if file.is_file()]
    else:
        return None
    tables = chosen_tables(str(path), found, parts)
    return {part: SourcePart(files, read) for part, read in tables.items()}


def chosen_tables(where: str, found: Mapping[str, Found], chosen: Mapping[str, str]) -> dict[str, Found]:
    """Returns the table of each part: as chosen, or by their names, or the only one."""
    if lost := next((name for name in chosen.values() if name not in found), None):
        raise BadDataError(
            f"{where} has no {lost!r}, which task.parts names (found: {', '.join(found)}); name one of these"
        )
    parts = {part: found[name] for part, name in chosen.items()} or named_parts(found.get)
    if not parts and len(found) == 1:
        parts = {TRAIN: next(iter(found.values()))}
    if TRAIN not in parts:
        raise BadDataError(
            f"{where} has nothing called train (found: {', '.join(found) or 'nothing'}); set task.parts to "
            "the name of each part"
        )
    return parts


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


def _plain(file: Path) -> str:
    return ending(file).removesuffix(".gz")


def has_tabs(file: Path) -> bool:
    return "\t" in next((line for line, _ in read_lines(file)), "")


def has_word(file: Path, name: str) -> bool:
    """Whether a file's name contains one of a part's names as a word."""
    return re.search(_word(name), file.name.lower()) is not None


def _word(name: str) -> str:
    return rf"(?<![a-z]){name}(?![a-z])"


def matching(folder: Path, name: str) -> list[Path]:
    files = (file for file in sorted(folder.iterdir()) if file.name[0] not in "._")
    return [file for file in files if has_word(file, name) and file.is_file()]


def matching_parts(folder: Path) -> dict[str, Path]:
    return named_parts(lambda name: next(iter(matching(folder, name)), None))


def loosely_named(accept: Callable[[Path], bool], folder: Path, name: str) -> Sequence[Path]:
    """Returns the acceptable file, or shards, whose name contains one of a part's names as a word."""
    matches = [path for path in matching(folder, name) if accept(path)]
    if len(matches) > 1:
        before = re.split(_word(name), matches[0].name.lower())[0]
        if len(shards := _shards(name, matches, re.escape(before))) == len(matches):
            return shards
        raise AmbiguousPartError(
            f"{folder}: {matches[0].name} and {matches[1].name} could both be the {name} part; set "
            "task.parts to the file of each part, or keep one of them in the folder"
        )
    return matches
