"""A task from outside the packages: whether a line is shouted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field

from trainers.data.formats import Row, read_plain
from trainers.data.layouts import TEST, TRAIN, SourcePart
from trainers.model_kinds.heads import ClassHead
from trainers.tasks.info import OwnFields, Score, TaskInfo

CLASSES = ("calm", "loud")


def one_file_per_class(path: Path) -> Mapping[str, SourcePart] | None:
    """`calm.txt` and `loud.txt`, one text per line."""
    files = [path / f"{name}.txt" for name in CLASSES]
    if not all(file.is_file() for file in files):
        return None

    def read() -> Iterator[Row]:
        for name, file in zip(CLASSES, files, strict=True):
            for row in read_plain(file):
                yield Row({**row.fields, "label": name}, row.where)

    return {TRAIN: SourcePart(files, read)}


class LoudnessFields(OwnFields):
    """How a line is read."""

    marks: int = Field(default=1, ge=1)
    """Exclamation marks that are appended to a loud line."""

    def check(self, max_length: int) -> None:
        """Refuses more marks than a sequence has tokens."""
        if self.marks > max_length:
            raise ValueError(f"marks {self.marks} is more than max_length {max_length}; lower task.marks")


LOUDNESS = TaskInfo(
    name="loudness",
    summary="whether a line is shouted",
    implementation="tests.extending.loudness.task:Loudness",
    head=ClassHead,
    scores={
        "error_rate": Score("1", better="lower", share="all", margin=0.02, drawn=True),
        "cut_off": Score("1", tuned=True),
    },
    headline="error_rate",
    own_fields=LoudnessFields,
    usual_length=16,
    counted="lines",
    layouts=(one_file_per_class,),
    hub_id="example/loudness",
    hub_examples=640,
    default_examples={TEST: 8},
)
