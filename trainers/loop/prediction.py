"""What a trained model predicts for rows that its run has not read, with and without their truth."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainers.checkpoints.predictions import Prediction
from trainers.config import TaskConfig
from trainers.data import tokenizers
from trainers.data.batches import collate, evaluation_rows
from trainers.data.formats import Row
from trainers.data.layouts import TEST, TRAIN, VALIDATION
from trainers.data.sources import parts_at
from trainers.data.tokens import TokenSet
from trainers.errors import BadDataError, BadSpecError
from trainers.loop.evaluation import computed
from trainers.model_kinds.heads import Head
from trainers.models import student
from trainers.models.origin import Folder
from trainers.tasks import METRICS
from trainers.tasks.base import Carried, Scoring, build
from trainers.tasks.dataset import DatasetTask, Pace, Tokenising, require_alike

_BATCH = 32


@dataclass(frozen=True, slots=True)
class Predicted:
    rows: list[Prediction]  # Where rows lack their truth, it is None and their score NaN
    scores: Mapping[str, float]  # Empty unless every row has its truth
    examples: int
    part: str  # Part of the dataset that the rows are; a single file is its training part
    without_truth: int
    left_out: int  # Rows that the task leaves out


@dataclass(slots=True)
class _ReadRows:
    examples: list[Any] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # Own name of the row at each place that has one
    without_truth: int = 0
    left_out: int = 0


def predict(
    folder: Path,
    task: TaskConfig,
    data: Path,
    *,
    carried: Carried,
    id_column: str = "id",
    report: Callable[[str], None],
) -> Predicted:
    """Predicts the rows of a file, or of a dataset's test part (else its validation or training part).

    Args:
        folder: Model and tokenizer, as they are exported.
        carried: Scores of this checkpoint on the validation part of its run, whose thresholds are used.
        id_column: Column whose values name the predictions, where rows have it.

    Raises:
        TrainingError: Rows or model cannot be read, or the task has no examples that are rows.
    """
    rules, origin = build(task.name), Folder(folder)
    if not isinstance(rules, DatasetTask):
        raise BadSpecError(f"task {task.name} makes its examples from several rows, so it predicts no row")
    tuned = next((name for name, score in rules.info.scores.items() if score.tuned), None)
    if tuned is not None and math.isnan(carried.get(tuned, math.nan)):
        raise BadSpecError(f"the checkpoint has no {tuned}, by which answers of task {task.name} are chosen")
    try:
        parts = parts_at(data, task.model_copy(update={"test": "auto", "parts": {}}))
    except OSError as error:
        raise BadDataError(f"{error.filename or data}: cannot be read ({error.strerror})") from None
    part = next(name for name in (TEST, VALIDATION, TRAIN) if name in parts)
    head = student.head_of(rules.info.head, origin.config())
    read = _read(rules, head, task, (_named(row, task, part) for row in parts[part].read()), id_column)
    if not read.examples:
        raise BadDataError(f"{data}: no row of the {part} part can be predicted; add rows")
    require_alike({part: read.examples})
    tokenizer = tokenizers.load(folder)
    by = Tokenising(tokenizer, task, Pace(report, "tokenised", len(read.examples)))
    try:
        tokens = rules.tokenise(read.examples, head, by)
    except KeyError as error:
        raise BadDataError(f"{data}: label {error} is none that the model has learned; correct it") from None
    with TemporaryDirectory() as scratch:
        gold = Path(scratch) / "gold.json"
        rules.write_gold(gold, read.examples)
        scoring = rules.scoring(tokens, head, task, gold)
    pad_id = tokenizers.SpecialTokens.of(tokenizer, folder).id_of("pad_token")
    model = student.build(
        origin,
        head=head,
        vocabulary_size=tokenizers.vocabulary_size(tokenizer),
        dropout=0.0,
        max_length=task.max_length,
        pad_id=pad_id,
    )
    observed = _observed(model, tokens, scoring, pad_id, Pace(report, "predicted", len(tokens), "examples"))
    if np.isnan(observed).any():
        raise BadSpecError(f"{folder}: the model predicts NaN; use another checkpoint")
    places = rules.unit_sources(read.examples, read.places)
    named = zip(places, rules.unit_names(read.examples), strict=True)
    names = [read.names.get(of[0], name) for of, name in named]
    judged = scoring.judge(observed, carried)
    rows, scores = judged.rows(names, places), dict[str, float]()
    if read.without_truth:
        rows = [replace(one, truth=None, score=math.nan) for one in rows]
    else:
        scores = scoring.score(observed, carried)
        scores |= {name: computed(METRICS[name], judged) for name in task.metrics}
    return Predicted(rows, scores, len(read.examples), part, read.without_truth, read.left_out)


def _named(row: Row, task: TaskConfig, part: str) -> Row:
    """Returns a row with the fields of a part of the run's dataset that it has; labels may be missing."""
    for one in (part, TEST, VALIDATION, TRAIN):
        columns = {name: str(column) for name, column in task.columns_of(one).items()}
        for name in task.info.labels:
            if columns.get(name) not in row.fields:
                columns.pop(name, None)
        if all(column in row.fields for column in columns.values()):
            break
    return row.renamed(columns) if columns else row


def _read(
    rules: DatasetTask[Any, Any], head: Head, task: TaskConfig, rows: Iterable[Row], id_column: str
) -> _ReadRows:
    read = _ReadRows()
    for row in rows:
        row.require()
        if (stand_in := rules.stand_in(row, head, task)) is not None:
            row = replace(row, fields={**row.fields, **stand_in})
            read.without_truth += 1
        example = rules.example(row, task)
        if example is None:
            read.left_out += 1
            continue
        read.examples.append(example)
        read.places.append(row.where)
        if not row.lacks(id_column):
            read.names[row.where] = str(row.fields[id_column])
    return read


@torch.no_grad()
def _observed(
    model: student.Student, tokens: TokenSet, scoring: Scoring, pad_id: int, progress: Pace
) -> npt.NDArray[np.float32]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.eval().to(device)
    batches = evaluation_rows(tokens.lengths, _BATCH, 0, 1)
    observed, done = [], 0
    for rows in batches:
        batch = collate(tokens, rows, pad_id, 1).to(device)
        logits = model(batch).logits
        lost = logits.flatten(1).isnan().any(1)
        observed.append(
            scoring.observe(logits, batch).float().masked_fill(lost[:, None], torch.nan).cpu().numpy()
        )
        done += len(rows)
        progress(done)
    found: npt.NDArray[np.float32] = np.concatenate(observed)[np.argsort(np.concatenate(batches))]
    return found
