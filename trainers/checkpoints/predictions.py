"""Predictions of a run for each unit of its test part: one Parquet file next to an attempt's checkpoints.

The file is the record that the test part was scored: it has the figures and the hash of the weights. Imports
no torch.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainers.data.storage import Place, put

PREDICTIONS = "predictions/test.parquet"  # Where an attempt's folder has the file
COLUMNS = ("unit", "score", "prediction", "truth", "probabilities", "sources")
SOURCES = "test.sources.json"  # Next to the names of units, where the rows of each are
_RECORD = b"stillhouse.test"
_PLACE = re.compile(r"(?P<file>.*), (?:(?:line|row|item) (?P<row>\d+)|data\[.*)")
"""A row's place in words: its number in its file, or its path in a document."""
_ROWS = 8192  # Rows of a group: what a reader holds at once
MOST_CONFUSED = 200  # Most labels whose confusions are kept: a matrix of ten thousand would take a gigabyte


@dataclass(frozen=True, slots=True)
class LabelCounts:
    """How often each label was true, predicted, and both: the basis of figures by label.

    The confusion, by true and predicted label, is empty for several labels a unit, or over `MOST_CONFUSED`.
    """

    labels: Sequence[str]
    true: Sequence[int]
    predicted: Sequence[int]
    hits: Sequence[int]
    confusion: Sequence[Sequence[int]] = field(default_factory=list)

    @classmethod
    def added_up(cls, several: Sequence[LabelCounts]) -> LabelCounts:
        """Returns the sum over runs: of the first, and of the others with the same labels."""
        alike = [counts for counts in several if list(counts.labels) == list(several[0].labels)]
        true, predicted, hits = (
            np.sum([getattr(counts, name) for counts in alike], axis=0).tolist()
            for name in ("true", "predicted", "hits")
        )
        matrices = [counts.confusion for counts in alike]
        confusion = np.sum(matrices, axis=0).tolist() if all(matrices) else []
        return cls(list(several[0].labels), true, predicted, hits, confusion)

    @classmethod
    def of_classes(
        cls, predicted: npt.NDArray[np.int64], true: npt.NDArray[np.int64], labels: Sequence[str]
    ) -> LabelCounts:
        """Counts units with one label each; `predicted` and `true` are (N,) label numbers."""
        count = len(labels)
        confusion: list[list[int]] = []
        if count <= MOST_CONFUSED:
            pairs = np.bincount(true * count + predicted, minlength=count * count)
            confusion = pairs.reshape(count, count).tolist()
        return cls(
            list(labels),
            np.bincount(true, minlength=count).tolist(),
            np.bincount(predicted, minlength=count).tolist(),
            np.bincount(true[true == predicted], minlength=count).tolist(),
            confusion,
        )


@dataclass(frozen=True, slots=True)
class Record:
    """How the test part was scored; `carried` are all scores of the checkpoint on the validation part."""

    weights_sha256: str
    data: str  # Hash of the data's identity
    headline: str
    step: int  # Step of the scored checkpoint
    carried: Mapping[str, float]
    figures: Mapping[str, float]  # By name, as in the run's summary
    labels: LabelCounts | None = None  # None = the task has no labels


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for a unit, and the truth, as JSON-able values."""

    unit: str  # Its stable name
    score: float  # Its share of the headline
    prediction: Any
    truth: Any
    probabilities: Any = None  # Of the 20 likeliest labels by name, or of each candidate; None = not known
    sources: Sequence[Mapping[str, str | int | None]] = ()  # `file` and `row` of each row that it is made of


def source_of(place: str) -> dict[str, str | int | None]:
    """Returns `file` and `row` of a row's place in words; row None = the file is the row, or has no such."""
    found = _PLACE.fullmatch(place)
    if found is None:
        return {"file": place, "row": None}
    return {"file": found["file"], "row": None if found["row"] is None else int(found["row"])}


class NoPredictions(Exception):
    """There is no file of predictions that can be read; the message is one line."""


def write(folder: Place, record: Record, rows: Sequence[Prediction]) -> None:
    """Writes the predictions of a run into an attempt's folder, whole or not at all; raises OSError."""
    # Imported here: only the end of a run pays for it.
    from pyarrow import parquet

    table = _table(rows).replace_schema_metadata({_RECORD: json.dumps(asdict(record)).encode()})
    content = io.BytesIO()
    parquet.write_table(table, content, row_group_size=_ROWS, compression="zstd")
    put(folder / PREDICTIONS, content.getvalue())


def write_table(file: Path, rows: Sequence[Prediction]) -> None:
    """Writes predictions that are no record of a test part to a Parquet file."""
    from pyarrow import parquet

    parquet.write_table(_table(rows), file, compression="zstd")


def _table(rows: Sequence[Prediction]) -> Any:
    import pyarrow

    source = pyarrow.struct({"file": pyarrow.string(), "row": pyarrow.int64()})
    return pyarrow.table(
        {
            "unit": pyarrow.array([row.unit for row in rows], pyarrow.string()),
            "score": pyarrow.array([row.score for row in rows], pyarrow.float64()),
            **{
                name: pyarrow.array([_json(getattr(row, name)) for row in rows], pyarrow.string())
                for name in ("prediction", "truth", "probabilities")
            },
            "sources": pyarrow.array([list(row.sources) for row in rows], pyarrow.list_(source)),
        }
    )


def read_record(file: Place) -> Record:
    with opened(file) as table:
        metadata = table.schema_arrow.metadata or {}
    try:
        fields = json.loads(metadata[_RECORD])
        labels = fields.pop("labels", None)
        return Record(**fields, labels=None if labels is None else LabelCounts(**labels))
    except (KeyError, TypeError, ValueError):
        raise NoPredictions(f"{file}: not a predictions file") from None


def read(file: Place) -> Iterator[Prediction]:
    """Yields the predictions of a file, a group of rows in memory at a time, or raises NoPredictions."""
    with opened(file) as table:
        if set(table.schema_arrow.names) != set(COLUMNS):
            raise NoPredictions(f"{file}: not a predictions file")
        for batch in table.iter_batches(batch_size=_ROWS, columns=list(COLUMNS)):
            for row in batch.to_pylist():
                values = {name: json.loads(row[name]) for name in ("prediction", "truth", "probabilities")}
                yield Prediction(row["unit"], row["score"], **values, sources=row["sources"])


def unit_scores(file: Place) -> dict[str, float]:
    with opened(file) as table:
        try:
            read = table.read(columns=["unit", "score"])
            return dict(zip(read["unit"].to_pylist(), read["score"].to_pylist(), strict=True))
        except KeyError:
            raise NoPredictions(f"{file}: not a predictions file") from None


def opened(file: Place) -> Any:
    """Returns a file of predictions for pyarrow to read in parts, or raises NoPredictions."""
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(file if isinstance(file, Path) else file.open())
    except FileNotFoundError:
        raise NoPredictions(f"{file} does not exist") from None
    except pyarrow.ArrowInvalid as error:
        raise NoPredictions(f"{file}: not a Parquet file ({error})") from None
    except OSError as error:
        raise NoPredictions(f"{file}: cannot be read ({error.strerror or error})") from None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
