"""Runs as a table: CSV, Parquet or JSON lines, written page by page as the client reads.

One row per run: the record's columns, then one per axis (`axis.precision`) for an experiment, or
`point` as JSON for runs of several, then one per figure that any of the runs ended with.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from types import NoneType
from typing import Annotated, Any, get_args, get_type_hints

import orjson

from api.deps import BINARY, TEXT, Download, given
from api.problems import ProblemError
from service.config.suggestions import nearest
from service.domain.access import EVERYTHING, Visibility
from service.domain.formats import TableFormat
from service.domain.records import Page, Run
from service.store import Store

_PAGE_SIZE = 1000
_CHUNK = 1 << 16
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # First characters that a spreadsheet takes for a formula

FormatParameter = Annotated[TableFormat, given("csv, parquet or jsonl (JSON lines).")]

ColumnsParameter = Annotated[
    str | None, given("Columns in order, separated by commas; none = all of them.", max_length=4000)
]

MEDIA_TYPES = {
    TableFormat.csv: "text/csv",
    TableFormat.parquet: "application/vnd.apache.parquet",
    TableFormat.jsonl: "application/jsonl",
}

TABLES = {kind: BINARY if form is TableFormat.parquet else TEXT for form, kind in MEDIA_TYPES.items()}

Row = dict[str, Any]
Columns = Mapping[str, type]

_TYPES: Mapping[str, type] = {
    name: next(kind for kind in get_args(hint) or (hint,) if kind is not NoneType)
    for name, hint in get_type_hints(Run).items()
    if name in Run.__dataclass_fields__ and name != "point"
}


def answer(
    store: Store,
    format: TableFormat,
    name: str,
    only: str | None = None,
    *,
    experiment_id: int | None = None,
    visible: Visibility = EVERYTHING,
    **chosen: Any,
) -> Download:
    """Returns the export as a streamed answer; the first page is read at once, so that a bad filter is told.

    `chosen` is `filter` and `order_by` of the rows; without an experiment, all runs that the reader sees.
    `only` names the columns to write, None = all.
    """

    def read(token: str | None) -> Page[Run]:
        return store.runs.page(
            experiment_id=experiment_id, page_size=_PAGE_SIZE, page_token=token, visible=visible, **chosen
        )

    first = read(None)
    columns: dict[str, type] = {**_TYPES, "point": str}
    if experiment_id is not None:
        spec = json.loads(store.experiments.spec(experiment_id)[1])
        own = {name: kind for name, kind in _TYPES.items() if name != "repeat" or spec.get("repeats", 1) > 1}
        axes = dict.fromkeys([*spec["search"]["axes"], *(axis for run in first.items for axis in run.point)])
        columns = {**own, **{f"axis.{axis}": str for axis in axes}}
    figures = store.runs.figure_names(experiment_id, chosen.get("filter"), visible)
    columns |= dict.fromkeys(figures, float)
    if only is not None:
        columns = {**_TYPES, **columns}
        unknown = [name for name in only.split(",") if name not in columns]
        if unknown:
            near = nearest(unknown[0], columns, "the export without `columns` has them all")
            raise ProblemError("invalid-parameter", f"columns: '{unknown[0][:40]}' is not a column; {near}")
        columns = {name: columns[name] for name in only.split(",")}
    chunks = _WRITERS[format](_pages(store, first, read, columns), columns)
    return Download(chunks, MEDIA_TYPES[format], f"{name}.{format}")


def _pages(
    store: Store, page: Page[Run], read: Callable[[str | None], Page[Run]], columns: Columns
) -> Iterator[list[Row]]:
    while True:
        summaries = store.runs.summaries([run.id for run in page.items])
        yield [
            {column: _cell(run, column, summaries.get(run.id, {})) for column in columns}
            for run in page.items
        ]
        if page.next_page_token is None:
            return
        page = read(page.next_page_token)


def _cell(run: Run, column: str, figures: Mapping[str, object]) -> object:
    if column == "point":
        return json.dumps(run.point, ensure_ascii=False)
    if column in _TYPES:
        value = getattr(run, column)
        return " ".join(value) if isinstance(value, list) else value
    axis = column.removeprefix("axis.")
    return figures.get(column) if axis == column else run.point.get(axis)


def csv_chunks(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Generator[bytes]:
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


def _csv(pages: Iterator[list[Row]], columns: Columns) -> Generator[bytes]:
    return csv_chunks(columns, (row.values() for rows in pages for row in rows))


def _jsonl(pages: Iterator[list[Row]], columns: Columns) -> Generator[bytes]:
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


def _parquet(pages: Iterator[list[Row]], columns: Columns) -> Generator[bytes]:
    # Imported when asked for: Arrow is a third of the memory of a process that never exports.
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    arrow_types: dict[type, Any] = {int: pyarrow.int64(), float: pyarrow.float64()}
    schema = pyarrow.schema(
        [(name, arrow_types.get(kind, pyarrow.string())) for name, kind in columns.items()]
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
            # Arrow takes an empty last value for text where no line feed follows it.
            lines = (
                ",".join(_quoted(value, text=name in texts) for name, value in row.items()) + "\n"
                for row in rows
            )
            if text := "".join(lines):
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


_WRITERS: dict[TableFormat, Callable[[Iterator[list[Row]], Columns], Generator[bytes]]] = {
    TableFormat.csv: _csv,
    TableFormat.parquet: _parquet,
    TableFormat.jsonl: _jsonl,
}
