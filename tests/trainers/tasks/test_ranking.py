"""Ranking metrics against their textbook definitions, written out anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.tasks.wikiqa.task import best_f1_threshold, positive_class, ranking


def textbook(scores, relevant, queries):
    """MAP and MRR query by query; of equal scores the later candidate is the higher."""
    precisions, reciprocals = [], []
    for query in set(queries):
        mine = [(scores[i], i, relevant[i]) for i in range(len(scores)) if queries[i] == query]
        ranked = [hit for _, _, hit in sorted(mine, reverse=True)]
        if 1 not in ranked:
            continue
        at_hits = [sum(ranked[: k + 1]) / (k + 1) for k in range(len(ranked)) if ranked[k]]
        precisions.append(sum(at_hits) / len(at_hits))
        reciprocals.append(1 / (ranked.index(1) + 1))
    return {"map": sum(precisions) / len(precisions), "mrr": sum(reciprocals) / len(reciprocals)}


candidates = st.lists(
    st.tuples(st.integers(0, 4).map(lambda n: n / 4), st.integers(0, 1), st.integers(0, 5)),
    min_size=1,
    max_size=60,
).filter(lambda rows: any(hit for _, hit, _ in rows))


@given(candidates)
def test_random_rankings_with_ties(rows):
    scores, relevant, queries = (np.array(column) for column in zip(*rows, strict=True))
    expected = textbook(scores.tolist(), relevant.tolist(), queries.tolist())
    assert ranking(scores, relevant, queries) == pytest.approx(expected)


@pytest.mark.parametrize("levels", [None, 3])
def test_real_judgements_with_random_scores(real_data, levels):
    lines = (real_data / "wikiqa" / "WikiQA-dev.ref").read_text().split("\n")
    rows = [[int(field) for field in line.split()] for line in lines if line]
    queries, relevant = np.array([row[0] for row in rows]), np.array([row[3] for row in rows])
    rng = np.random.default_rng(0)
    for _ in range(5):
        scores = rng.random(len(rows)) if levels is None else rng.integers(0, levels, len(rows)).astype(float)
        expected = textbook(scores.tolist(), relevant.tolist(), queries.tolist())
        assert ranking(scores, relevant, queries) == pytest.approx(expected, abs=1e-12)


def test_worked_example():
    found = ranking(np.array([0.9, 0.8, 0.7, 0.5, 0.4]), np.array([0, 1, 1, 0, 1]), np.array([1, 1, 1, 2, 2]))
    assert found == {"map": pytest.approx(((1 / 2 + 2 / 3) / 2 + 1 / 2) / 2), "mrr": pytest.approx(1 / 2)}


def test_queries_without_relevant_candidates_are_skipped():
    scores, relevant = np.array([0.1, 0.2, 0.3]), np.array([0, 1, 0])
    assert ranking(scores, relevant, np.array([7, 7, 3]))["map"] == 1.0


def test_nothing_to_rank_is_an_error():
    with pytest.raises(ValueError, match="no query has a relevant candidate"):
        ranking(np.array([1.0]), np.array([0]), np.array([0]))


def test_equal_scores_gain_nothing_from_the_order_of_the_file():
    scores, queries = np.zeros(4), np.zeros(4, dtype=int)
    assert ranking(scores, np.array([1, 0, 0, 0]), queries)["mrr"] == 0.25
    assert ranking(scores, np.array([0, 0, 0, 1]), queries)["mrr"] == 1.0


labelled = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=1, max_size=40).filter(
    lambda rows: any(label for _, label in rows)
)


@given(labelled)
def test_threshold_has_the_best_f1_there_is(rows):
    scores = np.array([score for score, _ in rows], dtype=np.float32)
    labels = np.array([label for _, label in rows])
    found = positive_class(scores, labels, best_f1_threshold(scores, labels))["f1"]
    assert found == max(positive_class(scores, labels, score)["f1"] for score in scores)


def test_threshold_lies_between_the_scores_that_it_parts():
    scores, labels = np.array([3.0, 2.0, 1.0, 0.0]), np.array([1, 1, 0, 0])
    assert best_f1_threshold(scores, labels) == 1.5


@given(labelled, st.integers(-4, 4))
def test_figures_of_the_positive_class_are_scikit_learns(rows, threshold):
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    scores, labels = (np.array(column) for column in zip(*rows, strict=True))
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        labels, scores >= threshold, average="binary", zero_division=0
    )
    expected = {
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "accuracy": metrics.accuracy_score(labels, scores >= threshold),
    }
    assert positive_class(scores, labels, threshold) == pytest.approx(expected)
