"""What a task is: data, head, loss and metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from trainers.config import RunConfig
from trainers.data.batches import Batch
from trainers.data.tokens import TokenSet
from trainers.models.origin import Origin


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task's data, ready to train on.

    Attributes:
        train, validation: tokenised examples.
        tokenizer: file of the tokenizer that made them.
        vocabulary_size: its pieces.
        pad_id: its token id of padding.
        identity: what the data is, by name: hashes, sizes, limits. A resumed run must find
            the same.
    """

    train: TokenSet
    validation: TokenSet
    tokenizer: Path
    vocabulary_size: int
    pad_id: int
    identity: Mapping[str, str | int | float]


class Task(ABC):
    """What is learned. Stateless: one instance serves any number of runs."""

    classes: ClassVar[tuple[str, ...]]
    """Names of the classes, by number."""
    headline: ClassVar[str]
    """The metric by which checkpoints are compared; higher is better."""

    @abstractmethod
    def prepare(self, config: RunConfig, origin: Origin, report: Callable[[str], None]) -> Prepared:
        """Read, split and tokenise the data, or find it in the cache.

        Args:
            config: the run.
            origin: of the model, which may bring its own tokenizer.
            report: told about long work, in one line each.

        Raises:
            BadDataError: naming file, line and field.
        """

    @abstractmethod
    def loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Sum (not mean) of the loss over the batch's examples, a scalar in fp32."""

    @abstractmethod
    def score(self, logits: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> dict[str, float]:
        """Metrics over the whole validation part.

        Args:
            logits: (N, C).
            labels: (N,).
        """
