import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from trainers.checkpoints.predictions import LabelCounts
from trainers.config import TaskConfig
from trainers.data.formats import Row
from trainers.data.layouts import TRAIN
from trainers.data.sample import split_labels
from trainers.data.tokens import TokenSet
from trainers.errors import BadDataError, BadSpecError
from trainers.model_kinds.heads import IGNORED, ClassHead
from trainers.tasks.base import Carried, Facts, Judged, Observed, Parts, Scoring
from trainers.tasks.classification import LabelFields
from trainers.tasks.dataset import (
    DatasetTask,
    Tokenising,
    contents,
    require_alike,
    require_known,
    same_answer,
)
from trainers.tasks.scores import (
    Batch,
    Tensor,
    calibration_error,
    class_loss,
    classification,
    decisions,
    likeliest,
    matthews,
    named_probabilities,
)

UNSEEN = -1  # Class of an example whose label is none of the classes
_SHOWN = 20


class ClassScoring:
    """Predicts the likeliest class; `declared` are the scores that the task reports, None = all."""

    def __init__(
        self, labels: npt.NDArray[np.int64], classes: Sequence[str], declared: Collection[str] | None = None
    ) -> None:
        self._labels, self._classes, self._declared = labels, classes, declared
        self.units = len(labels)

    def observe(self, logits: Tensor, batch: Batch) -> Tensor:
        import torch

        predicted = logits.argmax(1, keepdim=True)
        probability = logits.float().softmax(1).gather(1, predicted)
        return torch.cat([predicted.float(), probability, likeliest(logits)], 1)

    def score(self, observed: Observed, carried: Carried | None = None) -> dict[str, float]:
        predicted = observed[:, 0].astype(np.int64)
        scores = classification(predicted, self._labels, len(self._classes))
        # Each text has one prediction and one label.
        scores |= dict.fromkeys(("f1_micro", "precision_micro", "recall_micro"), scores["accuracy"])
        scores["matthews"] = matthews(predicted, self._labels, len(self._classes))
        scores["calibration_error"] = calibration_error(observed[:, 1], predicted == self._labels)
        return {name: scores[name] for name in scores if self._declared is None or name in self._declared}

    def judge(self, observed: Observed, carried: Carried) -> Judged:
        predicted = observed[:, 0].astype(np.int64)
        return Judged(
            np.arange(len(predicted)),
            (predicted == self._labels).astype(np.float64),
            [self._classes[number] for number in predicted],
            [self._classes[number] for number in self._labels],
            LabelCounts.of_classes(predicted, self._labels, self._classes),
            named_probabilities(observed[:, 2:], self._classes),
        )


class SeveralLabelsScoring:
    """Predicts every class with a probability above one half; labels are (N, C), 1 where present."""

    def __init__(self, labels: npt.NDArray[np.int64], classes: Sequence[str]) -> None:
        self._labels, self._classes, self.units = labels, classes, len(labels)

    def observe(self, logits: Tensor, batch: Batch) -> Tensor:
        return logits.float().sigmoid()

    def score(self, observed: Observed, carried: Carried | None = None) -> dict[str, float]:
        predicted, labels = observed > 0.5, self._labels == 1
        return {
            **decisions(predicted, labels),
            "matthews": matthews(predicted.ravel().astype(np.int64), labels.ravel().astype(np.int64), 2),
            "calibration_error": calibration_error(
                np.where(predicted, observed, 1.0 - observed).ravel(), (predicted == labels).ravel()
            ),
        }

    def judge(self, observed: Observed, carried: Carried) -> Judged:
        """A text is right when all of its labels are."""
        predicted, labels = observed > 0.5, self._labels == 1
        return Judged(
            np.arange(len(predicted)),
            (predicted == labels).all(1).astype(np.float64),
            [self._names(row) for row in predicted],
            [self._names(row) for row in labels],
            LabelCounts(
                list(self._classes),
                true=labels.sum(0).tolist(),
                predicted=predicted.sum(0).tolist(),
                hits=(predicted & labels).sum(0).tolist(),
            ),
            [
                dict(zip(self._classes, row, strict=True))
                for row in observed.astype(np.float64).round(6).tolist()
            ],
        )

    def _names(self, row: npt.NDArray[np.bool_]) -> list[str]:
        return [self._classes[number] for number in np.flatnonzero(row).tolist()]


@dataclass(frozen=True, slots=True)
class Labelled:
    texts: tuple[str, ...]
    stratum: int
    labels: tuple[str, ...]  # Names of its classes; exactly one unless `multi_label` is set


class Classification(DatasetTask[Labelled, ClassHead]):
    """A class, or any number, of a text or a pair; a preset is a subclass with its own `fields`."""

    def fields(self, task: TaskConfig) -> LabelFields:
        return task.own(LabelFields)

    def settings(self, task: TaskConfig) -> Facts:
        own = self.fields(task)
        return {"multi_label": own.multi_label, "labels": json.dumps(own.labels)}

    def example(self, row: Row, task: TaskConfig) -> Labelled | None:
        texts = contents(row, task)
        written = _several(row) if self.fields(task).multi_label else [row.label("label")]
        labels = tuple(dict.fromkeys(self.named(one, row, task) for one in written))
        return Labelled(texts, self.stratum(labels), labels)

    def named(self, written: str | int, row: Row, task: TaskConfig) -> str:
        """Returns the name of a class: as it is listed, by its position in the list, or as written."""
        name, labels = str(written).strip(), self.fields(task).labels
        if not name:
            raise row.refusal("label", "empty; remove the row or fill it")
        if labels is None or name in labels:
            return name
        if name.isascii() and name.isdigit() and int(name) < len(labels):
            return labels[int(name)]
        listed = ", ".join(labels[:_SHOWN]) + ", ..." * (len(labels) > _SHOWN)
        raise row.refusal(
            "label",
            f"unknown label {name[:80]!r}; use one of {listed}, or a position from 0 to {len(labels) - 1}",
        )

    def divide(self, parts: Mapping[str, list[Labelled]], task: TaskConfig) -> dict[str, list[Labelled]]:
        firsts = {examples[0].labels for examples in parts.values()}
        if len(firsts) == 1 and (len(parts) > 1 or task.headerless):
            (first,) = firsts
            once = all(sum(one.labels == first for one in examples) == 1 for examples in parts.values())
            if once and all(len(examples) > 2 for examples in parts.values()):
                raise BadDataError(
                    f"label {', '.join(first)!r} occurs once in each part, in its first row, as a header "
                    "does; remove that line, or name the columns in task.columns"
                )
        return super().divide(parts, task)

    def stratum(self, labels: Sequence[str]) -> int:
        return zlib.crc32("\n".join(sorted(labels)).encode())

    def draw(self, parts: Parts[Labelled], task: TaskConfig) -> dict[str, list[Labelled]]:
        known = {label for one in parts[TRAIN] for label in one.labels}
        require_alike(parts)
        for part, examples in parts.items():
            labels = (label for one in examples for label in one.labels)
            require_known(part, labels, known, "remove its rows")
        return super().draw(parts, task)

    def stand_in(self, row: Row, head: ClassHead, task: TaskConfig) -> Mapping[str, Any] | None:
        if not head.multi_label:
            return super().stand_in(row, head, task)
        return {"label": []} if row.fields.get("label") is None else None  # Blank = it has none.

    def any_truth(self, head: ClassHead, task: TaskConfig) -> str:
        return head.classes[0]

    def head(self, parts: Parts[Labelled], chosen: Parts[Labelled], task: TaskConfig) -> ClassHead:
        known = {label for one in parts[TRAIN] for label in one.labels}
        own = self.fields(task)
        return ClassHead(own.labels or tuple(sorted(known, key=_in_order)), own.multi_label)

    def review(self, parts: Parts[Labelled], head: ClassHead, task: TaskConfig) -> Iterator[str]:
        def answer(one: Labelled) -> str:
            return f"label {', '.join(one.labels)}" if one.labels else "no label"

        yield from same_answer(parts, answer, "add examples of other labels")
        learned = {label for one in parts[TRAIN] for label in one.labels}
        absent = [name for name in head.classes if name not in learned]
        if absent:
            yield f"train: no example has label {', '.join(absent[:_SHOWN])}{' ...' * (len(absent) > _SHOWN)}"
        for name in () if head.multi_label else head.classes:
            if len(pieces := split_labels(name)) > 1 and not learned.isdisjoint(pieces):
                yield f"train: {name!r} is one class; if it is several labels, set task.multi_label: true"
                break

    def tokenise(self, examples: Sequence[Labelled], head: ClassHead, by: Tokenising) -> TokenSet:
        """Labels are (N,), the class or `UNSEEN`; or (N, C), 1 where a text has the label."""
        numbers = {name: number for number, name in enumerate(head.classes)}
        if head.multi_label:
            labels = np.zeros((len(examples), len(numbers)), dtype=np.int64)
            for row, one in enumerate(examples):
                labels[row, [numbers[label] for label in one.labels]] = 1
        else:
            labels = np.array([self.number(one.labels[0], numbers) for one in examples], dtype=np.int64)
        return by.texts(examples, labels)

    def number(self, label: str, numbers: Mapping[str, int]) -> int:
        return numbers[label]

    def weighted(self, part: str, tokens: TokenSet, head: ClassHead, task: TaskConfig) -> TokenSet:
        factors = self.fields(task).class_weights
        if factors is None or part != TRAIN:
            return tokens
        if isinstance(factors, dict):
            unknown = next((label for label in factors if label not in head.classes), None)
            if unknown is not None:
                raise BadSpecError(
                    f"task.class_weights weighs {unknown!r}, which is not a label of the training part; "
                    f"use {', '.join(head.classes[:_SHOWN])}{', ...' * (len(head.classes) > _SHOWN)}"
                )
            weights = np.array([factors.get(name, 1.0) for name in head.classes])
        else:
            weights = balanced(tokens.labels, len(head.classes))
        return tokens.weighted(by_label(tokens.labels, weights))

    def scoring(self, tokens: TokenSet, head: ClassHead, task: TaskConfig, gold: Path) -> Scoring:
        if head.multi_label:
            return SeveralLabelsScoring(tokens.labels, head.classes)
        return ClassScoring(tokens.labels, head.classes, self.info.scores)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns the cross-entropy, summed over the batch; of several labels, their mean for each text."""
        if batch.labels.dim() == 1:
            return class_loss(logits, batch, operator=self.cross_entropy)
        each = self.of_labels(logits, batch.labels.clamp(min=0).float())  # IGNORED is not a target.
        each = each if batch.weights is None else each * batch.weights
        return each.masked_fill(batch.labels == IGNORED, 0.0).sum() / logits.shape[1]


class Imdb(Classification):
    _CLASSES = ("negative", "positive")
    spellings = MappingProxyType({"neg": 0, "pos": 1, "negative": 0, "positive": 1, "0": 0, "1": 1})

    def fields(self, task: TaskConfig) -> LabelFields:
        return LabelFields(labels=self._CLASSES)

    def settings(self, task: TaskConfig) -> Facts:
        return {}

    def named(self, written: str | int, row: Row, task: TaskConfig) -> str:
        number = self.spellings.get(str(written).strip().lower())
        if number is None:
            raise row.refusal("label", f"unknown label {written!r}; use one of {', '.join(self.spellings)}")
        return self._CLASSES[number]

    def stratum(self, labels: Sequence[str]) -> int:
        return self._CLASSES.index(labels[0])


def balanced(labels: npt.NDArray[np.int64], classes: int) -> npt.NDArray[np.float64]:
    """Returns a weight for each class, inverse to its frequency.

    Of one label per text (N,) it is `N / (C N_c)` over classes that occur (as in scikit-learn), so that the
    mean weight of an example is 1; of several (N, C), a label's absences over its presences.
    """
    if labels.ndim == 2:
        present = labels.sum(0)
        return np.where(present > 0, (len(labels) - present) / np.maximum(present, 1), 1.0)
    counts = np.bincount(labels, minlength=classes)
    return np.where(counts > 0, len(labels) / (np.count_nonzero(counts) * np.maximum(counts, 1)), 1.0)


def by_label(labels: npt.NDArray[np.int64], weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Returns the weight of each label; 1 for a label of several, (N, C), that is absent."""
    factors = weights[labels] if labels.ndim == 1 else np.where(labels == 1, weights, 1.0)
    return factors.astype(np.float32)


def _several(row: Row) -> list[str | int]:
    value = row.fields.get("label")
    if isinstance(value, str):
        return [*split_labels(value)]
    if not isinstance(value, list) or not all(isinstance(one, str | int) for one in value):
        raise row.refusal(
            "label", f"{str(value)[:80]!r} is not a list of labels; write a list, or a text with commas"
        )
    return value


def _in_order(name: str) -> tuple[bool, int, str]:
    number = name.isascii() and name.isdigit() and len(name) < 10
    return not number, int(name) if number else 0, name
