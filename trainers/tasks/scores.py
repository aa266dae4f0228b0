"""Classification metrics from a confusion matrix. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def classification(
    predicted: npt.NDArray[np.int64], labels: npt.NDArray[np.int64], classes: int
) -> dict[str, float]:
    """Accuracy and macro precision, recall and F1, in [0, 1].

    As scikit-learn computes them with `average="macro", zero_division=0` over classes that
    occur in labels or predictions; written out because importing scikit-learn takes longer
    than a small run's evaluation.

    Args:
        predicted: (N,) predicted classes.
        labels: (N,) true classes.
        classes: number of classes.
    """
    confusion = np.bincount(labels * classes + predicted, minlength=classes * classes)
    confusion = confusion.reshape(classes, classes).astype(np.float64)
    hits, of_label, of_prediction = np.diag(confusion), confusion.sum(1), confusion.sum(0)
    present = (of_label + of_prediction) > 0
    precision = np.divide(hits, of_prediction, out=np.zeros(classes), where=of_prediction > 0)
    recall = np.divide(hits, of_label, out=np.zeros(classes), where=of_label > 0)
    total = precision + recall
    f1 = np.divide(2 * precision * recall, total, out=np.zeros(classes), where=total > 0)
    return {
        "accuracy": float(hits.sum() / confusion.sum()),
        "f1": float(f1[present].mean()),
        "precision_macro": float(precision[present].mean()),
        "recall_macro": float(recall[present].mean()),
    }
