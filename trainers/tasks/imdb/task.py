from __future__ import annotations

from types import MappingProxyType

from typing_extensions import override

from trainers.config import Task as TaskConfig
from trainers.data.formats import Row
from trainers.tasks.base import Facts
from trainers.tasks.classification import LabelFields
from trainers.tasks.classification.task import Classification, Labelled

_CLASSES = ("negative", "positive")
_FIELDS = LabelFields(labels=_CLASSES)


class Imdb(Classification):
    spellings = MappingProxyType({"neg": 0, "pos": 1, "negative": 0, "positive": 1, "0": 0, "1": 1})

    @override
    def fields(self, task: TaskConfig) -> LabelFields:
        return _FIELDS

    @override
    def settings(self, task: TaskConfig) -> Facts:
        return {}

    @override
    def named(self, written: str | int, row: Row, task: TaskConfig) -> str:
        number = self.spellings.get(str(written).strip().lower())
        if number is None:
            raise row.refusal("label", f"unknown label {written!r}; use one of {', '.join(self.spellings)}")
        return _CLASSES[number]

    @override
    def stratum(self, example: Labelled) -> int:
        return _CLASSES.index(example.labels[0])
