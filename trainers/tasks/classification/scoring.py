from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trainers.checkpoints.predictions import LabelCounts
from trainers.tasks.base import Judged
from trainers.tasks.scores import calibration_error, classification, decisions, matthews

if TYPE_CHECKING:
    import torch

    from trainers.data.batches import Batch


class ClassScoring:
    """Predicts the likeliest class; `observe` returns it and its probability.

    Args:
        labels: (N,) true classes.
        classes: Names by number.
        declared: Scores that the task reports; None = all.
    """

    def __init__(
        self, labels: npt.NDArray[np.int64], classes: Sequence[str], declared: Collection[str] | None = None
    ) -> None:
        self._labels, self._classes, self._declared = labels, classes, declared

    @property
    def units(self) -> int:
        return len(self._labels)

    def observe(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        import torch

        predicted = logits.argmax(1)
        probability = logits.float().softmax(1).gather(1, predicted[:, None])[:, 0]
        return torch.stack([predicted.float(), probability], 1)

    def score(
        self, observed: npt.NDArray[np.float32], carried: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        predicted = observed[:, 0].astype(np.int64)
        scores = classification(predicted, self._labels, len(self._classes))
        # Each text has one prediction and one label.
        scores |= dict.fromkeys(("f1_micro", "precision_micro", "recall_micro"), scores["accuracy"])
        scores["matthews"] = matthews(predicted, self._labels, len(self._classes))
        scores["calibration_error"] = calibration_error(observed[:, 1], predicted == self._labels)
        return {name: scores[name] for name in scores if self._declared is None or name in self._declared}

    def judge(self, observed: npt.NDArray[np.float32], carried: Mapping[str, float]) -> Judged:
        predicted = observed[:, 0].astype(np.int64)
        return Judged(
            np.arange(len(predicted)),
            (predicted == self._labels).astype(np.float64),
            [self._classes[number] for number in predicted],
            [self._classes[number] for number in self._labels],
            LabelCounts.of_classes(predicted, self._labels, self._classes),
        )


class SeveralLabelsScoring:
    """Predicts every class with a probability above one half; labels are (N, C), 1 where present."""

    def __init__(self, labels: npt.NDArray[np.int64], classes: Sequence[str]) -> None:
        self._labels, self._classes = labels, classes

    @property
    def units(self) -> int:
        return len(self._labels)

    def observe(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return logits.float().sigmoid()

    def score(
        self, observed: npt.NDArray[np.float32], carried: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        predicted, labels = observed > 0.5, self._labels == 1
        return {
            **decisions(predicted, labels),
            "matthews": matthews(predicted.ravel().astype(np.int64), labels.ravel().astype(np.int64), 2),
            "calibration_error": calibration_error(
                np.where(predicted, observed, 1.0 - observed).ravel(), (predicted == labels).ravel()
            ),
        }

    def judge(self, observed: npt.NDArray[np.float32], carried: Mapping[str, float]) -> Judged:
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
        )

    def _names(self, row: npt.NDArray[np.bool_]) -> list[str]:
        return [self._classes[number] for number in np.flatnonzero(row).tolist()]
