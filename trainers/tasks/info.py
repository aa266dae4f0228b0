"""What is known of a task before it is loaded. Imports no torch."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainers.data.formats import Reader
from trainers.data.layouts import Layout
from trainers.data.sample import Guess, Sample
from trainers.model_kinds.heads import Head
from trainers.registry import NameIn, described
from trainers.reporting import Figure
from trainers.tasks.losses import CROSS_ENTROPY, LOSSES, LossInfo

NO_LOSS = 0.005
"""Difference in a score (half a point) that counts as no loss unless a question says otherwise."""
Decisions = Sequence[tuple[float, bool]]  # Confidence, and whether it is right
Label = Annotated[str, Field(min_length=1, max_length=200)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score(Figure):
    margin: float | None = None  # Difference that counts as none unless a question sets another
    drawn: bool = False  # Whether a report draws it over steps
    tuned: bool = False  # A threshold that is chosen on the validation part and applied to the test part


VALIDATION_LOSS = Score("nat", better="lower", drawn=True)
"""Every task reports it, under the name `validation_loss`."""
FRACTION = Score("1", better="higher", share="all")
"""A mean over all evaluated units of what is between 0 and 1."""
MAIN_FRACTION = Score("1", better="higher", share="all", margin=NO_LOSS, drawn=True)
"""A fraction by which configurations are compared."""
CLASS_SCORES: Mapping[str, Score] = {
    "accuracy": MAIN_FRACTION,
    "f1": MAIN_FRACTION,
    "precision_macro": FRACTION,
    "recall_macro": FRACTION,
}
"""What `trainers.tasks.scores.classification` computes."""


class OwnFields(BaseModel):
    """Fields of the spec's section `task` that a task has and others lack, with their defaults.

    Each is followed by its description. Tasks that share a field inherit it from a common class.
    """

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    def check(self, max_length: int) -> None:
        """Raises `ValueError` for values that contradict each other or `task.max_length`, with the fix."""


class CutFields(OwnFields):
    too_long: Literal["cut", "error"] = "cut"
    """What a text of more tokens is, cut or an error."""


class LossFields(CutFields):
    """Fields of tasks with classes, of texts or of tokens."""

    loss: Annotated[str, NameIn(LOSSES), described(LOSSES)] = CROSS_ENTROPY.name
    """What training minimises; validation and test loss are cross-entropies whatever it is."""
    label_smoothing: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Of loss label_smoothing, the share of a label that is spread over all classes, 0.1 unless set."""
    focal_gamma: float | None = Field(default=None, gt=0.0, le=10.0)
    """Of loss focal, the power of an example's error that its loss is multiplied by, 2 unless set."""

    def check(self, max_length: int) -> None:
        for info in LOSSES.values():
            if info.option and info.name != self.loss and getattr(self, info.option) is not None:
                raise ValueError(
                    f"{info.option} belongs to loss {info.name}, not {self.loss}; remove task.{info.option} "
                    f"or set task.loss: {info.name}"
                )

    @property
    def loss_info(self) -> LossInfo:
        return LOSSES[self.loss]

    @property
    def loss_option(self) -> float:
        """The value of the loss's own field; 0 where it has none."""
        chosen: float | None = getattr(self, self.loss_info.option, None)
        return self.loss_info.usual if chosen is None else chosen


class ListedFields(LossFields):
    """Fields of tasks whose labels are those of the data, or a list."""

    labels: tuple[Label, ...] | None = Field(default=None, min_length=2, max_length=10_000)
    """Names of the classes or tags in their order, so that numbers in the data mean positions in it; unset =
    those of the training part, sorted."""

    def check(self, max_length: int) -> None:
        super().check(max_length)
        labels = self.labels or ()
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"labels lists {twice!r} twice; list each label once")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionView:
    """How people look through the predictions of a task; `trainers.checkpoints.predictions` keeps them.

    Patterns are RE2's, of the JSON texts of truths and predictions; `{label}` is a label.
    """

    # How wrong a prediction is, of its score and the JSON texts of prediction and truth.
    error: Callable[[float, str, str], float] = lambda score, prediction, truth: 1.0 - score
    can_be_right: bool = True  # Whether an error of 0 means right
    truth: str = ""  # Finds truths with a label; empty = predictions have no labels to look for
    prediction: str = ""  # Finds predictions with a label; empty = as `truth`
    # Confidence of each decision that makes a prediction, and whether it is right, of prediction, truth and
    # probabilities; None = there are no probabilities.
    decisions: Callable[[Any, Any, Any], Decisions] | None = None

    def pattern(self, label: str, *, true: bool) -> str:
        found = self.truth if true or not self.prediction else self.prediction
        return found.format(label=re.escape(json.dumps(label, ensure_ascii=False)[1:-1]))


def yes_no(probabilities: Sequence[float], true: Sequence[bool]) -> Decisions:
    rows = zip(probabilities, true, strict=True)
    return [(max(share, 1.0 - share), (share > 0.5) == right) for share, right in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredMetric:
    """A score of predictions that another package declares, of tasks that exist."""

    name: str  # As in specs and summaries; on the test part with `test_`
    summary: str
    score: Score
    tasks: tuple[str, ...]  # Names of the tasks whose predictions it is computed from
    # Of predictions and truths of all units, as `stillhouse predictions` has them.
    compute: Callable[[Sequence[Any], Sequence[Any]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """How texts are tried with a trained model, one example to a line, and how its answers are shown."""

    each: str  # Field of a row that each line is
    words: bool = False  # Whether that field is a list of words
    shared: tuple[str, ...] = ()  # Fields that all lines have in common
    optional: tuple[str, ...] = ()  # Those of them that may be left out
    shown: Literal["labels", "number", "tags", "text", "ranking"] = "labels"
    """Likeliest labels, a number, a tag for each word, a piece of a text, or the lines, the best first."""


OF_TEXTS = Trial(each="text")
OF_PAIRS = Trial(each="text", shared=("text_pair",), optional=("text_pair",))


def columns_named(*names: str) -> Callable[[Sample], Guess | None]:
    """Returns a `guess` that accepts data with all of these columns, which the task's own files have."""
    return lambda sample: Guess({}, 3) if sample.names >= set(names) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInfo:
    """A task: its data, what is learned, and how that is judged."""

    name: str  # Value of `task.name`, in specs and stored data; never changed
    summary: str
    implementation: str  # `module:class` of its `trainers.tasks.base.Task`, imported when a run starts
    head: type[Head]
    scores: Mapping[str, Score]  # Scores of its evaluation by name; `validation_loss` is added
    headline: str  # The score by which checkpoints and runs are judged first
    own_fields: type[OwnFields] = OwnFields  # Its fields of the section `task`, besides those of every task
    usual_length: int | None = None  # Default of `task.max_length`; None = the longest
    counted: str = "examples"  # Unit of `task.train_examples` and its siblings
    columns: tuple[str, ...] = ("text", "label")  # Fields of a row, which `task.columns` may rename
    labels: tuple[str, ...] = ("label",)  # Fields that have what is learned, one of them in each row
    layouts: tuple[Layout, ...] = ()  # Official file formats, tried before tables of rows
    # Readers of files that other tasks have none for, or another one, by the end of the name.
    readers: Mapping[str, Reader] = field(default_factory=dict)
    predictions: PredictionView = PredictionView()  # How people look through its predictions
    hub_id: str = ""  # Dataset that is used when `task.path` is unset; empty = there is none
    hub_examples: int | None = None  # Its training examples, for forecasts; None = unknown until read
    # Examples drawn from each part by default; empty = all.
    default_examples: Mapping[str, int] = field(default_factory=dict)
    trial: Trial | None = None  # How typed texts are answered; None = examples are not made of single rows
    # How it would read data with these first rows, for `stillhouse inspect`; None = not at all.
    guess: Callable[[Sample], Guess | None] = lambda sample: None

    def __post_init__(self) -> None:
        scores = {"validation_loss": VALIDATION_LOSS, **self.scores}
        object.__setattr__(self, "scores", scores)
        if self.headline not in scores or scores[self.headline].better is None:
            raise ValueError(
                f"task {self.name}: the headline {self.headline} is not a score with a direction; "
                f"choose one of {', '.join(name for name, score in scores.items() if score.better)}"
            )

    @property
    def needs_validation(self) -> str | None:
        """Why a run may not train on the validation part as well; None = it may."""
        if not self.labels:
            return "draws its examples from running text"
        tuned = next((name for name, score in self.scores.items() if score.tuned), None)
        return None if tuned is None else f"chooses its {tuned} on it"

    @property
    def higher_is_better(self) -> bool:
        return self.scores[self.headline].better == "higher"
