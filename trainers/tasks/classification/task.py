"""Labelled texts as a classification."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from typing_extensions import override

from trainers import config as configuration
from trainers.data.batches import Batch
from trainers.data.parts import TRAIN
from trainers.data.rows import Row
from trainers.data.tokens import TokenSet, tokenise
from trainers.errors import BadDataError
from trainers.models.heads import ClassHead, Head
from trainers.tasks.base import Scoring
from trainers.tasks.classification import LabelFields
from trainers.tasks.classification.scoring import OneLabelScoring, SeveralLabelsScoring
from trainers.tasks.dataset import DatasetTask, same_answer
from trainers.tasks.losses import class_loss

_CLASSES = "classes.json"
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Labelled:
    """A text, or a pair of texts, with its labels.

    Attributes:
        content: one text or two.
        labels: names of its classes; exactly one unless `multi_label` is set.
        classes: names of all classes, by number; empty until all parts have been read.
    """

    content: tuple[str, ...]
    labels: tuple[str, ...]
    classes: tuple[str, ...] = ()


class Classification(DatasetTask[Labelled]):
    """One class, or any number of classes, of a text or a pair of texts."""

    def settings(self, task: configuration.Task) -> dict[str, str | int | float]:
        """Returns what the labels are."""
        own = task.own(LabelFields)
        return {"multi_label": own.multi_label, "labels": json.dumps(own.labels)}

    @override
    def example(self, row: Row, task: configuration.Task) -> Labelled:
        """Returns the example of a row with fields `text`, perhaps `text_pair`, and `label`."""
        own = task.own(LabelFields)
        pair = "text_pair" in task.columns or row.fields.get("text_pair") is not None
        content = (row.text("text"), row.text("text_pair")) if pair else (row.text("text"),)
        written = _several(row) if own.multi_label else [row.label("label")]
        return Labelled(content, tuple(dict.fromkeys(_name(one, row, own.labels) for one in written)))

    def stratum(self, example: Labelled) -> int:
        """Returns a number of its set of labels."""
        return zlib.crc32("\n".join(sorted(example.labels)).encode())

    def texts(self, example: Labelled) -> Iterable[str]:
        """Returns its texts."""
        return example.content

    @override
    def draw(
        self, parts: Mapping[str, Sequence[Labelled]], task: configuration.Task
    ) -> dict[str, list[Labelled]]:
        """Draws examples, with the classes of the whole training part.

        Raises:
            BadDataError: a label that the training part lacks, or pairs next to single texts.
        """
        known = {label for one in parts[TRAIN] for label in one.labels}
        pairs = len(parts[TRAIN][0].content) > 1
        for part, examples in parts.items():
            lost = sorted({label for one in examples for label in one.labels} - known)
            if lost:
                others = f" (nor are {len(lost) - 1} others)" if lost[1:] else ""
                raise BadDataError(
                    f"{part}: label {lost[0]!r} is not in the training part{others}, so it cannot be "
                    "learned; add training examples of it, or remove its rows"
                )
            if any((len(one.content) > 1) != pairs for one in examples):
                raise BadDataError(
                    f"{part}: some rows have a text_pair and others have none; give every row both texts, or "
                    "remove the column"
                )
        classes = task.own(LabelFields).labels or tuple(sorted(known, key=_in_order))
        return {
            part: [replace(one, classes=classes) for one in chosen]
            for part, chosen in super().draw(parts, task).items()
        }

    @override
    def review(self, parts: Mapping[str, Sequence[Labelled]], task: configuration.Task) -> Iterator[str]:
        def answer(one: Labelled) -> str:
            return f"label {', '.join(one.labels)}" if one.labels else "no label"

        yield from same_answer(parts, answer, "add examples of other labels")
        learned = {label for one in parts[TRAIN] for label in one.labels}
        absent = [name for name in parts[TRAIN][0].classes if name not in learned]
        if absent:
            yield f"train: no example has label {', '.join(absent[:_SHOWN])}{' ...' * (len(absent) > _SHOWN)}"

    @override
    def tokenise(
        self,
        examples: Sequence[Labelled],
        tokenizer: Tokenizer,
        task: configuration.Task,
        told: Callable[[int], None],
    ) -> TokenSet:
        """Returns labels (N,), the class; or (N, C), 1 where a text has the label."""
        numbers = {name: number for number, name in enumerate(examples[0].classes)}
        if task.own(LabelFields).multi_label:
            labels = np.zeros((len(examples), len(numbers)), dtype=np.int64)
            for row, one in enumerate(examples):
                labels[row, [numbers[label] for label in one.labels]] = 1
        else:
            labels = np.array([numbers[one.labels[0]] for one in examples], dtype=np.int64)
        pairs = len(examples[0].content) > 1
        texts: Any = [one.content if pairs else one.content[0] for one in examples]
        return tokenise(texts, labels, tokenizer, task.max_length, told)

    def describe(
        self, folder: Path, parts: Mapping[str, Sequence[Labelled]], task: configuration.Task
    ) -> None:
        """Writes the names of the classes, by number, and whether a text has several."""
        described = {"classes": parts[TRAIN][0].classes, "multi_label": task.own(LabelFields).multi_label}
        (folder / _CLASSES).write_text(json.dumps(described), encoding="utf-8")

    @override
    def head(self, folder: Path) -> Head:
        return _head_in(folder)

    @override
    def scoring(self, folder: Path, part: str, tokens: TokenSet, task: configuration.Task) -> Scoring:
        head = _head_in(folder)
        scoring = SeveralLabelsScoring if head.multi_label else OneLabelScoring
        return scoring(tokens.labels, head.classes)

    def loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the cross-entropy, summed over the batch; of several labels, their mean for each text."""
        if batch.labels.dim() == 1:
            return class_loss(logits, batch)
        wanted = batch.labels.to(torch.float32)
        total = functional.binary_cross_entropy_with_logits(logits.float(), wanted, reduction="sum")
        return total / logits.shape[1]


def _several(row: Row) -> list[str | int]:
    """Returns the labels of a row: a list, or a text with commas; an empty one has none."""
    value = row.fields.get("label")
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(one, str | int) for one in value):
        raise row.refusal(
            "label", f"{str(value)[:80]!r} is not a list of labels; write a list, or a text with commas"
        )
    return value


def _name(written: str | int, row: Row, labels: Sequence[str] | None) -> str:
    """Returns the name of a class: as it is listed, by its position in the list, or as written."""
    name = str(written).strip()
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


def _in_order(name: str) -> tuple[bool, int, str]:
    """Numbers come first, by their value."""
    number = name.isascii() and name.isdigit() and len(name) < 10
    return not number, int(name) if number else 0, name


def _head_in(folder: Path) -> ClassHead:
    described = json.loads((folder / _CLASSES).read_text(encoding="utf-8"))
    return ClassHead(tuple(described["classes"]), described["multi_label"])
