from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainers.data.formats import READERS, ending, read_plain
from trainers.data.layouts import SourcePart, tables
from trainers.data.parts import TRAIN, named_parts

_PLAIN = (".txt", ".txt.gz")


def plain_texts(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds one file of texts, or a folder with `train.*` and perhaps `valid.*`, `validation.*`, `test.*`.

    Plain text has one text per line; of tables the field `text` is read.
    """
    if path.is_file():
        return {"train": _texts(path)} if ending(path) in _PLAIN else tables(path)
    found = named_parts(lambda name: _named(path, name))
    return {part: _texts(file) for part, file in found.items()} if TRAIN in found else None


def _named(folder: Path, name: str) -> Path | None:
    ends = (*_PLAIN, *READERS)
    return next((folder / f"{name}{end}" for end in ends if (folder / f"{name}{end}").is_file()), None)


def _texts(path: Path) -> SourcePart:
    reader = read_plain if ending(path) in _PLAIN else READERS[ending(path)]
    return SourcePart([path], lambda: reader(path))
