from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trainers.tasks.base import Judged

if TYPE_CHECKING:
    import torch

    from trainers.data.batches import Batch

Numbers = npt.NDArray[np.floating]


class NumberScoring:
    """Correlations and error of predicted numbers, which are clipped to `label_range`; None = not clipped."""

    def __init__(self, labels: Numbers, label_range: tuple[float, float] | None) -> None:
        self._labels, self._range = labels.astype(np.float64), label_range

    @property
    def units(self) -> int:
        return len(self._labels)

    def observe(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return logits.float() if self._range is None else logits.float().clamp(*self._range)

    def score(
        self, observed: npt.NDArray[np.float32], carried: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        predicted = observed[:, 0].astype(np.float64)
        return {
            "pearson": pearson(predicted, self._labels),
            "spearman": spearman(predicted, self._labels),
            "rmse": rmse(predicted, self._labels),
        }

    def judge(self, observed: npt.NDArray[np.float32], carried: Mapping[str, float]) -> Judged:
        """Returns the numbers, and what each text contributes to Pearson's correlation.

        That is its first-order effect (the influence function), so that the contributions' mean is the
        correlation and their spread is that of the correlation.
        """
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
