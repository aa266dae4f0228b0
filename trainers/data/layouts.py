"""File layouts: how the parts of a dataset are found on disk. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainers.data.formats import HEADERLESS, READERS, ending
from trainers.data.parts import TRAIN, named_parts
from trainers.data.rows import Row


@dataclass(frozen=True, slots=True)
class SourcePart:
    """One part of a dataset on disk.

    Attributes:
        files: all files that the rows come from.
        read: yields the rows.
    """

    files: Sequence[Path]
    read: Callable[[], Iterator[Row]]


Readers = Mapping[str, Callable[[Path], Iterator[Row]]]
"""Readers of tables by the end of the file's name."""

Layout = Callable[[Path], Mapping[str, SourcePart] | None]
"""Finds the parts of a dataset at a file or folder; None = it is not laid out this way."""


def tables(path: Path) -> Mapping[str, SourcePart] | None:
    """Returns one file of rows (the training part), or a folder with `train.*` and perhaps further parts."""
    return _tables(path, READERS)


def headerless_tables(path: Path) -> Mapping[str, SourcePart] | None:
    """Returns the same of delimited files whose first line is a row."""
    return _tables(path, HEADERLESS)


def table(path: Path) -> SourcePart:
    """Returns a part that is one file of rows."""
    return _table(path, READERS)


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
