"""Rows of a dataset, and readers of files of them: JSON lines, delimited text, Excel, Arrow, plain text.

Every reader yields `Row`s with the fields as the file has them. A row that cannot be read raises
`BadDataError` with file and line when it is used; a file that cannot be read raises it at once. Text may be
compressed with gzip.
"""

from __future__ import annotations

import codecs
import csv
import json
import math
import os
import sqlite3
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson

from trainers.data.allowance import DAMAGED, in_force, lines_of, opened, read_bytes, require
from trainers.data.sample import looks_like_a_header
from trainers.errors import BadDataError

_BUFFER_BYTES = 1 << 20
_HEADER_ROWS = 100  # Rows by which a first line is told from a header


@dataclass(frozen=True, slots=True)
class Row:
    """A row; its readers raise `BadDataError` naming place and field."""

    fields: Mapping[str, Any]  # Values by name, as the file has them
    where: str  # `file, line n` for messages
    columns: Mapping[str, str] = field(default_factory=dict)  # The file's names of renamed fields
    broken: str = ""  # Why the row could not be read

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

    def lacks(self, name: str) -> bool:
        """Whether a field is missing or blank, in a row that could be read."""
        value = self.fields.get(name)
        return not self.broken and (value is None or (isinstance(value, str) and not value.strip()))

    def require(self) -> None:
        if self.broken:
            raise BadDataError(f"{self.where}: {self.broken}")

    def refusal(self, name: str, problem: str) -> BadDataError:
        return BadDataError(f"{self.where}, field {self.columns.get(name, name)}: {problem}")

    def renamed(self, columns: Mapping[str, str]) -> Row:
        """Returns the row with fields under the task's names; `columns` has the file's name of each."""
        if self.broken:
            return self
        for name, column in columns.items():
            if column not in self.fields:
                problem = (
                    f"no column {column!r}, which task.columns.{name} names (found: "
                    f"{', '.join(map(str, self.fields)) or 'nothing'}); name one of these"
                )
                return Row(self.fields, self.where, broken=problem)
        named = {name: self.fields[column] for name, column in columns.items()}
        return Row({**self.fields, **named}, self.where, columns)

    def _present(self, name: str) -> Any:
        self.require()
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
            where, problem = f"{path}, line {number}", ""
            row: Any = None
            try:
                row = _from_json(raw)
            except UnicodeDecodeError as error:
                problem = _not_utf8(error)
            except (ValueError, RecursionError) as error:
                problem = f"not a JSON object ({error}); write one object per line"
            if not problem and not isinstance(row, dict):
                problem = (
                    f"a JSON {type(row).__name__}, not an object; write one object per line, such as "
                    '{"text": ..., "label": ...}'
                )
            yield Row({} if problem else row, where, broken=problem)


Reader = Callable[[Path], Iterator[Row]]
Line = tuple[str, list[Any], str]  # Place, cells, and why they could not be read


def _named(
    lines_of_cells: Callable[[Path], Iterator[Line]], path: Path, *, header: bool = True
) -> Iterator[Row]:
    """Yields rows with the names in the first line, or with positions `0`, `1`, ..., past a header."""
    lines = lines_of_cells(path)
    columns: list[str] = []
    if not header:
        first = list(islice(lines, _HEADER_ROWS))
        lines = chain(first[1:] if _begins_with_header(first) else first, lines)
    for where, cells, problem in lines:
        if not columns and header:
            if problem:
                raise BadDataError(f"{where}: {problem}")
            columns = ["" if cell is None else str(cell).strip() for cell in cells]
            continue
        columns = columns or [str(position) for position in range(len(cells))]
        if not problem and len(cells) != len(columns):
            problem = (
                f"{len(cells)} fields, but the {'header' if header else 'first line'} has {len(columns)}; "
                "complete the row"
            )
        yield Row({} if problem else dict(zip(columns, cells, strict=True)), where, broken=problem)


def has_header(path: Path, end: str) -> bool:
    """Whether the first line of a table in the format `end` names its columns, as the lines below it show."""
    return end not in _CELLS or _begins_with_header(list(islice(_CELLS[end](path), _HEADER_ROWS)))


def _begins_with_header(lines: Sequence[Line]) -> bool:
    cells = [["" if cell is None else cell for cell in of] for _, of, problem in lines if not problem]
    return bool(cells) and looks_like_a_header([str(cell).strip() for cell in cells[0]], cells[1:])


def _delimited(path: Path, *, tabs: bool = False) -> Iterator[Line]:
    """Yields the lines of a file with tabs, where quotes have no meaning, or with commas or semicolons."""
    undecodable: list[str] = []

    def decoded(raw_lines: Iterator[bytes]) -> Iterator[str]:
        for raw in raw_lines:
            try:
                yield raw.decode("utf-8")
            except UnicodeDecodeError as error:
                undecodable.append(_not_utf8(error))
                yield raw.decode("utf-8", "replace")

    with closing(_raw_lines(path)) as raw_lines:
        lines = decoded(raw_lines)
        first = next(lines, "")
        dialect: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
        if not tabs and "\t" not in first:
            # strict: an unclosed quote is an error instead of one row with the rest of the file.
            dialect = {"delimiter": ";" if ";" in first and "," not in first else ",", "strict": True}
        reader = csv.reader(chain([first], lines), **dialect)
        while True:
            cells: list[str] = []
            problem = ""
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                problem = f"not a row ({error})"
            if undecodable:
                problem = undecodable[0]
                undecodable.clear()
            if cells or problem:
                yield f"{path}, line {reader.line_num}", cells, problem


def _sheet(path: Path, name: str | None = None) -> Iterator[Line]:
    allowance = in_force()
    with _workbook(path) as book:
        sheet = book[name or book.sheetnames[0]]
        for number, cells in enumerate(sheet.iter_rows(values_only=True), 1):
            if allowance is not None:
                allowance.take(sum(len(str(cell)) for cell in cells))
            if any(cell is not None for cell in cells):
                yield f"{path}, sheet {sheet.title}, row {number}", list(cells), ""


@contextmanager
def _workbook(path: Path) -> Iterator[Any]:
    # Imported here: only runs on workbooks pay for the import.
    import openpyxl

    try:
        require(path)
        if (allowance := in_force()) is not None:
            with zipfile.ZipFile(path) as archive:
                allowance.take(sum(member.file_size for member in archive.infolist()))
        with closing(openpyxl.load_workbook(path, read_only=True, data_only=True)) as book:
            yield book
    except (zipfile.BadZipFile, KeyError, ValueError, SyntaxError) as error:  # the last for its XML
        raise BadDataError(f"{path}: not an Excel workbook ({error}); save it as .xlsx again") from None


def read_parquet(path: Path) -> Iterator[Row]:
    # Imported here: only runs on Parquet files pay for the import.
    import pyarrow.parquet

    allowance = in_force()

    def batches() -> Iterator[Any]:
        # Without a buffer, a column of a row group is read at once.
        with pyarrow.parquet.ParquetFile(
            path, buffer_size=0 if allowance is None else _BUFFER_BYTES
        ) as table:
            yield from table.iter_batches(
                **({} if allowance is None else {"batch_size": allowance.rows_at_once})
            )

    return _of_batches(path, batches, "a Parquet file")


def read_arrow(path: Path) -> Iterator[Row]:
    """Yields rows of a file of Arrow's IPC format, as a stream or as a file (Feather)."""
    import pyarrow.ipc

    def batches() -> Iterator[Any]:
        with path.open("rb") as stream:
            if stream.read(6) != b"ARROW1":
                stream.seek(0)
                yield from pyarrow.ipc.open_stream(stream)
                return
            file = pyarrow.ipc.open_file(stream)
            yield from map(file.get_batch, range(file.num_record_batches))

    return _of_batches(path, batches, "an Arrow file")


def _of_batches(path: Path, batches: Callable[[], Iterator[Any]], what: str) -> Iterator[Row]:
    import pyarrow

    number = 0
    allowance = in_force()
    try:
        require(path)
        for batch in batches():
            if allowance is not None:
                allowance.take(batch.nbytes)
            names = batch.schema.names
            columns = [_cells(path, name, column) for name, column in zip(names, batch.columns, strict=True)]
            for values in zip(*columns, strict=True):
                number += 1
                yield Row(dict(zip(names, values, strict=True)), f"{path}, row {number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise BadDataError(f"{path}: not {what} ({str(error).splitlines()[0]})") from None


_CELLS: Mapping[str, Callable[[Path], Iterator[Line]]] = {
    ".csv": _delimited,
    ".csv.gz": _delimited,
    ".tsv": (_tabbed := partial(_delimited, tabs=True)),
    ".tsv.gz": _tabbed,
    ".xlsx": _sheet,
}
"""Lines of tables whose first line may name the columns, by the end of the file's name."""
HEADERLESS: Mapping[str, Reader] = {
    end: partial(_named, cells, header=False) for end, cells in _CELLS.items()
}
"""Reader of a table whose columns are known by position."""
read_csv = partial(_named, _delimited)
read_tsv = partial(_named, _tabbed)

READERS: Mapping[str, Reader] = {
    ".jsonl": read_json_lines,
    ".jsonl.gz": read_json_lines,
    ".json": read_json_lines,
    ".json.gz": read_json_lines,
    ".csv": read_csv,
    ".csv.gz": read_csv,
    ".tsv": read_tsv,
    ".tsv.gz": read_tsv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
    ".xlsx": partial(_named, _sheet),
}
"""Reader of a table by the end of its file's name."""


def ending(path: Path) -> str:
    """Returns the end of a file's name that tells its format: `.csv`, `.csv.gz`; in lower case."""
    return ("".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix).lower()


def read_plain(path: Path) -> Iterator[Row]:
    """Yields rows of a plain text file, one text per line, in the field `text`; blank lines are rows too."""
    for line, number in read_lines(path):
        yield Row({"text": line}, f"{path}, line {number}")


def read_text(path: Path) -> str:
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _require_lines(path, error.object[:64])
        line = error.object[: error.start].count(b"\n") + 1
        raise BadDataError(f"{path}, line {line}: {_not_utf8(error)}") from None
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


# -- Files with several tables ---------------------------------------------------------------------


def sheets_in(path: Path, *, header: bool) -> Mapping[str, Callable[[], Iterator[Row]]]:
    with _workbook(path) as book:
        names = [name for name in book.sheetnames if next(book[name].iter_rows(values_only=True), None)]
    return {name: partial(_named, partial(_sheet, name=name), path, header=header) for name in names}


def tables_in(path: Path, *, header: bool) -> Mapping[str, Callable[[], Iterator[Row]]]:
    @contextmanager
    def opened_database() -> Iterator[sqlite3.Connection]:
        require(path)
        uri = f"file:{quote(os.fspath(path))}?mode=ro&immutable=1"
        try:
            with closing(sqlite3.connect(uri, uri=True)) as database:
                yield database
        except sqlite3.DatabaseError as error:
            raise BadDataError(f"{path}: not a SQLite database ({error}); export it again") from None

    def read(name: str) -> Iterator[Row]:
        quoted, allowance = name.replace('"', '""'), in_force()
        with opened_database() as database:
            rows = database.execute(f'SELECT * FROM "{quoted}"')
            columns = [column[0] for column in rows.description]
            for number, values in enumerate(rows, 1):
                if allowance is not None:
                    allowance.take(sum(len(str(value)) for value in values))
                yield Row(dict(zip(columns, values, strict=True)), f"{path}, table {name}, row {number}")

    with opened_database() as database:
        found = database.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")
        return {name: partial(read, name) for (name,) in found if not name.startswith("sqlite_")}


def splits_in(path: Path, *, header: bool) -> Mapping[str, Callable[[], Iterator[Row]]]:
    """Returns the splits of what `save_to_disk` of the library `datasets` wrote to a folder."""
    # Imported here: only runs on such folders pay for the import.
    import datasets

    for file in path.rglob("*"):
        if file.is_file():
            require(file)
        named = read_json(file, "JSON").get("_data_files", []) if file.name == "state.json" else []
        if any(Path(one["filename"]).name != one["filename"] for one in named):
            raise BadDataError(f"{file}: names a file of another folder; save the dataset again")
    try:
        saved = datasets.load_from_disk(os.fspath(path))
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise BadDataError(f"{path}: not a saved dataset ({error}); save it again") from None

    def read(name: str, split: Iterable[Any]) -> Iterator[Row]:
        for number, row in enumerate(split, 1):
            if (allowance := in_force()) is not None:
                allowance.take(len(str(row)))
            yield Row(row, f"{path}, split {name}, row {number}")

    splits = saved if isinstance(saved, dict) else {"train": saved}
    return {str(name): partial(read, name, split) for name, split in splits.items()}


SEVERAL = {".xlsx": sheets_in, ".sqlite": tables_in, ".sqlite3": tables_in, ".db": tables_in}
"""Tables in a file, by name."""


# -- Lines of text ---------------------------------------------------------------------------------


def _raw_lines(path: Path) -> Generator[bytes]:
    number = 0
    try:
        with opened(path) as stream:
            for number, line in enumerate(lines_of(stream), 1):
                if number == 1:
                    _require_lines(path, line)
                    line = line.removeprefix(codecs.BOM_UTF8)
                yield line
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


def _require_lines(path: Path, first: bytes) -> None:
    """Refuses text in UTF-16, and text whose lines end in a carriage return alone, by its first line."""
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in first[:64]:
        raise BadDataError(
            f"{path}, line 1: UTF-16, not UTF-8; convert it with iconv -f UTF-16 -t UTF-8 {path.name}"
        )
    before, mark, after = first.partition(b"\r")
    if mark and after.strip(b"\r\n") and before.count(b'"') % 2 == 0:
        raise BadDataError(
            f"{path}, line 1: lines end in a carriage return alone; convert them with "
            f"tr '\\r' '\\n' < {path.name}"
        )


def _decoded(lines: Iterator[bytes], path: Path) -> Iterator[str]:
    for number, raw in enumerate(lines, 1):
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadDataError(f"{path}, line {number}: {_not_utf8(error)}") from None


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} is not UTF-8; convert the file to UTF-8"
