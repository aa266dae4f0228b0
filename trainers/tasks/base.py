"""What a task is: data, head, loss and metrics.

Import torch inside the functions that compute with it: the service checks rows by a task's rules without
torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from trainers.checkpoints.predictions import LabelCounts, Prediction, source_of
from trainers.config import RunConfig, TaskConfig
from trainers.data.formats import Row
from trainers.data.sources import Source
from trainers.data.tokens import TokenSet
from trainers.model_kinds.heads import Head
from trainers.models.origin import Origin
from trainers.registry import imported
from trainers.tasks import TASKS
from trainers.tasks.info import LossFields, OwnFields, TaskInfo
from trainers.tasks.losses import CROSS_ENTROPY, LossInfo
from trainers.tasks.scores import Batch, CrossEntropy, Tensor, Transform


class TaskExample(Protocol):
    """A row as a task reads it."""

    @property
    def texts(self) -> tuple[str, ...]:
        """What becomes tokens, and what a vocabulary is trained on."""

    @property
    def stratum(self) -> int:
        """What subsets and held-out parts are balanced by, such as the class."""


E = TypeVar("E", bound=TaskExample)
H = TypeVar("H", bound=Head)
Parts = Mapping[str, Sequence[E]]
Facts = Mapping[str, str | int | float]
Progress = Callable[[int], None]  # Called with the number of examples done so far
Observed = npt.NDArray[np.float32]
"""(N, K) what `Scoring.observe` gave for all batches of a part, in its order."""
Carried = Mapping[str, float]  # Scores of the validation part, whose thresholds the test part uses


@dataclass(frozen=True, slots=True)
class Judged:
    """Predictions and scores of each unit of a part."""

    numbers: npt.NDArray[np.int64]  # (U,) numbers of the units in the order in which the part names them
    scores: npt.NDArray[np.float64]  # (U,) each unit's share of the headline
    predictions: Sequence[Any]  # U JSON-able values
    truths: Sequence[Any]
    labels: LabelCounts | None = None  # Counts by label; None where the task has no labels
    probabilities: Sequence[Any] | None = None  # U JSON-able values; None where the task decides without

    def rows(self, names: Sequence[str], places: Sequence[Sequence[str]] | None) -> list[Prediction]:
        """Returns the results by unit, with names and with the places of their rows, both of all units."""
        return [
            Prediction(
                names[number],
                float(self.scores[i]),
                self.predictions[i],
                self.truths[i],
                None if self.probabilities is None else self.probabilities[i],
                [] if places is None else [source_of(place) for place in places[number]],
            )
            for i, number in enumerate(self.numbers.tolist())
        ]


class Scoring(Protocol):
    @property
    def units(self) -> int:
        """What the headline is a mean over: examples, or questions that several examples belong to."""

    def observe(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns (B, K) fp32, what `score` needs of each example of a batch, on any device."""

    def score(self, observed: Observed, carried: Carried | None = None) -> dict[str, float]:
        """Returns metrics by the names in `docs/metrics.md`; without `carried`, at the best thresholds."""

    def judge(self, observed: Observed, carried: Carried) -> Judged:
        """Returns the result of each unit, whose mean score is the headline; arguments as in `score`."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task's data, ready to train on."""

    train: TokenSet
    validation: TokenSet
    tokenizer: Path
    vocabulary_size: int  # Largest token id plus one
    pad_id: int
    identity: Facts  # Hashes, sizes and limits; a resumed run must find the same
    head: Head
    scoring: Scoring
    transform: Transform | None = None  # Applied to each batch; None = nothing
    test: TokenSet | None = None  # The part that is scored once, at the end; None = there is none
    test_scoring: Scoring | None = None
    test_units: Path | None = None  # JSON list with the names of the test part's units


class Task(ABC):
    """What is learned. Stateless: one instance serves any number of runs."""

    spellings: ClassVar[Mapping[str, int]] = {}
    """Class of each label as files write it, in lower case; empty where classes have one name each."""

    def __init__(
        self,
        info: TaskInfo,
        cross_entropy: CrossEntropy | None = None,
        loss: LossInfo = CROSS_ENTROPY,
        option: float = 0.0,
    ) -> None:
        """`cross_entropy` is the encoder's own, used where the loss has no other."""
        self.info, self.cross_entropy = info, cross_entropy
        if (of_classes := loss.of_classes) is not None:
            self.cross_entropy = lambda logits, labels, ignored: of_classes(logits, labels, option)
        self.of_labels: Callable[[Tensor, Tensor], Tensor] = lambda logits, targets: loss.of_labels(
            logits, targets, option
        )

    @abstractmethod
    def prepare(self, config: RunConfig, origin: Origin, report: Callable[[str], None]) -> Prepared:
        """Reads, splits and tokenises the data, or finds it in the cache; `report` receives lines."""

    @abstractmethod
    def texts_of(self, row: Row, task: TaskConfig) -> Sequence[str]:
        """Returns the texts of a row that become tokens; none where a run leaves the row out.

        Raises `BadDataError` for a row that a run would refuse; its fields have the task's own names.
        """

    @abstractmethod
    def check_parts(self, source: Source[object], task: TaskConfig) -> None:
        """Raises `BadDataError` for parts that are empty, teach nothing, or have a label not in training."""

    @abstractmethod
    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns the loss summed (not averaged) over the batch's examples, a scalar in fp32.

        On a GPU the host may not wait in it, as it would for a shape that depends on the data.
        """


def build(name: str, cross_entropy: CrossEntropy | None = None, *loss: Any) -> Task:
    info = TASKS[name]
    task: Task = imported(info.implementation)(info, cross_entropy, *loss)
    return task


def trained_as(config: TaskConfig, cross_entropy: CrossEntropy | None = None) -> Task:
    """Returns the task with the loss that training minimises, which is not what it is evaluated by."""
    own = config.own(OwnFields)
    chosen = (own.loss_info, own.loss_option) if isinstance(own, LossFields) else ()
    return build(config.name, cross_entropy, *chosen)
