"""File layouts: how the parts of a dataset are found on disk. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainers.data.formats import READERS, ending
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


Layout = Callable[[Path], Mapping[str, SourcePart] | None]
"""Finds the parts of a dataset at a file or folder; None = it is not laid out this way."""


def tables(path: Path) -> Mapping[str, SourcePart] | None:
    """Returns one file of rows (the training part), or a folder with `train.*` and perhaps further parts."""
    if path.is_file():
        return {TRAIN: table(path)} if ending(path) in READERS else None
    found = named_parts(lambda name: _named(path, name))
    return {part: table(file) for part, file in found.items()} if TRAIN in found else None


def table(path: Path) -> SourcePart:
    """Returns a part that is one file of rows."""
    return SourcePart([path], lambda: READERS[ending(path)](path))


def _named(folder: Path, name: str) -> Path | None:
    return next((folder / f"{name}{end}" for end in READERS if (folder / f"{name}{end}").is_file()), None)
