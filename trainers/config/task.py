"""What is learned, and from which data."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, model_validator

from trainers.config.section import Section


class TaskName(StrEnum):
    """What is learned: data, head and metrics."""

    imdb = "imdb"
    squad_v2 = "squad_v2"
    wikiqa = "wikiqa"
    tariff = "tariff"
    mlm = "mlm"


HEADLINES: Mapping[TaskName, str] = MappingProxyType(
    {
        TaskName.imdb: "accuracy",
        TaskName.squad_v2: "f1",
        TaskName.wikiqa: "map",
        TaskName.tariff: "accuracy",
        TaskName.mlm: "validation_loss",
    }
)
"""The metric by which runs of a task are judged first; a loss is better when it is lower."""


NO_HUB_DATASET = frozenset({TaskName.tariff})
"""Tasks of which the hub has no dataset: they need a path."""


MAX_LENGTH = 512
"""Tokens of the longest sequence: the positions of the published models."""


def _usual_length(task: Mapping[str, Any]) -> int:
    return 128 if task.get("name") == TaskName.mlm else MAX_LENGTH


class Task(Section):
    """What is learned, and from which data."""

    name: TaskName
    """Task: data format, head and metrics."""
    path: str | None = Field(default=None, max_length=4096)
    """Dataset: a folder or file under a data root, or `hub:<owner>/<name>`; unset = the task's hub id."""
    max_length: int = Field(default_factory=_usual_length, ge=8, le=MAX_LENGTH)
    """Longest sequence, in tokens: texts are cut, squad_v2 makes windows; unset = 512, of mlm 128."""
    too_long: Literal["cut", "error"] | None = None
    """imdb, wikiqa and tariff only: what a text of more tokens is, cut or an error; unset = cut."""
    train_examples: int | None = Field(default=None, ge=1)
    """How many training examples (squad_v2, wikiqa: questions) to draw, balanced by label; unset = all."""
    validation_examples: int | None = Field(default=None, ge=1)
    """How many validation examples (squad_v2, wikiqa: questions) to draw, balanced by label; unset = all."""
    test: Literal["auto", "none"] = "auto"
    """auto = a test part is scored once, at the end; none = no test part: its file serves as validation."""
    test_examples: int | None = Field(default=None, ge=1)
    """How many test examples (squad_v2, wikiqa: questions) to draw, balanced by label; unset = all."""
    overlap: Literal["error", "drop", "allow"] | None = None
    """An example in two parts: error, drop from the first, or allow; unset = drop (test none: allow)."""
    validation_fraction: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Share of the training data held out for each part that the dataset has no file for."""
    split_seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the subset and of the split; the same for all runs, so that they see the same data."""
    level: Literal[2, 4, 6, 8, 10] | None = None
    """tariff only: digits of the code that is learned; unset = 6."""
    stride: int | None = Field(default=None, ge=1, le=512)
    """squad_v2 only: tokens that neighbouring windows share; unset = 128, or a third of short windows."""
    max_answer_tokens: int | None = Field(default=None, ge=1, le=512)
    """squad_v2 only: longest answer, in tokens; unset = 30."""
    masked_fraction: float | None = Field(default=None, gt=0.0, lt=1.0)
    """mlm only: share of a sequence's tokens that are to be guessed; unset = 0.15."""
    whole_word: bool | None = None
    """mlm only: mask all pieces of a word together; unset = no."""

    @model_validator(mode="after")
    def _own_fields(self) -> Task:
        for field, owners in _FIELDS_OF_TASKS.items():
            if getattr(self, field) is not None and self.name not in owners:
                raise ValueError(
                    f"{field} belongs to task {', '.join(owners)}, not {self.name}; "
                    f"remove task.{field} or set task.name: {owners[0]}"
                )
        if self.test == "none" and self.test_examples is not None:
            raise ValueError(
                f"test_examples {self.test_examples} has no test part to draw from with test none; "
                "remove task.test_examples or set task.test: auto"
            )
        if self.stride is not None and self.stride > self.max_length // 2:
            raise ValueError(
                f"stride {self.stride} is more than half of max_length {self.max_length}; "
                f"lower task.stride to {self.max_length // 2} or raise task.max_length"
            )
        return self


_FIELDS_OF_TASKS = {
    "too_long": (TaskName.imdb, TaskName.wikiqa, TaskName.tariff),
    "level": (TaskName.tariff,),
    "stride": (TaskName.squad_v2,),
    "max_answer_tokens": (TaskName.squad_v2,),
    "masked_fraction": (TaskName.mlm,),
    "whole_word": (TaskName.mlm,),
}
