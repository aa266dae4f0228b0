"""Rows of a dataset, and readers of files of them: JSON lines, delimited text, Parquet, plain text.

Every reader yields `Row`s with the fields as the file has them and raises `BadDataError` with file, line and
field. All but Parquet may be compressed with gzip.
"""

from __future__ import annotations

import codecs
import csv
import json
import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from trainers.data.allowance import DAMAGED, in_force, lines_of, opened, read_bytes, require
from trainers.errors import BadDataError

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """A row; its readers raise `BadDataError` naming place and field."""

    fields: Mapping[str, Any]  # Values by name, as the file has them
    where: str  # `file, line n` for messages
    columns: Mapping[str, str] = field(default_factory=dict)  # The file's names of renamed fields

    def text(self, name: str) -> str:
        """Returns a field that must be a text that is not blank and can be encoded."""
        value = self._present(name)
        if not isinstance(value, str):
            raise self.refusal(name, f"a {type(value).__name__}, not a string")
        if not value.strip():
            raise self.refusal(name, "empty; remove the row or fill it")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise self.refusal(name, "contains half of a surrogate pair") from None
        return value

    def label(self, name: str) -> str | int:
        """Returns a field that must be a class: a name or a number."""
        value = self._present(name)
        if not isinstance(value, str | int):
            raise self.refusal(name, f"{value!r} is neither a name nor a number; write one of the two")
        return value

    def number(self, name: str) -> float:
        """Returns a field that must be a finite number, written as one or as a text."""
        value = self._present(name)
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.refusal(name, f"{str(value)[:80]!r} is not a finite number; write one such as 3.5")
        return number

    def values(self, name: str) -> list[Any]:
        """Returns a field that must be a list, written as one or as a text with JSON."""
        value = self._present(name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise self.refusal(name, f"{value[:80]!r} is not a JSON list") from None
        if not isinstance(value, list):
            raise self.refusal(name, f"a {type(value).__name__}, not a list")
        return value

    def refusal(self, name: str, problem: str) -> BadDataError:
        return BadDataError(f"{self.where}, field {self.columns.get(name, name)}: {problem}")

    def renamed(self, columns: Mapping[str, str]) -> Row:
        """Returns the row with fields under the task's names; `columns` has the file's name of each."""
        for name, column in columns.items():
            if column not in self.fields:
                raise BadDataError(
                    f"{self.where}: no column {column!r}, which task.columns.{name} names (found: "
                    f"{', '.join(map(str, self.fields)) or 'nothing'}); name one of these"
                )
        named = {name: self.fields[column] for name, column in columns.items()}
        return Row({**self.fields, **named}, self.where, columns)

    def _present(self, name: str) -> Any:
        value = self.fields.get(name)
        if value is None:
            names = ", ".join(map(str, self.fields)) or "nothing"
            advice = ""
            if name in self.fields:
                advice = "; remove the row or fill it"
            elif self.fields:
                advice = f"; set task.columns.{name} to one of these"
            raise self.refusal(name, f"missing (found: {names}){advice}")
        return value


csv.field_size_limit(1 << 26)
"""Longer than any document (Python's 131,072 are not), and what an unclosed quote may take of memory."""


def read_json_lines(path: Path) -> Iterator[Row]:
    r"""Yields rows of a file with one JSON object per line; lines end at `\n` only, not at U+0085."""
    with closing(_raw_lines(path)) as lines:
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            try:
                row = _from_json(raw)
            except UnicodeDecodeError as error:
                raise BadDataError(_not_utf8(path, number, error)) from None
            except (ValueError, RecursionError) as error:
                raise BadDataError(
                    f"{path}, line {number}: not a JSON object ({error}); write one object per line"
                ) from None
            if not isinstance(row, dict):
                raise BadDataError(
                    f"{path}, line {number}: a JSON {type(row).__name__}, not an object; "
                    'write one object per line, such as {"text": ..., "label": ...}'
                )
            yield Row(row, f"{path}, line {number}")


def read_csv(path: Path, *, header: bool = True) -> Iterator[Row]:
    """Yields rows of a comma-separated file; quoted fields may span lines. Default names are `0`, `1`, ..."""
    yield from _delimited(path, {"delimiter": ",", "strict": True}, header=header)


def read_tsv(path: Path, *, header: bool = True) -> Iterator[Row]:
    """Yields rows of a tab-separated file, as `read_csv`; quotes have no meaning."""
    yield from _delimited(path, {"delimiter": "\t", "quoting": csv.QUOTE_NONE}, header=header)


def read_parquet(path: Path) -> Iterator[Row]:
    """Yields rows of a Parquet file, in batches that keep memory bounded."""
    # Imported here: only runs on Parquet files pay for the import.
    import pyarrow
    import pyarrow.parquet

    number = 0
    allowance = in_force()
    try:
        require(path)
        # Without a buffer, a column of a row group is read at once.
        with pyarrow.parquet.ParquetFile(
            path, buffer_size=0 if allowance is None else _BUFFER_BYTES
        ) as table:
            rows = {} if allowance is None else {"batch_size": allowance.rows_at_once}
            for batch in table.iter_batches(**rows):
                if allowance is not None:
                    allowance.take(batch.nbytes)
                columns = [
                    _cells(path, name, column)
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                ]
                for values in zip(*columns, strict=True):
                    number += 1
                    yield Row(dict(zip(batch.schema.names, values, strict=True)), f"{path}, row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise BadDataError(f"{path}: not a Parquet file ({str(error).splitlines()[0]})") from None


READERS = {
    ".jsonl": read_json_lines,
    ".jsonl.gz": read_json_lines,
    ".json": read_json_lines,
    ".json.gz": read_json_lines,
    ".csv": read_csv,
    ".csv.gz": read_csv,
    ".tsv": read_tsv,
    ".tsv.gz": read_tsv,
    ".parquet": read_parquet,
}
"""Reader of a table by the end of its file's name."""

HEADERLESS = {
    end: partial(reader, header=False) for end, reader in READERS.items() if reader in (read_csv, read_tsv)
}
"""Reader of a table whose first line is a row."""


def ending(path: Path) -> str:
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix


def read_plain(path: Path) -> Iterator[Row]:
    """Yields rows of a plain text file, one text per line, in the field `text`; blank lines are rows too."""
    for line, number in read_lines(path):
        yield Row({"text": line}, f"{path}, line {number}")


def read_text(path: Path) -> str:
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise BadDataError(_not_utf8(path, line, error)) from None
    except DAMAGED as error:
        raise BadDataError(_damaged(str(path), error)) from None
    except OSError as error:
        raise BadDataError(f"{path}: cannot be read ({error.strerror})") from None
    if not text.strip():
        raise BadDataError(f"{path}, line 1, field text: empty; remove the file or fill it")
    return text


def read_json(path: Path, form: str) -> Any:
    """Returns the document in a JSON file; `form` is what it has to be, for messages."""
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise BadDataError(
            f"{path}, line {error.lineno}, column {error.colno}: not {form} ({error.msg})"
        ) from None
    except ValueError as error:  # a number with thousands of digits
        raise BadDataError(f"{path}: cannot be read ({error})") from None
    except RecursionError:
        raise BadDataError(f"{path}: nested too deeply; expected {form}") from None


def read_lines(path: Path) -> Iterator[tuple[str, int]]:
    r"""Yields lines of a text file, without their `\n`, and their numbers from 1."""
    with closing(_raw_lines(path)) as lines:
        for number, line in enumerate(_decoded(lines, path), 1):
            yield line.rstrip("\r\n"), number


def _cells(path: Path, name: str, column: Any) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except (ValueError, OverflowError, LookupError) as error:  # bytes that are not UTF-8, dates after 9999
        raise BadDataError(
            f"{path}, field {name}: cannot be read ({error}); repair the column or leave it out"
        ) from None
    return values


def _delimited(path: Path, dialect: dict[str, Any], *, header: bool) -> Iterator[Row]:
    with closing(_raw_lines(path)) as lines:
        # strict: an unclosed quote is an error instead of one row with the rest of the file.
        reader = csv.reader(_decoded(lines, path), **dialect)
        try:
            columns = [name.strip() for name in next(reader, [])] if header else []
            for values in reader:
                if not values:
                    continue
                if not columns:
                    columns = [str(position) for position in range(len(values))]
                if len(values) != len(columns):
                    raise BadDataError(
                        f"{path}, line {reader.line_num}: {len(values)} fields, "
                        f"but the {'header' if header else 'first line'} has {len(columns)}"
                    )
                yield Row(dict(zip(columns, values, strict=True)), f"{path}, line {reader.line_num}")
        except csv.Error as error:
            raise BadDataError(f"{path}, line {reader.line_num}: not a row ({error})") from None


def _raw_lines(path: Path) -> Generator[bytes]:
    """Yields lines of a file, or of what a file compressed with gzip holds, without a byte order mark."""
    number = 0
    try:
        with opened(path) as stream:
            for number, line in enumerate(lines_of(stream), 1):
                yield line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except DAMAGED as error:
        raise BadDataError(_damaged(f"{path}, line {number + 1}", error)) from None
    except OSError as error:
        raise BadDataError(f"{path}: cannot be read ({error.strerror})") from None


def _damaged(where: str, error: Exception) -> str:
    return f"{where}: the gzip file is damaged ({error}); copy or compress it again"


def _from_json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        # The slower library takes what the faster one refuses, such as NaN, and says better why not.
        return json.loads(raw.decode("utf-8"))


def _decoded(lines: Iterator[bytes], path: Path) -> Iterator[str]:
    for number, raw in enumerate(lines, 1):
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadDataError(_not_utf8(path, number, error)) from None


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> str:
    return (
        f"{path}, line {line}: byte 0x{error.object[error.start]:02x} is not UTF-8; convert the file to UTF-8"
    )
