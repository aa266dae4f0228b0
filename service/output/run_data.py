"""Predictions of a run, a page at a time, and its data, read again from the files. Imports no torch.

Nothing is read whole: predictions a group of rows at a time, data within an allowance.
"""

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from service.analysis.answers import BadQuestion
from service.config.settings import Settings
from service.domain.serialization import Number, Serializable
from service.output.run_files import predictions_file
from service.specs.data import at_hand
from service.specs.models import NoModel, checkpoint_of, workspace_of
from service.store import Store
from trainers.checkpoints import predictions
from trainers.config import TaskConfig
from trainers.data.allowance import Allowance
from trainers.data.cache import in_use
from trainers.data.paths import HUB, UnusablePath, find
from trainers.data.storage import on_this_node
from trainers.errors import TrainingError

PredictionOrder = Literal["worst", "sure", "unsure", "file"]
_MOST_READ = 200_000  # Predictions that are looked through
_BINS = 15  # Of a reliability diagram, as of the score calibration_error
_DATA_BYTES, _DATA_S = 64 << 20, 4.0  # How much of a run's data is read, and for how long
_LISTED = 50  # Labels of a part whose numbers are listed, the most frequent ones

Columns = Mapping[str, Sequence[Any]]  # Values of some predictions by column, as their file has them


@dataclass(frozen=True, slots=True)
class PredictedUnit(Serializable):
    """A unit of the test part: a text, a pair or a question."""

    unit: str  # Stable name
    score: Number  # Its share of the headline
    error: Number  # How wrong its prediction is, by the task's own measure
    confidence: float | None  # Probability of its least sure decision; null = no probabilities are kept
    prediction: Any  # As `predictions` has it
    truth: Any  # As `predictions` has it
    probabilities: Any  # By label, or of each candidate
    texts: list[list[str]]  # Of each row that it is made of; none = the data is not here, or has changed
    tokens: list[list[str]]  # Of each row, as the tokenizer of the model divides it


@dataclass(frozen=True, slots=True)
class PredictedUnits(Serializable):
    """A page of predictions."""

    items: list[PredictedUnit]  # In the order asked for
    total: int  # Predictions that fit, of all that were looked through
    looked_through: int  # All, or the first 200,000


@dataclass(frozen=True, slots=True)
class ReliabilityBin(Serializable):
    """Decisions of about the same confidence."""

    decisions: int  # How many
    confidence: float  # Their mean confidence
    accuracy: float  # Share of them that is right


@dataclass(frozen=True, slots=True)
class PredictionSummary(Serializable):
    """What predictions can be filtered and ordered by, which labels are confused, and calibration."""

    units: int  # Units of the test part
    looked_through: int  # Units that calibration is of: all, or the first 200,000
    can_be_right: bool  # Whether predictions are right or wrong, rather than more or less off
    labels: Sequence[str]  # Labels to filter by; none = the task has none
    true: Sequence[int]  # How often each label is true
    predicted: Sequence[int]  # How often each is predicted
    hits: Sequence[int]  # How often each is both
    confusion: Sequence[Sequence[int]]  # By true and predicted label; none = a unit has several, or too many
    reliability: list[ReliabilityBin]  # Rising; none = no probabilities are kept
    calibration_error: float | None  # Expected calibration error, as of the score of this name


@dataclass(frozen=True, slots=True)
class DataSample(Serializable):
    """A row of a dataset."""

    where: str  # File and place
    texts: Sequence[str]  # What becomes tokens
    labels: Mapping[str, Any]  # What is learned, by field


@dataclass(frozen=True, slots=True)
class DataPart(Serializable):
    """A part of a dataset as its files have it, before a run divides it or draws from it."""

    rows: int  # Rows that were read
    whole: bool  # Whether these are all
    usable: int  # Rows that the task can use
    duplicates: int  # Examples whose texts occurred before in the part
    labels: Mapping[str, Mapping[str, int]]  # How often labels occur, the 50 most frequent, by field
    lengths: Sequence[tuple[int, int]]  # Tokens up to which, and number of the measured examples
    percentiles: Mapping[int, int]  # Tokens of the examples at the 50th, 90th, 99th and 100th percentile
    remarks: Sequence[str]  # What is doubtful, and why the rest cannot be read
    samples: Sequence[DataSample]  # Drawn at random, the same ones each time


@dataclass(frozen=True, slots=True)
class RunDataset(Serializable):
    """What the files of a run's data hold, as far as they were read."""

    problem: str | None  # Why nothing was read; null = it was
    max_length: int  # Tokens beyond which texts are cut
    token_count: str  # How tokens were counted
    parts: Mapping[str, DataPart]  # By name
    shared: Mapping[str, int]  # Examples that two parts have in common


def predicted_units(
    store: Store,
    settings: Settings,
    run_id: int,
    order: PredictionOrder,
    label: str | None,
    predicted: str | None,
    wrong: bool | None,
    offset: int,
    limit: int,
) -> PredictedUnits:
    """Returns a page of predictions, or raises `NoPredictions`."""
    from pyarrow import compute

    file, task = predictions_file(store, settings, run_id), _task(store, run_id)
    view = task.info.predictions
    patterns = {}
    for name, column, wanted in (("label", "truth", label), ("predicted", "prediction", predicted)):
        if wanted is not None and not view.truth:
            raise BadQuestion(name, f"predictions of task {task.name} have no labels; leave it out")
        if wanted is not None:
            patterns[column] = view.pattern(wanted, true=column == "truth")
    if wrong is not None and not view.can_be_right:
        raise BadQuestion("wrong", f"predictions of task {task.name} are more or less off; leave it out")
    if order in ("sure", "unsure") and view.decisions is None:
        raise BadQuestion("order", f"task {task.name} keeps no probabilities; use worst or file")
    places, keys = np.empty(0, np.int64), np.empty(0)
    begin = total = 0
    with predictions.opened(file) as opened:
        for batch in _batches(opened):
            rows = np.arange(begin, begin + len(batch))
            begin += len(batch)
            for column, pattern in patterns.items():
                kept = compute.match_substring_regex(batch[column], pattern)
                batch, rows = batch.filter(kept), rows[kept.to_numpy(zero_copy_only=False)]
            columns = batch.to_pydict()
            errors = _errors(task, columns)
            by = rows.astype(float) if order == "file" else -errors
            if order in ("sure", "unsure"):
                by = _confidences(task, columns) * (-1.0 if order == "sure" else 1.0)
            if wrong is not None:
                rows, by = rows[(errors > 0) == wrong], by[(errors > 0) == wrong]
            total += len(rows)
            places, keys = np.concatenate((places, rows)), np.concatenate((keys, by))
            first = np.lexsort((places, keys))[: offset + limit]
            places, keys = places[first], keys[first]
        columns = _at(opened, places[offset:])
    texts, tokens = _texts(store, settings, run_id, task, columns["sources"], file.stat().st_mtime)
    confidences = (None if math.isnan(one) else one for one in _confidences(task, columns).tolist())
    documents = (map(json.loads, columns[name]) for name in ("prediction", "truth", "probabilities"))
    measured = columns["score"], _errors(task, columns).tolist(), confidences
    units = zip(columns["unit"], *measured, *documents, texts, tokens, strict=True)
    return PredictedUnits([PredictedUnit(*unit) for unit in units], total, begin)


def prediction_summary(store: Store, settings: Settings, run_id: int) -> PredictionSummary:
    """Returns what can be asked of a run's predictions, or raises `NoPredictions`."""
    file, task = predictions_file(store, settings, run_id), _task(store, run_id)
    view, sums, read = task.info.predictions, np.zeros((3, _BINS)), 0
    counts = predictions.read_record(file).labels or predictions.LabelCounts([], [], [], [])
    with predictions.opened(file) as opened:
        units = opened.metadata.num_rows
        for batch in _batches(opened) if view.decisions else ():
            read += len(batch)
            decisions = [one for of in _decisions(task, batch.to_pydict()) for one in of]
            confidence, right = np.array(decisions, dtype=float).reshape(-1, 2).T
            place = np.minimum((confidence * _BINS).astype(np.int64), _BINS - 1)
            sums += [np.bincount(place, weights, _BINS) for weights in (confidence**0, confidence, right)]
    number, confident, hits = sums[:, sums[0] > 0]
    rows = zip(number.tolist(), (confident / number).tolist(), (hits / number).tolist(), strict=True)
    return PredictionSummary(
        units,
        read or units,
        view.can_be_right,
        *((counts.labels, counts.true, counts.predicted, counts.hits) if view.truth else ((), (), (), ())),
        counts.confusion,
        [ReliabilityBin(int(of), mean, share) for of, mean, share in rows],
        float(np.abs(confident - hits).sum() / number.sum()) if len(number) else None,
    )


def run_data(store: Store, settings: Settings, run_id: int) -> RunDataset:
    # Imported here: the rules of tasks take a moment.
    from trainers.tasks.inspection import contents_as, shared_examples

    task, folder = _task(store, run_id), _tokenizer(store, settings, run_id)
    try:
        with _data_of(task, settings) as (path, roots):
            parts = contents_as(task, path, Allowance(_DATA_BYTES, _DATA_S, roots), folder)
    except (UnusablePath, TrainingError, OSError) as error:
        return RunDataset(str(error), task.max_length, "", {}, {})
    return RunDataset(
        None,
        task.max_length,
        "as its model divides them" if folder else "a fast estimate",
        {
            name: DataPart(
                part.rows,
                part.whole,
                part.usable,
                part.duplicates,
                {
                    of: dict(sorted(by.items(), key=lambda one: -one[1])[:_LISTED])
                    for of, by in part.labels.items()
                },
                part.lengths.histogram if part.lengths else (),
                part.lengths.tokens if part.lengths else {},
                [*part.remarks, *part.skipped.first, *part.mistakes],
                [DataSample(*one) for one in part.samples],
            )
            for name, part in parts.items()
        },
        shared_examples(parts),
    )


def _task(store: Store, run_id: int) -> TaskConfig:
    return TaskConfig.model_validate(json.loads(store.runs.config(run_id))["task"])


@contextmanager
def _data_of(task: TaskConfig, settings: Settings) -> Iterator[tuple[Path, Sequence[Path]]]:
    if not task.path or task.path.startswith(HUB):
        raise UnusablePath("the data is the hub's; only files of the service's machine are shown")
    roots = settings.roots("data")
    with at_hand(find(task.path, roots), roots, workspace_of(settings)) as (path, within):
        if path is None:
            raise UnusablePath(f"{task.path}: too large to be copied from the store, or not readable now")
        yield path, within


def _batches(opened: Any) -> Iterator[Any]:
    read = 0
    for batch in opened.iter_batches(columns=["score", "prediction", "truth", "probabilities"]):
        yield batch.slice(0, _MOST_READ - read)
        read += len(batch)
        if read >= _MOST_READ:
            return


def _at(opened: Any, places: np.ndarray) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {name: [None] * len(places) for name in predictions.COLUMNS}
    begin = 0
    for group in range(opened.num_row_groups):
        end = begin + opened.metadata.row_group(group).num_rows
        wanted = np.flatnonzero((places >= begin) & (places < end))
        if len(wanted):
            rows = opened.read_row_group(group).take(places[wanted] - begin).to_pydict()
            for name, values in found.items():
                for place, value in zip(wanted.tolist(), rows[name], strict=True):
                    values[place] = value
        begin = end
    return found


def _errors(task: TaskConfig, columns: Columns) -> np.ndarray:
    rows = zip(columns["score"], columns["prediction"], columns["truth"], strict=True)
    error = task.info.predictions.error
    return np.array([math.nan if math.isnan(row[0]) else error(*row) for row in rows], dtype=float)


def _decisions(task: TaskConfig, columns: Columns) -> Iterator[Sequence[tuple[float, bool]]]:
    """Yields the decisions of each prediction; none where it has no probabilities."""
    of = task.info.predictions.decisions
    rows = zip(columns["prediction"], columns["truth"], columns["probabilities"], strict=True)
    return (() if of is None or row[2] == "null" else of(*map(json.loads, row)) for row in rows)


def _confidences(task: TaskConfig, columns: Columns) -> np.ndarray:
    least = (min((share for share, _ in of), default=math.nan) for of in _decisions(task, columns))
    return np.array(list(least), dtype=float)


@functools.lru_cache(maxsize=8)
def _loaded(folder: Path) -> Any:
    from trainers.data import tokenizers

    return tokenizers.load(folder)


def _tokenizer(store: Store, settings: Settings, run_id: int) -> Path | None:
    from trainers.data import tokenizers

    try:
        found = checkpoint_of(settings, store.runs.source_of(store.runs.get(run_id)), "best")
        files = (tokenizers.FILE, *tokenizers.SETTINGS, "vocab.txt")
        with in_use(workspace_of(settings)):
            return on_this_node(found, settings.resolved_cache_dir() / "models", files)
    except (NoModel, OSError, ValueError, TrainingError):
        return None


def _texts(
    store: Store, settings: Settings, run_id: int, task: TaskConfig, sources: Sequence[Any], before_s: float
) -> tuple[list[list[list[str]]], list[list[list[str]]]]:
    """Returns texts and tokens of the rows that units are made of, where the data is as it was."""
    from trainers.tasks.inspection import texts_at

    places = [[(one["file"], one["row"]) for one in of] for of in sources]
    try:
        wanted = {one for of in places for one in of}
        with _data_of(task, settings) as (path, roots):
            found = texts_at(task, path, Allowance(_DATA_BYTES, _DATA_S, roots), wanted, before_s)
        texts = [[list(found[one]) for one in of if one in found] for of in places]
        folder = _tokenizer(store, settings, run_id)
        tokenizer = None if folder is None else _loaded(folder)
    except (UnusablePath, TrainingError, OSError):
        return [[] for _ in places], [[] for _ in places]
    if tokenizer is None:
        return texts, [[] for _ in places]
    return texts, [[tokenizer.encode(*one).tokens[: task.max_length] for one in of] for of in texts]
