"""Tasks that give a text one of a few classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from typing_extensions import override

from trainers import config as configuration
from trainers.data.batches import Batch
from trainers.data.rows import Row
from trainers.data.tokens import TokenSet, tokenise
from trainers.models.heads import ClassHead, Head
from trainers.tasks.base import Judged, Scoring
from trainers.tasks.dataset import DatasetTask, same_answer
from trainers.tasks.losses import class_loss
from trainers.tasks.scores import classification

Labelled = tuple[str, int]
"""A text and its class."""


class TextClassification(DatasetTask[Labelled]):
    """Text in, class out. A task of this kind declares its classes and their spellings."""

    classes: ClassVar[tuple[str, ...]]
    """Names of the classes, by number."""

    @override
    def example(self, row: Row, task: configuration.Task) -> Labelled:
        """Returns the example of a row with fields `text` and `label`."""
        text = row.text("text")
        label = row.label("label")
        number = self.spellings.get(str(label).strip().lower())
        if number is None:
            raise row.refusal("label", f"unknown label {label!r}; use one of {', '.join(self.spellings)}")
        return text, number

    def stratum(self, example: Labelled) -> int:
        """Returns the class."""
        return example[1]

    def texts(self, example: Labelled) -> Iterable[str]:
        """Returns the text."""
        return (example[0],)

    @override
    def review(self, parts: Mapping[str, Sequence[Labelled]], task: configuration.Task) -> Iterable[str]:
        return same_answer(parts, lambda one: f"label {self.classes[one[1]]}", "add examples of other labels")

    @override
    def tokenise(
        self,
        examples: Sequence[Labelled],
        tokenizer: Tokenizer,
        task: configuration.Task,
        told: Callable[[int], None],
    ) -> TokenSet:
        """Returns tokens with classes (N,) as labels."""
        labels = np.array([label for _, label in examples], dtype=np.int64)
        return tokenise([text for text, _ in examples], labels, tokenizer, task.max_length, told)

    @override
    def head(self, folder: Path) -> Head:
        return ClassHead(self.classes)

    @override
    def scoring(self, folder: Path, part: str, tokens: TokenSet, task: configuration.Task) -> Scoring:
        return ClassScoring(tokens.labels, self.classes)

    def loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the cross-entropy, summed over the batch."""
        return class_loss(logits, batch)


class ClassScoring:
    """Accuracy and macro precision, recall and F1 of the likeliest class.

    Args:
        labels: (N,) true classes.
        classes: their names, by number.
    """

    def __init__(self, labels: npt.NDArray[np.int64], classes: Sequence[str]) -> None:
        self._labels, self._classes = labels, classes

    @property
    def units(self) -> int:
        """Texts."""
        return len(self._labels)

    def observe(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the logits."""
        return logits

    def score(
        self, observed: npt.NDArray[np.float32], carried: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Returns the metrics; nothing is carried over."""
        return classification(observed.argmax(1), self._labels, len(self._classes))

    def judge(self, observed: npt.NDArray[np.float32], carried: Mapping[str, float]) -> Judged:
        """Returns the names of the classes."""
        predicted = observed.argmax(1)
        return Judged(
            np.arange(len(predicted)),
            (predicted == self._labels).astype(np.float64),
            [self._classes[number] for number in predicted],
            [self._classes[number] for number in self._labels],
        )
