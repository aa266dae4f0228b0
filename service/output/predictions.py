"""Predictions of runs for each unit of their test parts, stored next to their checkpoints. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from service.config.settings import Settings
from service.domain.records import Run
from service.domain.states import TERMINAL_RUN_STATES
from service.specs.models import checkpoints_of
from service.store import Store
from trainers.checkpoints import predictions
from trainers.checkpoints.manifest import newest_file
from trainers.checkpoints.predictions import LabelCounts
from trainers.checkpoints.predictions import NoPredictions as NoPredictions

CHUNK_BYTES = 1 << 20


def predictions_file(store: Store, settings: Settings, run_id: int) -> Path:
    """Returns the Parquet file of a run's predictions, or of the run that it reuses.

    Raises:
        NotFound: the run does not exist.
        NoPredictions: it has none, or not yet, or its files are not on this machine.
    """
    run = store.run(run_id)
    folder = checkpoints_of(settings, store.source_of(run))
    try:
        if (file := newest_file(folder, predictions.PREDICTIONS)) is not None:
            return file
    except OSError as error:
        raise NoPredictions(
            f"run {run_id}: {error.filename} cannot be read ({error.strerror or error})"
        ) from None
    if json.loads(store.run_config(run_id))["task"].get("test") == "none":
        raise NoPredictions(f"run {run_id} has no test part; submit it with task.test: auto")
    if run.state in TERMINAL_RUN_STATES:
        raise NoPredictions(f"run {run_id} is {run.state} and left no {predictions.PREDICTIONS} in {folder}")
    raise NoPredictions(f"run {run_id} is {run.state}; its test part is scored at its end")


def unit_scores(settings: Settings, source: Run) -> Mapping[str, float]:
    """Returns each test unit's share of a run's headline, by the unit's name.

    `source` is the run that was trained: of a run that reuses another, that other one (`Store.source_of`).
    """
    folder = checkpoints_of(settings, source)
    try:
        file = newest_file(folder, predictions.PREDICTIONS)
    except OSError as error:
        raise NoPredictions(f"{error.filename}: cannot be read ({error.strerror or error})") from None
    if file is None:
        raise NoPredictions(f"run {source.id} has no {predictions.PREDICTIONS} in {folder}")
    return predictions.unit_scores(file)


def known_scores(store: Store, settings: Settings, run: Run) -> Mapping[str, float] | None:
    """Returns the same for any run; None where there are none on this machine."""
    try:
        return unit_scores(settings, store.source_of(run))
    except NoPredictions:
        return None


def known_labels(store: Store, settings: Settings, run: Run) -> LabelCounts | None:
    """Returns a run's counts by label on the test part; None where there are none on this machine."""
    try:
        file = newest_file(checkpoints_of(settings, store.source_of(run)), predictions.PREDICTIONS)
        return None if file is None else predictions.read_record(file).labels
    except (NoPredictions, OSError):
        return None


def json_lines(file: Path) -> Iterator[bytes]:
    """Yields JSON lines with `unit`, `score`, `prediction`, `truth`."""
    for one in predictions.read(file):
        row = {"unit": one.unit, "score": one.score, "prediction": one.prediction, "truth": one.truth}
        yield json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def raw(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise NoPredictions(f"{file}: cannot be read ({error.strerror or error})") from None
