import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainers.config import TaskConfig
from trainers.data.formats import Row
from trainers.data.layouts import TRAIN
from trainers.data.tokens import TokenSet
from trainers.model_kinds.heads import NumberHead
from trainers.tasks.base import Carried, Facts, Judged, Observed, Parts, Scoring
from trainers.tasks.dataset import DatasetTask, Tokenising, contents, require_alike, same_answer
from trainers.tasks.regression import NumberFields
from trainers.tasks.scores import Batch, Tensor

Numbers = npt.NDArray[np.floating]


class NumberScoring:
    """Correlations and error of predicted numbers, which are clipped to `label_range`; None = not clipped."""

    def __init__(self, labels: Numbers, label_range: tuple[float, float] | None) -> None:
        self._labels, self._range = labels.astype(np.float64), label_range
        self.units = len(labels)

    def observe(self, logits: Tensor, batch: Batch) -> Tensor:
        return logits.float() if self._range is None else logits.float().clamp(*self._range)

    def score(self, observed: Observed, carried: Carried | None = None) -> dict[str, float]:
        predicted = observed[:, 0].astype(np.float64)
        return {score.__name__: score(predicted, self._labels) for score in (pearson, spearman, rmse)}

    def judge(self, observed: Observed, carried: Carried) -> Judged:
        """Returns the numbers, and each text's influence on Pearson's correlation, which is their mean."""
        predicted = observed[:, 0].astype(np.float64)
        ours, theirs = _standard(predicted), _standard(self._labels)
        correlation = (ours * theirs).mean()
        return Judged(
            np.arange(len(predicted)),
            correlation + ours * theirs - correlation * (ours**2 + theirs**2) / 2.0,
            predicted.tolist(),
            self._labels.tolist(),
        )


def pearson(predicted: Numbers, labels: Numbers) -> float:
    """Returns the linear correlation, in [-1, 1]; 0 when either is constant."""
    return float(np.clip((_standard(predicted) * _standard(labels)).mean(), -1.0, 1.0))


def spearman(predicted: Numbers, labels: Numbers) -> float:
    """Returns the correlation of ranks, in [-1, 1]; equal numbers share their mean rank, constants give 0."""
    return pearson(_ranks(predicted), _ranks(labels))


def rmse(predicted: Numbers, labels: Numbers) -> float:
    return float(np.sqrt(np.square(predicted - labels).mean()))


def _standard(values: Numbers) -> npt.NDArray[np.float64]:
    """Returns values with mean 0 and standard deviation 1; zeros for constants, NaN if one is not finite."""
    if not np.isfinite(values).all():
        return np.full(len(values), np.nan)
    centred: npt.NDArray[np.float64] = values.astype(np.float64) - values.mean(dtype=np.float64)
    deviation = float(np.sqrt(np.square(centred).mean()))
    # Constants have no deviation beyond rounding.
    if deviation <= 1e-12 * max(1e-300, float(np.abs(values).max())):
        return np.zeros(len(values))
    return centred / deviation


def _ranks(values: Numbers) -> npt.NDArray[np.float64]:
    if np.isnan(values).any():
        return np.full(len(values), np.nan)
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: npt.NDArray[np.float64] = (ends - counts + ends - 1) / 2.0
    return means[place]


@dataclass(frozen=True, slots=True)
class Scored:
    texts: tuple[str, ...]
    number: float
    stratum: int = 0  # The distribution of numbers is not evened out


class Regression(DatasetTask[Scored, NumberHead]):
    """The number of a text or a pair of texts, by least squares."""

    def settings(self, task: TaskConfig) -> Facts:
        return {"label_range": json.dumps(task.own(NumberFields).label_range)}

    def example(self, row: Row, task: TaskConfig) -> Scored:
        number = row.number("label")
        allowed = task.own(NumberFields).label_range
        if allowed is not None and not allowed[0] <= number <= allowed[1]:
            raise row.refusal(
                "label", f"{number:g} is outside task.label_range [{allowed[0]:g}, {allowed[1]:g}]"
            )
        return Scored(contents(row, task), number)

    def draw(self, parts: Parts[Scored], task: TaskConfig) -> dict[str, list[Scored]]:
        require_alike(parts)
        return super().draw(parts, task)

    def review(self, parts: Parts[Scored], head: NumberHead, task: TaskConfig) -> Iterator[str]:
        return same_answer(parts, lambda one: f"label {one.number:g}", "add examples with other numbers")

    def tokenise(self, examples: Sequence[Scored], head: NumberHead, by: Tokenising) -> TokenSet:
        labels = np.array([one.number for one in examples], dtype=np.float32)
        return by.texts(examples, labels)

    def any_truth(self, head: NumberHead, task: TaskConfig) -> float:
        return (task.own(NumberFields).label_range or (0.0,))[0]

    def head(self, parts: Parts[Scored], chosen: Parts[Scored], task: TaskConfig) -> NumberHead:
        numbers = np.array([one.number for one in chosen[TRAIN]])
        deviation = float(numbers.std())
        usable = 0.0 < deviation < math.inf  # `review` refuses constants
        return NumberHead(float(numbers.mean()), 2.0 ** round(math.log2(deviation)) if usable else 1.0)

    def weighted(self, part: str, tokens: TokenSet, head: NumberHead, task: TaskConfig) -> TokenSet:
        """Returns the part with the factor of squared errors that makes them likelihoods."""
        return tokens.weighted(np.full(len(tokens), 0.5 / head.scale**2, dtype=np.float32))

    def scoring(self, tokens: TokenSet, head: NumberHead, task: TaskConfig, gold: Path) -> Scoring:
        return NumberScoring(tokens.labels, task.own(NumberFields).label_range)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns half the squared error in units of the head's scale: a normal's -log L plus a constant."""
        assert batch.weights is not None
        return ((logits[:, 0].float() - batch.labels).square() * batch.weights).sum()
