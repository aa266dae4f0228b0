"""Metrics of rankings, by the rules of trec_eval, and a threshold on scores. Pure; imports no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.integer]


def ranking(scores: npt.NDArray[np.floating], relevant: Numbers, queries: Numbers) -> dict[str, float]:
    """Returns mean average precision and mean reciprocal rank over the queries with a relevant candidate.

    Queries without one are skipped. Of equal scores the later candidate comes first, as trec_eval orders
    equal scores by descending document number: a model that cannot tell candidates apart gains nothing from
    their order in the file. NaN where a score is NaN.

    Args:
        scores: (N,) the higher the better.
        relevant: (N,) 0 or 1.
        queries: (N,) number of each candidate's query.

    Raises:
        ValueError: no query has a relevant candidate.
    """
    _, precisions, best = _by_query(scores, relevant, queries)
    if not len(precisions):
        raise ValueError("no query has a relevant candidate")
    if np.isnan(scores).any():
        return {"map": float("nan"), "mrr": float("nan")}
    return {"map": float(precisions.mean()), "mrr": float((1.0 / best).mean())}


def average_precisions(
    scores: npt.NDArray[np.floating], relevant: Numbers, queries: Numbers
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """(Q,) numbers and average precisions of the queries with a relevant candidate; see `ranking`."""
    numbers, precisions, _ = _by_query(scores, relevant, queries)
    return numbers, precisions


def ranks_of(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """(N,) the candidates of one query, best first; equal scores as in `ranking`."""
    return np.lexsort((-np.arange(len(scores)), -scores))


def _by_query(
    scores: npt.NDArray[np.floating], relevant: Numbers, queries: Numbers
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Returns number, average precision and best rank for each query with a relevant candidate."""
    order = np.lexsort((-np.arange(len(scores)), -scores, queries))
    hits, of_query = relevant[order] == 1, queries[order]
    numbers, first, place = np.unique(of_query, return_index=True, return_inverse=True)
    ranks = np.arange(len(order)) - first[place] + 1
    found = np.cumsum(hits)
    found_before = (found - hits)[first]
    precision = (found - found_before[place]) / ranks
    total = np.bincount(place, weights=hits, minlength=len(numbers))
    answerable = total > 0
    summed = np.bincount(place, weights=precision * hits, minlength=len(numbers))
    best = np.full(len(numbers), np.inf)
    np.minimum.at(best, place[hits], ranks[hits])
    return numbers[answerable].astype(np.int64), summed[answerable] / total[answerable], best[answerable]


def best_f1_threshold(scores: npt.NDArray[np.floating], labels: Numbers) -> float:
    """Returns the threshold at which calling every score that reaches it positive gives the best F1.

    It is halfway between the scores that it separates, in float64; the upper one where no number is between
    them. Of equally good ones the highest. Scores are finite, and a label is 1.
    """
    order = np.argsort(-scores, kind="stable")
    falling = scores[order].astype(np.float64)
    hits = np.cumsum(labels[order])
    f1 = 2 * hits / (np.arange(1, len(falling) + 1) + hits[-1])
    f1[:-1][falling[1:] == falling[:-1]] = -1.0  # equal scores are not parted
    best = int(np.argmax(f1))
    if best + 1 == len(falling):
        return float(falling[best])
    middle = float((falling[best] + falling[best + 1]) / 2)
    return middle if middle > falling[best + 1] else float(falling[best])


def positive_class(scores: npt.NDArray[np.floating], labels: Numbers, threshold: float) -> dict[str, float]:
    """Returns precision, recall and F1 of class 1, and accuracy; 0 where nothing is predicted or true.

    A score equal to the threshold reaches it.
    """
    # numpy would round the threshold to fp32 scores' format, past one of those that it parts.
    predicted, actual = scores.astype(np.float64) >= threshold, labels == 1
    hits = int((predicted & actual).sum())
    return {
        "precision": hits / max(1, int(predicted.sum())),
        "recall": hits / max(1, int(actual.sum())),
        "f1": 2 * hits / max(1, int(predicted.sum() + actual.sum())),
        "accuracy": float((predicted == actual).mean()),
    }
