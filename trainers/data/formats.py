"""Readers of labelled text: JSON lines, CSV, and one file per text.

Every reader yields `(text, label, line)` with the label as the file has it; an error names
file, line and field.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainers.errors import BadDataError

Row = tuple[str, str | int, int]
"""A text, its label as written, and the line (1-based) that it ends on."""


def read_json_lines(path: Path) -> Iterator[Row]:
    r"""Rows of a file with one JSON object per line.

    Lines end at `\n` only: texts may hold U+0085 and other characters that Python's
    `splitlines` takes for line ends.

    Raises:
        BadDataError: naming file, line and field.
    """
    with _open(path) as stream:
        for number, raw in enumerate(stream, 1):
            if not raw.strip():
                continue
            try:
                row = json.loads(raw.decode("utf-8"))
            except UnicodeDecodeError as error:
                raise BadDataError(_not_utf8(path, number, error)) from None
            except (ValueError, RecursionError) as error:
                raise BadDataError(f"{path}, line {number}: not a JSON object ({error})") from None
            if not isinstance(row, dict):
                raise BadDataError(
                    f"{path}, line {number}: a JSON {type(row).__name__}, not an object; "
                    'write {"text": ..., "label": ...}'
                )
            yield _fields(row, path, number)


def read_csv(path: Path) -> Iterator[Row]:
    """Rows of a CSV file whose header has the columns `text` and `label`.

    Raises:
        BadDataError: naming file, line and field.
    """
    with _open(path) as stream:
        lines = _decoded(stream, path)
        # strict: an unclosed quote is an error instead of one row with the rest of the file.
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, [])
            columns = [name.strip().removeprefix("\ufeff") for name in header]
            for wanted in ("text", "label"):
                if wanted not in columns:
                    raise BadDataError(
                        f"{path}, line 1, field {wanted}: no such column "
                        f"(found: {', '.join(columns) or 'none'})"
                    )
            for values in reader:
                if not values:
                    continue
                if len(values) != len(columns):
                    raise BadDataError(
                        f"{path}, line {reader.line_num}: {len(values)} fields, "
                        f"but the header has {len(columns)}"
                    )
                yield _fields(dict(zip(columns, values, strict=True)), path, reader.line_num)
        except csv.Error as error:
            raise BadDataError(f"{path}, line {reader.line_num}: not a CSV row ({error})") from None


def read_text(path: Path) -> str:
    """The text of a file that holds one text.

    Raises:
        BadDataError: naming the file.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise BadDataError(_not_utf8(path, line, error)) from None
    except OSError as error:
        raise BadDataError(f"{path}: cannot be read ({error.strerror})") from None
    if not text.strip():
        raise BadDataError(f"{path}, line 1, field text: empty; remove the file or fill it")
    return text


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise BadDataError(f"{path}: cannot be read ({error.strerror})") from None


def _decoded(stream: Any, path: Path) -> Iterator[str]:
    for number, raw in enumerate(stream, 1):
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadDataError(_not_utf8(path, number, error)) from None


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> str:
    return (
        f"{path}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8; convert the file to UTF-8"
    )


def _fields(row: Mapping[str, Any], path: Path, line: int) -> Row:
    for name in ("text", "label"):
        if row.get(name) is None:
            raise BadDataError(f"{path}, line {line}, field {name}: missing")
    text, label = row["text"], row["label"]
    if not isinstance(text, str):
        raise BadDataError(f"{path}, line {line}, field text: a {type(text).__name__}, not a text")
    if not text.strip():
        raise BadDataError(f"{path}, line {line}, field text: empty; remove the row or fill it")
    if not isinstance(label, str | int):
        raise BadDataError(f"{path}, line {line}, field label: {label!r} is neither a name nor a number")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadDataError(f"{path}, line {line}, field text: holds half of a surrogate pair") from None
    return text, label, line
