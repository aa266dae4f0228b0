"""Scores against scikit-learn's."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.tasks.scores import classification

pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=60)


@given(pairs)
def test_scores_are_scikit_learns(rows):
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    labels, predicted = (np.array(column) for column in zip(*rows, strict=True))
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        labels, predicted, average="macro", zero_division=0
    )
    scores = classification(predicted, labels, 4)
    expected = {
        "accuracy": metrics.accuracy_score(labels, predicted),
        "precision_macro": precision,
        "recall_macro": recall,
        "f1": f1,
    }
    assert scores == pytest.approx(expected)


def test_a_class_that_nobody_predicts_scores_zero_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = classification(np.array([0, 0]), np.array([0, 1]), 2)
    assert scores["precision_macro"] == 0.25
