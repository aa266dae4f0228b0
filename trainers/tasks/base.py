"""What a task is: data, head, loss and metrics.

The modules of tasks import torch in the functions that compute with it: the service reads and checks rows
with a task's own rules, and has no torch loaded.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from trainers import config as configuration
from trainers.config import RunConfig
from trainers.data.rows import Row
from trainers.data.sources import RowSource
from trainers.data.tokens import TokenSet
from trainers.models.heads import Head
from trainers.models.origin import Origin
from trainers.predictions import LabelCounts
from trainers.tasks import TASKS
from trainers.tasks.info import TaskInfo

if TYPE_CHECKING:
    import torch

    from trainers.data.batches import Batch, Transform


class Scoring(Protocol):
    """How a part is scored: what is kept of each example, and the metrics of all."""

    @property
    def units(self) -> int:
        """What the headline is a mean over: examples, or questions that several examples belong to."""
        ...

    def observe(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """(B, K) fp32: what `score` needs of each example of a batch, on any device.

        Args:
            logits: Logits of the model's head.
            batch: Batch that they belong to.
        """
        ...

    def score(
        self, observed: npt.NDArray[np.float32], carried: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Metrics over the whole part; names are listed in `docs/metrics.md`.

        Args:
            observed: (N, K) in the order of the part.
            carried: scores of the validation part, whose thresholds are applied; None = the best
                thresholds on this part are found.
        """
        ...

    def judge(self, observed: npt.NDArray[np.float32], carried: Mapping[str, float]) -> Judged:
        """Returns the same by unit, whose mean score is the headline.

        Args:
            observed: (N, K) in the order of the part.
            carried: scores of the validation part.
        """
        ...


@dataclass(frozen=True, slots=True)
class Judged:
    """What the model made of each unit of a part.

    Attributes:
        numbers: (U,) of the units, in the order in which the part names them.
        scores: (U,) each unit's share of the headline.
        predictions, truths: U JSON-able values.
        labels: Counts by label; None where the task has no labels.
    """

    numbers: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    predictions: Sequence[Any]
    truths: Sequence[Any]
    labels: LabelCounts | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task's data, ready to train on.

    Attributes:
        train, validation: tokenised examples.
        test: the same of the part that is scored once, at the end; None = there is none.
        tokenizer: file of the tokenizer that made them.
        vocabulary_size: its largest token id, and one.
        pad_id: its token id of padding.
        identity: Facts of the data by name: hashes, sizes, limits. A resumed run must find
            the same.
        head: Head of the model.
        scoring: Scoring of the validation part.
        transform: applied to each batch; None = nothing.
        test_scoring: Scoring of the test part.
        test_units: file with the names of the test part's units, a JSON list.
    """

    train: TokenSet
    validation: TokenSet
    tokenizer: Path
    vocabulary_size: int
    pad_id: int
    identity: Mapping[str, str | int | float]
    head: Head
    scoring: Scoring
    transform: Transform | None = None
    test: TokenSet | None = None
    test_scoring: Scoring | None = None
    test_units: Path | None = None


class Task(ABC):
    """What is learned. Stateless: one instance serves any number of runs.

    Args:
        info: Description of the task that needs no loading.
    """

    spellings: ClassVar[Mapping[str, int]] = MappingProxyType({})
    """Class of each label as files write it, in lower case; empty where classes have one name each."""

    def __init__(self, info: TaskInfo) -> None:
        self.info = info

    @abstractmethod
    def prepare(self, config: RunConfig, origin: Origin, report: Callable[[str], None]) -> Prepared:
        """Reads, splits and tokenises the data, or finds it in the cache.

        Args:
            config: the run.
            origin: Origin of the model, which may bring its own tokenizer.
            report: told about long work, in one line each.

        Raises:
            BadDataError: naming file, line and field.
        """

    @abstractmethod
    def check_row(self, row: Row, task: configuration.Task) -> None:
        """Refuses a row that a run would refuse.

        Args:
            row: under the task's own names of columns.
            task: Task of the run.

        Raises:
            BadDataError: naming file, line and field.
        """

    @abstractmethod
    def texts_of(self, row: Row, task: configuration.Task) -> Sequence[str]:
        """Returns the texts of a row that become tokens; none where a run leaves the row out.

        Args:
            row, task: See `check_row`.

        Raises:
            BadDataError: naming file, line and field.
        """

    @abstractmethod
    def check_parts(self, source: RowSource, task: configuration.Task) -> None:
        """Refuses parts that a run would refuse before it tokenises them.

        Args:
            source: All rows of all parts, each of which passes `check_row`.
            task: Task of the run.

        Raises:
            BadDataError: a part is empty, has nothing to learn, or a label that the training part lacks.
        """

    @abstractmethod
    def loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Sums (not mean) of the loss over the batch's examples, a scalar in fp32.

        On a GPU nothing in it may need the host to wait, such as a shape that depends on the data.
        """


def task_class(info: TaskInfo) -> type[Task]:
    """Imports the class that implements a task."""
    module, _, name = info.implementation.partition(":")
    loaded: type[Task] = getattr(importlib.import_module(module), name)
    return loaded


def build(name: str) -> Task:
    """Returns the task of that name, ready to prepare data."""
    info = TASKS[name]
    return task_class(info)(info)
