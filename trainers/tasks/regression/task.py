from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer
from typing_extensions import override

from trainers import config as configuration
from trainers.data.parts import TRAIN
from trainers.data.rows import Row
from trainers.data.tokens import TokenSet, tokenise
from trainers.model_kinds.heads import Head, NumberHead
from trainers.tasks.base import Scoring
from trainers.tasks.dataset import DatasetTask, contents, require_alike, same_answer
from trainers.tasks.regression import NumberFields
from trainers.tasks.regression.scoring import NumberScoring

if TYPE_CHECKING:
    import torch

    from trainers.data.batches import Batch

_STATISTICS = "labels.json"


@dataclass(frozen=True, slots=True)
class Scored:
    content: tuple[str, ...]
    number: float


class Regression(DatasetTask[Scored]):
    """The number of a text or a pair of texts, by least squares."""

    def settings(self, task: configuration.Task) -> dict[str, str | int | float]:
        return {"label_range": json.dumps(task.own(NumberFields).label_range)}

    @override
    def example(self, row: Row, task: configuration.Task) -> Scored:
        number = row.number("label")
        allowed = task.own(NumberFields).label_range
        if allowed is not None and not allowed[0] <= number <= allowed[1]:
            raise row.refusal(
                "label", f"{number:g} is outside task.label_range [{allowed[0]:g}, {allowed[1]:g}]"
            )
        return Scored(contents(row, task), number)

    def stratum(self, example: Scored) -> int:
        """Returns 0: the distribution of numbers is not evened out."""
        return 0

    def texts(self, example: Scored) -> Iterable[str]:
        return example.content

    @override
    def draw(
        self, parts: Mapping[str, Sequence[Scored]], task: configuration.Task
    ) -> dict[str, list[Scored]]:
        require_alike({part: [len(one.content) for one in examples] for part, examples in parts.items()})
        return super().draw(parts, task)

    @override
    def review(self, parts: Mapping[str, Sequence[Scored]], task: configuration.Task) -> Iterator[str]:
        return same_answer(parts, lambda one: f"label {one.number:g}", "add examples with other numbers")

    @override
    def tokenise(
        self,
        examples: Sequence[Scored],
        tokenizer: Tokenizer,
        task: configuration.Task,
        told: Callable[[int], None],
    ) -> TokenSet:
        labels = np.array([one.number for one in examples], dtype=np.float32)
        pairs = len(examples[0].content) > 1
        texts: Any = [one.content if pairs else one.content[0] for one in examples]
        return tokenise(texts, labels, tokenizer, task.max_length, told)

    def describe(self, folder: Path, parts: Mapping[str, Sequence[Scored]], task: configuration.Task) -> None:
        numbers = np.array([one.number for one in parts[TRAIN]])
        found = {"mean": float(numbers.mean()), "deviation": float(numbers.std())}
        (folder / _STATISTICS).write_text(json.dumps(found), encoding="utf-8")

    @override
    def head(self, folder: Path) -> NumberHead:
        found = json.loads((folder / _STATISTICS).read_text(encoding="utf-8"))
        return NumberHead(found["mean"], 2.0 ** round(math.log2(found["deviation"])))

    @override
    def weighted(self, part: str, tokens: TokenSet, head: Head, task: configuration.Task) -> TokenSet:
        """Returns the part with the factor of squared errors that makes them likelihoods."""
        assert isinstance(head, NumberHead)
        return tokens.weighted(np.full(len(tokens), 0.5 / head.scale**2, dtype=np.float32))

    @override
    def scoring(self, folder: Path, part: str, tokens: TokenSet, task: configuration.Task) -> Scoring:
        return NumberScoring(tokens.labels, task.own(NumberFields).label_range)

    def loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns half the squared error in units of the head's scale, summed over the batch.

        That is the negative log-likelihood of a normal distribution of that width, up to a constant.
        """
        assert batch.weights is not None
        return ((logits[:, 0].float() - batch.labels).square() * batch.weights).sum()
