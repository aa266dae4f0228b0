"""An experiment's results as data frames, for notebooks; `docs/python.md` describes them."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from service.client.bundle import write_bundle
from service.client.wire import whole_file
from service.domain.formats import TableFormat
from service.domain.records import ExperimentDetail

if TYPE_CHECKING:
    from service.client import Client

Frame = Literal["pandas", "polars"]


class ExperimentResults(ExperimentDetail):
    """An experiment as it was when asked for; its methods ask the server again, and return frames."""

    _client: Client

    @classmethod
    def from_detail(cls, detail: ExperimentDetail, client: Client) -> Self:
        made = cls(**{field.name: getattr(detail, field.name) for field in fields(detail)})
        object.__setattr__(made, "_client", client)  # Not a field, so that it is neither shown nor compared.
        return made

    def runs(self, filter: str | None = None, *, frame: Frame = "pandas") -> Any:
        """Returns one row per run: its columns, `axis.<name>` for each axis, and figures it ended with."""
        return _to_frame(self._table(filter), frame)

    def compare(self, *, frame: Frame = "pandas", **question: Any) -> Any:
        """Returns one row per configuration: its point, then mean, `_sd` and `_n` of each figure over seeds.

        `question` is what `GET /experiments/{id}/compare` takes. A pandas frame has the answer's notes in
        `attrs["notes"]`; the whole answer, with claims, is `Client.compare`.
        """
        answer = self._client.compare(self.id, **question)
        rows = []
        for row in answer.rows:
            entry: dict[str, Any] = {name: _cell(value) for name, value in row.point.items()}
            entry |= {"runs": row.finished, "planned": row.planned}
            for metric in answer.metrics:
                spread = row.figures.get(metric.name)
                entry[metric.name] = spread and spread.mean
                entry[f"{metric.name}_sd"] = spread and spread.sd
                entry[f"{metric.name}_n"] = spread.n if spread else 0
            rows.append(entry)
        if frame == "polars":
            return _library(frame).DataFrame(rows, strict=False, infer_schema_length=None)
        table = _library(frame).DataFrame(rows)
        table.attrs["notes"] = answer.notes
        return table

    def curves(self, name: str, filter: str | None = None, *, frame: Frame = "pandas") -> Any:
        """Returns every point of a metric: run, axes, seed, step, Unix seconds and value, in long form.

        Raises ValueError where none of the runs has such a metric.
        """
        import pyarrow

        runs = self._table(filter).rename_columns({"id": "run"})
        row_of: list[int] = []
        points: dict[str, list[Any]] = {"step": [], "at_s": [], name: []}
        for row, run in enumerate(runs["run"].to_pylist()):
            for series in self._client.all_points(run, name):
                row_of += [row] * len(series.steps)
                points["step"] += series.steps
                points["at_s"] += series.at_s
                points[name] += series.values
        if not row_of:
            found = {one for run in runs["run"].to_pylist() for one in self._client.points(run, max_points=4)}
            known = f"there are {', '.join(sorted(found))}" if found else "no run has a point yet"
            raise ValueError(f"experiment {self.id} has no points of '{name}': {known}")
        axes = [column for column in runs.column_names if column.startswith("axis.")]
        table = runs.select(["run", *axes, "seed"]).take(pyarrow.array(row_of))
        for column, values in points.items():
            table = table.append_column(column, pyarrow.array(values))
        return _to_frame(table, frame)

    def export(self, path: str | PathLike[str], filter: str | None = None) -> Path:
        """Writes the runs as .csv, .jsonl or .parquet, or all in a .zip that `stillhouse verify` checks."""
        file = Path(path)
        form = file.suffix.removeprefix(".")
        if form == "zip" and filter is None:
            write_bundle(self._client, self.id, file)
        elif form in list(TableFormat):
            with whole_file(file) as stream:
                stream.writelines(self._client.export_chunks(self.id, format=cast(Any, form), filter=filter))
        else:
            raise ValueError(
                f"{file}: end the name with .csv, .jsonl or .parquet for a table of the runs, or without a "
                "filter with .zip for everything"
            )
        return file

    def _table(self, filter: str | None) -> Any:
        """Returns the exported table, with numbers where all values of an axis are numbers."""
        import pyarrow
        import pyarrow.parquet

        chunks = self._client.export_chunks(self.id, format="parquet", filter=filter)
        table = pyarrow.parquet.read_table(io.BytesIO(b"".join(chunks)))
        for index, name in enumerate(table.column_names):
            if name.startswith("axis."):
                for kind in (pyarrow.float64(), pyarrow.int64()):
                    with suppress(pyarrow.ArrowInvalid):
                        table = table.set_column(index, name, table[name].cast(kind))
        return table


def _to_frame(table: Any, frame: Frame) -> Any:
    library = _library(frame)
    return library.from_arrow(table) if frame == "polars" else table.to_pandas()


def _library(frame: Frame) -> ModuleType:
    if frame not in ("pandas", "polars"):
        raise ValueError(f"frame '{frame}' is neither pandas nor polars; give one of the two")
    try:
        return importlib.import_module(frame)
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"{frame} is not installed here; run `pip install {frame}`") from None


def _cell(value: Any) -> Any:
    return (
        json.dumps(value) if isinstance(value, Mapping | Sequence) and not isinstance(value, str) else value
    )
