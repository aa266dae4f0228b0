"""Losses and metrics that several tasks share."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainers.model_kinds.heads import IGNORED
from trainers.tasks.losses import Tensor as Tensor

if TYPE_CHECKING:
    from trainers.data.batches import Batch as Batch
    from trainers.data.batches import Transform as Transform
else:
    Batch = Transform = Any  # For signatures alone, as `Tensor`.

CrossEntropy = Callable[[Tensor, Tensor, int], Tensor]
"""(N,) losses of (N, C) logits and (N,) labels, 0 where a label has the given value."""


def cross_entropies(logits: Tensor, labels: Tensor, operator: CrossEntropy | None = None) -> Tensor:
    """(N,) cross-entropies in fp32 of (N, C) logits and (N,) classes, 0 of `IGNORED`."""
    from torch.nn import functional

    if operator is not None:
        return operator(logits, labels, IGNORED)
    return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")


def class_loss(
    logits: Tensor,
    batch: Batch,
    labels: Tensor | None = None,
    operator: CrossEntropy | None = None,
) -> Tensor:
    """Returns the cross-entropy of (B, C) logits, summed over the batch, with each example's weight.

    Weights are not normalised within a batch: the loss of a global batch does not depend on how it is
    divided.
    """
    each = cross_entropies(logits, batch.labels if labels is None else labels, operator)
    return (each if batch.weights is None else each * batch.weights).sum()


LIKELIEST = 20  # Classes of a text whose probabilities are kept


def likeliest(logits: Tensor, kept: int = LIKELIEST) -> Tensor:
    """(B, 2 K) numbers of the K likeliest classes of (B, C) logits, best first, and their probabilities."""
    import torch

    found = logits.float().softmax(1).topk(min(kept, logits.shape[1]), dim=1)
    return torch.cat([found.indices.float(), found.values], 1)


def named_probabilities(observed: npt.NDArray[np.float32], names: Sequence[str]) -> list[dict[str, float]]:
    """Returns what `likeliest` observed, by the classes' names."""
    numbers, values = np.split(observed, 2, axis=1)
    rows = zip(numbers.astype(np.int64).tolist(), values.astype(np.float64).round(6).tolist(), strict=True)
    return [{names[i]: value for i, value in zip(*row, strict=True)} for row in rows]


def classification(
    predicted: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], classes: int
) -> dict[str, float]:
    """Returns accuracy and macro precision, recall and F1 of (N,) classes, in [0, 1].

    Over classes that occur in labels or predictions, as scikit-learn computes them (whose import takes longer
    than a small evaluation).
    """
    # Three counts per class: a confusion matrix of ten thousand classes would take a gigabyte.
    hits = np.bincount(labels[labels == predicted], minlength=classes).astype(np.float64)
    of_label = np.bincount(labels, minlength=classes)
    of_prediction = np.bincount(predicted, minlength=classes)
    present = (of_label + of_prediction) > 0
    precision = np.divide(hits, of_prediction, out=np.zeros(classes), where=of_prediction > 0)
    recall = np.divide(hits, of_label, out=np.zeros(classes), where=of_label > 0)
    total = precision + recall
    f1 = np.divide(2 * precision * recall, total, out=np.zeros(classes), where=total > 0)
    return {
        "accuracy": float(hits.sum() / len(labels)),
        "f1": float(f1[present].mean()),
        "precision_macro": float(precision[present].mean()),
        "recall_macro": float(recall[present].mean()),
    }


def decisions(predicted: npt.NDArray[np.bool_], labels: npt.NDArray[np.bool_]) -> dict[str, float]:
    """Returns scores of yes-no decisions (N, C), in [0, 1]; a class that never occurs counts nowhere.

    Accuracy is the share of rows in which every decision is right; macro figures are means over classes,
    micro figures are over all decisions.
    """
    hits = (predicted & labels).sum(0).astype(np.float64)
    of_prediction, of_label = predicted.sum(0), labels.sum(0)
    present = (of_label + of_prediction) > 0
    zeros = np.zeros(predicted.shape[1])
    precision = np.divide(hits, of_prediction, out=zeros.copy(), where=of_prediction > 0)
    recall = np.divide(hits, of_label, out=zeros.copy(), where=of_label > 0)
    f1 = np.divide(2 * hits, of_label + of_prediction, out=zeros.copy(), where=present)
    total = int(of_label.sum() + of_prediction.sum())
    return {
        "accuracy": float((predicted == labels).all(1).mean()),
        "f1": float(f1[present].mean()) if present.any() else 0.0,
        "precision_macro": float(precision[present].mean()) if present.any() else 0.0,
        "recall_macro": float(recall[present].mean()) if present.any() else 0.0,
        "f1_micro": float(2 * hits.sum() / total) if total else 0.0,
        "precision_micro": float(hits.sum() / max(1, int(of_prediction.sum()))),
        "recall_micro": float(hits.sum() / max(1, int(of_label.sum()))),
    }


def matthews(predicted: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], classes: int) -> float:
    """Returns the correlation over classes (Gorodkin 2004), in [-1, 1]; 0 when one side is constant."""
    count = float(len(labels))
    of_label = np.bincount(labels, minlength=classes).astype(np.float64)
    of_prediction = np.bincount(predicted, minlength=classes).astype(np.float64)
    together = float((predicted == labels).sum()) * count - float(of_label @ of_prediction)
    alone = (count**2 - float(of_label @ of_label)) * (count**2 - float(of_prediction @ of_prediction))
    return together / float(np.sqrt(alone)) if alone > 0 else 0.0


def calibration_error(
    confidence: npt.NDArray[np.floating], right: npt.NDArray[np.bool_], bins: int = 15
) -> float:
    """Returns the expected calibration error, over bins of equal width (arXiv 1706.04599, equation 3)."""
    place = np.minimum((np.asarray(confidence, dtype=np.float64) * bins).astype(np.int64), bins - 1)
    gap = np.bincount(place, weights=confidence - right.astype(np.float64), minlength=bins)
    return float(np.abs(gap).sum() / len(right))
