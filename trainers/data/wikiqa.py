"""The official text files of WikiQA (Yang, Yih and Meek, 2015)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from trainers.data.formats import read_lines
from trainers.data.rows import Row
from trainers.data.sources import VALIDATION_PARTS, Part, table
from trainers.errors import BadDataError

_COLUMNS = ("question", "sentence", "label")


def official(path: Path) -> Mapping[str, Part] | None:
    """`WikiQA-train` with perhaps `WikiQA-dev` or `WikiQA-test`, all `.tsv` or all `.txt`; or one `.txt`.

    The `.tsv` files have seven columns and a header, the tokenised `.txt` files three without.
    Where both are complete the `.tsv` files are read, which hold the text as it was written.
    """
    if path.is_file():
        return {"train": _tokenised(path)} if path.suffix == ".txt" else None
    found: list[Mapping[str, Part]] = []
    for end, part in ((".tsv", table), (".txt", _tokenised)):
        files = {name: path / f"WikiQA-{name}{end}" for name in ("train", *VALIDATION_PARTS)}
        if not files["train"].is_file():
            continue
        validation = next((files[name] for name in VALIDATION_PARTS if files[name].is_file()), None)
        parts = {"train": part(files["train"])}
        if validation is not None:
            return {**parts, "validation": part(validation)}
        found.append(parts)
    return found[0] if found else None


def read_tokenised(path: Path) -> Iterator[Row]:
    """Rows of a file with question, sentence and label between tabs, without a header.

    Raises:
        BadDataError: naming file and line.
    """
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


def _tokenised(path: Path) -> Part:
    return Part([path], lambda: read_tokenised(path))
