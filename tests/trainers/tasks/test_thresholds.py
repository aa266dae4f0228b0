"""Thresholds that are chosen on one part and carried to another: the best, and applied as chosen."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawing import scaled
from trainers.tasks import TASKS
from trainers.tasks.squad_v2 import scoring
from trainers.tasks.wikiqa.task import RankingScoring, best_f1_threshold, positive_class

TUNED = {name for name, info in TASKS.items() if any(score.tuned for score in info.scores.values())}


def neighbours(start: np.floating, count: int) -> np.ndarray:
    """Numbers of which none has another of its format between it and the next."""
    found = [start]
    for _ in range(count - 1):
        found.append(np.nextafter(found[-1], type(start)(np.inf)))
    return np.array(found)


labels_of = st.lists(st.integers(0, 1), min_size=2, max_size=12).filter(any)


def test_every_task_that_tunes_is_tested_here():
    assert {"wikiqa", "squad_v2"} == TUNED


@settings(max_examples=scaled(200), deadline=None)
@given(start=st.floats(-1e4, 1e4, width=32), labels=labels_of)
def test_the_f1_of_neighbouring_logits_is_the_best_and_is_carried(start, labels):
    """Between neighbours in fp32 their midpoint is a number of float64 alone."""
    labels = np.array(labels)
    logits = np.random.default_rng(len(labels)).permutation(neighbours(np.float32(start), len(labels)))
    scoring = RankingScoring(labels, np.zeros(len(labels), dtype=np.int64))
    scores = scoring.score(logits[:, None])
    assert scores["f1"] == max(positive_class(logits, labels, float(one))["f1"] for one in logits)
    assert 0.0 <= scores["threshold"] <= 1.0
    if 1e-3 < abs(start) < 16.0:  # beyond that, neighbours have one probability
        carried = json.loads(json.dumps(scores))
        assert scoring.score(logits[:, None], carried) == scores


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(start=st.floats(-16.0, 16.0, width=32), labels=labels_of)
def test_the_threshold_parts_neighbours_of_any_format(dtype, start, labels):
    labels, scores = np.array(labels), neighbours(dtype(start), len(labels))
    found = positive_class(scores, labels, best_f1_threshold(scores, labels))["f1"]
    assert found == max(positive_class(scores, labels, float(one))["f1"] for one in scores)


def test_a_midpoint_that_rounds_to_a_neighbour_parts_them_all_the_same():
    logits = neighbours(np.float32(1.0), 2)
    scores = RankingScoring(np.array([0, 1]), np.zeros(2, dtype=np.int64)).score(logits[:, None])
    assert (scores["f1"], scores["accuracy"]) == (1.0, 1.0)


@settings(max_examples=scaled(200), deadline=None)
@given(
    start=st.floats(0.0, 0.999),
    rows=st.lists(st.tuples(st.integers(0, 7), st.floats(0.0, 1.0), st.booleans()), min_size=1, max_size=12),
)
def test_the_null_threshold_is_the_best_and_is_carried(start, rows):
    places, scores, has_answer = (np.array(column) for column in zip(*rows, strict=True))
    scores = np.where(has_answer, scores, 0.0)
    null_scores = neighbours(np.float64(start), 8)[places]
    threshold = scoring.best_threshold(scores, null_scores, has_answer)
    reached = scoring.with_threshold(scores, null_scores, has_answer, threshold).mean()
    every = [
        scoring.with_threshold(scores, null_scores, has_answer, float(one)).mean()
        for one in (0.0, *null_scores)
    ]
    assert reached == pytest.approx(max(every), abs=1e-12)
    carried = json.loads(json.dumps(threshold))
    assert carried == threshold
