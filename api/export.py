"""Runs as a table: CSV, Parquet or JSON lines, written page by page as the client reads.

One row per run: the record's columns, then one per axis (`axis.precision`) for an experiment, or
`point` as JSON for runs of several.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import orjson
from fastapi import Query
from fastapi.responses import StreamingResponse

from api.deps import BINARY, TEXT, answered, attached
from service.domain.access import EVERYTHING, Visibility
from service.domain.formats import TableFormat
from service.domain.records import Page, Run
from service.store import Store

_PAGE_SIZE = 1000
_CHUNK = 1 << 16
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # First characters that a spreadsheet takes for a formula

FormatParameter = Annotated[TableFormat, Query(description="csv, parquet or jsonl (JSON lines).")]

MEDIA_TYPES = {
    TableFormat.csv: "text/csv",
    TableFormat.parquet: "application/vnd.apache.parquet",
    TableFormat.jsonl: "application/jsonl",
}

ANSWERED = answered(
    "The table.",
    {kind: BINARY if form is TableFormat.parquet else TEXT for form, kind in MEDIA_TYPES.items()},
)

Row = dict[str, Any]

_TYPES: Mapping[str, type] = {
    name: next(kind for kind in get_args(hint) or (hint,) if kind is not NoneType)
    for name, hint in get_type_hints(Run).items()
    if name in Run.__dataclass_fields__ and name != "point"
}


def answer(
    store: Store,
    format: TableFormat,
    name: str,
    *,
    experiment_id: int | None = None,
    visible: Visibility = EVERYTHING,
    **chosen: Any,
) -> StreamingResponse:
    """Returns the export as a streamed answer; the first page is read at once, so that a bad filter is told.

    `chosen` is `filter` and `order_by` of the rows; without an experiment, all runs that the reader sees.
    """

    def read(token: str | None) -> Page[Run]:
        return store.runs.page(
            experiment_id=experiment_id, page_size=_PAGE_SIZE, page_token=token, visible=visible, **chosen
        )

    columns = [*_TYPES, "point"]
    if experiment_id is not None:
        _, canonical = store.experiments.spec(experiment_id)
        spec = json.loads(canonical)
        own = [name for name in _TYPES if name != "repeat" or spec.get("repeats", 1) > 1]
        columns = [*own, *(f"axis.{axis}" for axis in spec["search"]["axes"])]
    chunks = _WRITERS[format](_pages(read(None), read, columns), columns)
    return StreamingResponse(chunks, media_type=MEDIA_TYPES[format], headers=attached(f"{name}.{format}"))


def _pages(
    page: Page[Run], read: Callable[[str | None], Page[Run]], columns: Sequence[str]
) -> Iterator[list[Row]]:
    while True:
        yield [{column: _cell(run, column) for column in columns} for run in page.items]
        if page.next_page_token is None:
            return
        page = read(page.next_page_token)


def _cell(run: Run, column: str) -> object:
    if column == "point":
        return json.dumps(run.point, ensure_ascii=False)
    return getattr(run, column) if column in _TYPES else run.point.get(column.removeprefix("axis."))


def csv_chunks(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> Iterator[bytes]:
    """Writes rows with a header, in which no spreadsheet runs a cell: a formula begins with an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    for row in rows:
        writer.writerow([guarded(cell) for cell in row])
        if text.tell() > _CHUNK:
            yield text.getvalue().encode("utf-8", "replace")
            text.seek(0)
            text.truncate()
    yield text.getvalue().encode("utf-8", "replace")


def guarded(cell: object) -> object:
    if isinstance(cell, str) and cell.startswith(_FORMULA):
        return "'" + cell
    if isinstance(cell, float):
        return _number(cell)
    return cell


def _csv(pages: Iterator[list[Row]], columns: Sequence[str]) -> Iterator[bytes]:
    return csv_chunks(columns, (row.values() for rows in pages for row in rows))


def _jsonl(pages: Iterator[list[Row]], columns: Sequence[str]) -> Iterator[bytes]:
    for rows in pages:
        yield b"".join(
            orjson.dumps(
                {name: _number(value) if isinstance(value, float) else value for name, value in row.items()},
                option=orjson.OPT_APPEND_NEWLINE,
            )
            for row in rows
        )


def _number(value: float) -> float | str:
    """Returns a finite number as it is, any other as the string that stands for it in JSON."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _parquet(pages: Iterator[list[Row]], columns: Sequence[str]) -> Iterator[bytes]:
    # Imported when asked for: Arrow is a third of the memory of a process that never exports.
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    arrow_types: dict[type, Any] = {int: pyarrow.int64(), float: pyarrow.float64()}
    schema = pyarrow.schema(
        [(name, arrow_types.get(_TYPES.get(name, str), pyarrow.string())) for name in columns]
    )
    texts = {name for name in schema.names if schema.field(name).type == pyarrow.string()}
    # Arrow reads rows as CSV: making arrays of Python lists would import pandas, which is larger still.
    options = {
        "read_options": pyarrow.csv.ReadOptions(column_names=schema.names, use_threads=False),
        "parse_options": pyarrow.csv.ParseOptions(newlines_in_values=True),
        "convert_options": pyarrow.csv.ConvertOptions(
            column_types=schema, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
        ),
    }
    sink = _Chunks()
    with pyarrow.parquet.ParquetWriter(sink, schema, compression="zstd") as writer:
        for rows in pages:
            lines = (
                ",".join(_quoted(value, text=name in texts) for name, value in row.items()) for row in rows
            )
            if text := "\n".join(lines):
                writer.write_table(
                    pyarrow.csv.read_csv(io.BytesIO(text.encode("utf-8", "replace")), **options)
                )
            yield sink.drain()
    yield sink.drain()


def _quoted(value: object, *, text: bool) -> str:
    """Returns a value for `pyarrow.csv`: nothing is null, text is quoted; in a text column all is text."""
    if value is None:
        return ""
    if text and not isinstance(value, str):
        value = json.dumps(value)  # An axis' values may be of any type.
    return '"' + value.replace('"', '""') + '"' if isinstance(value, str) else str(value)


class _Chunks(io.RawIOBase):
    """A file that is handed on as it grows; it remembers its position, which Parquet's footer counts."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, chunk: Any) -> int:
        written = bytes(chunk)
        self._chunks.append(written)
        self._position += len(written)
        return len(written)

    def tell(self) -> int:
        return self._position

    def drain(self) -> bytes:
        chunk = b"".join(self._chunks)
        self._chunks.clear()
        return chunk


_WRITERS: dict[TableFormat, Callable[[Iterator[list[Row]], Sequence[str]], Iterator[bytes]]] = {
    TableFormat.csv: _csv,
    TableFormat.parquet: _parquet,
    TableFormat.jsonl: _jsonl,
}
