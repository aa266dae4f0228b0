from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from trainers.data.formats import read_lines
from trainers.data.layouts import SourcePart, table
from trainers.data.parts import TRAIN, named_parts
from trainers.data.rows import Row
from trainers.errors import BadDataError

_COLUMNS = ("question", "sentence", "label")


def official(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds `WikiQA-{train,dev,test}`, the last two optional, all `.tsv` or all `.txt`; or one `.txt`.

    The `.tsv` files have seven columns and a header, the tokenised `.txt` files three without.
    Where both forms have as many parts the `.tsv` files are read, which hold the text as it was written.
    """
    if path.is_file():
        return {"train": _tokenised(path)} if path.suffix == ".txt" else None
    found: list[Mapping[str, SourcePart]] = []
    for end, part in ((".tsv", table), (".txt", _tokenised)):
        files = named_parts(lambda name, end=end: _file(path / f"WikiQA-{name}{end}"))  # type: ignore[misc]
        if TRAIN in files:
            found.append({name: part(file) for name, file in files.items()})
    return max(found, key=len) if found else None


def _file(path: Path) -> Path | None:
    return path if path.is_file() else None


def read_tokenised(path: Path) -> Iterator[Row]:
    """Yields rows of a file with question, sentence and label between tabs, without a header."""
    for line, number in read_lines(path):
        if not line.strip():
            continue
        values = line.split("\t")
        where = f"{path}, line {number}"
        if len(values) != len(_COLUMNS):
            raise BadDataError(
                f"{where}: {len(values)} fields, but a line has {len(_COLUMNS)}: "
                f"{', '.join(_COLUMNS)}, with tabs between them"
            )
        yield Row(dict(zip(_COLUMNS, values, strict=True)), where)


def _tokenised(path: Path) -> SourcePart:
    return SourcePart([path], lambda: read_tokenised(path))
