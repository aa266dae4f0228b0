"""Entities in a text, or other labelled stretches of words."""

import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from trainers.data.formats import READERS, SEVERAL, Row, ending, read_lines
from trainers.data.layouts import SourcePart, files_in, loosely_named
from trainers.data.sample import Guess, Sample
from trainers.errors import BadDataError
from trainers.model_kinds.heads import TokenHead
from trainers.tasks.info import NO_LOSS, ListedFields, PredictionView, Score, TaskInfo, Trial

_COMMENT = re.compile(r"#\s*\S+\s*=")
"""A line about a sentence, such as `# sent_id = 3`."""
OUTSIDE = "O"
_TAG = re.compile(r"[BI]-.+")
_DOCUMENT = "-DOCSTART-"
_NOT_COLUMNS = {*READERS, *SEVERAL, ".md", ".html", ".pdf", ".zip", ".tar", ".gz"} - {".tsv", ".tsv.gz"}
_ENTITIES = Score("1", better="higher")


def column_files(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds one file of columns, or one per part, whose names contain `train`, `dev`, `test`."""
    return files_in(path, _has_columns, partial(loosely_named, _has_columns), read_columns)


def read_columns(path: Path) -> Iterator[Row]:
    """Yields rows of a file with a token per line, sentences separated by blank lines, as CoNLL has them.

    Columns are separated by tabs, or else by spaces; the first is the token and the last its tag. All are
    also there under their positions `0`, `1`, ..., for `task.columns`.
    """
    lines: list[list[str]] = []
    began = 0
    for line, number in read_lines(path):
        if not line.strip():
            yield from _sentence(lines, path, began)
            lines = []
            continue
        if line.startswith(_DOCUMENT) or (not lines and _COMMENT.match(line)):
            continue
        values = line.split("\t") if "\t" in line else line.split()
        if len(values) < 2 or (lines and len(values) != len(lines[0])):
            wanted = len(lines[0]) if lines else "at least 2"
            raise BadDataError(
                f"{path}, line {number}: {len(values)} columns instead of {wanted}; a line has a token, a "
                "tab or a space, and its tag"
            )
        if not lines:
            began = number
        lines.append([value.strip() for value in values])
    yield from _sentence(lines, path, began)


def _sentence(lines: list[list[str]], path: Path, began: int) -> Iterator[Row]:
    if lines:
        columns = [list(column) for column in zip(*lines, strict=True)]
        by_position = {str(position): column for position, column in enumerate(columns)}
        yield Row({**by_position, "tokens": columns[0], "tags": columns[-1]}, f"{path}, line {began}")


def _has_columns(path: Path) -> bool:
    """Returns False for the other formats, and for a table whose header names the task's fields."""
    if ending(path) in _NOT_COLUMNS:
        return False
    if ending(path) not in READERS:
        return True
    first = next((line for line, _ in read_lines(path)), "")
    return not {"tokens", "text"} & set(first.split("\t"))


def is_tag(text: str) -> bool:
    return text == OUTSIDE or _TAG.fullmatch(text) is not None


class TagFields(ListedFields):
    def check(self, max_length: int) -> None:
        super().check(max_length)
        other = next((tag for tag in self.labels or () if not is_tag(tag)), None)
        if other is not None:
            raise ValueError(f"labels lists {other!r}, which is not O, B-<label> or I-<label>; list BIO tags")


def _guess(sample: Sample) -> Guess | None:
    known = sample.names >= {"tokens", "tags"} or sample.names >= {"text", "spans"}
    return Guess({}, 3) if known else None


def _error(score: float, prediction: str, truth: str) -> float:
    """Tags that are right have a share of the F1 as well, which may be anything."""
    return 0.0 if prediction == truth else 2.0 - math.atan(score)


TOKEN_CLASSIFICATION = TaskInfo(
    name="token_classification",
    summary="entities in texts, by BIO tags or spans",
    implementation="trainers.tasks.token_classification.task:TokenClassification",
    head=TokenHead,
    scores={
        "entity_f1": Score("1", better="higher", margin=NO_LOSS, drawn=True),
        "entity_precision": _ENTITIES,
        "entity_recall": _ENTITIES,
        "entity_f1_macro": _ENTITIES,
        "tag_accuracy": Score("1", better="higher"),
    },
    headline="entity_f1",
    own_fields=TagFields,
    columns=("tokens", "tags", "text", "spans"),
    labels=("tags", "spans"),
    trial=Trial(each="tokens", words=True, shown="tags"),
    layouts=(column_files,),
    predictions=PredictionView(error=_error, truth='"B-{label}"'),
    guess=_guess,
)
