"""Classification metrics. Pure."""

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
