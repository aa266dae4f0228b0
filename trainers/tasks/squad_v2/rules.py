"""The rules of the official SQuAD 2.0 evaluation script. Pure; imports no torch.

Figures are fractions in [0, 1]; the script prints the same in percent.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")

Scores = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def normalise(text: str) -> str:
    """Returns lower case, without ASCII punctuation and articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


class GoldAnswers:
    """Right answers to one question; none when it has no answer."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.has_answer = bool(texts)
        # An answer that normalises to nothing is none; the script judges has_answer before that.
        self._golds = tuple(dict.fromkeys(gold for text in texts if (gold := normalise(text)))) or ("",)
        self._bags = tuple(Counter(gold.split()) for gold in self._golds)

    def exact(self, text: str) -> float:
        return float(normalise(text) in self._golds)

    def f1(self, text: str) -> float:
        """Returns the best F1 over answers, of the bags of tokens after normalisation."""
        words = Counter(normalise(text).split())
        return max(_bag_f1(words, gold) for gold in self._bags)


def _bag_f1(words: Counter[str], gold: Counter[str]) -> float:
    if not words or not gold:
        return float(words == gold)
    common = (words & gold).total()
    if common == 0:
        return 0.0
    precision, recall = common / words.total(), common / gold.total()
    return 2 * precision * recall / (precision + recall)


def figures(exact: Scores, f1: Scores, has_answer: Flags) -> dict[str, float]:
    """Returns means over all questions, those with an answer and those without; none of empty groups."""
    found = {"exact_match": float(exact.mean()), "f1": float(f1.mean())}
    if has_answer.any():
        found["exact_match_has_answer"] = float(exact[has_answer].mean())
        found["f1_has_answer"] = float(f1[has_answer].mean())
    if not has_answer.all():
        # The F1 of a question without answer is its exact match.
        found["exact_match_no_answer"] = float(exact[~has_answer].mean())
    return found


def with_threshold(scores: Scores, null_scores: Scores, has_answer: Flags, threshold: float) -> Scores:
    """Returns (N,) scores if questions with a null score (`na_prob`) above the threshold stay unanswered."""
    return np.where(null_scores > threshold, (~has_answer).astype(np.float64), scores)


def best_threshold(
    scores: Scores, null_scores: Scores, has_answer: Flags, answered: Flags | None = None
) -> float:
    """Returns the threshold on the null score, in [0, 1], with the best mean score, as the script tunes it.

    Of equally good ones the smallest, 0 being the first. Questions with the same null score stand or fall
    together, where the script takes them one by one: the result is what `with_threshold` gives.

    Args:
        answered: (N,) whether the answer is a text; None = all are.
    """
    order = np.argsort(null_scores, kind="stable")
    # From nothing answered on, each question that is answered adds its score, or loses its point.
    lost = np.ones(len(scores)) if answered is None else answered.astype(np.float64)
    gains = np.where(has_answer, scores, -lost)[order]
    reached = np.append(0.0, np.cumsum(gains))
    candidates = np.append(0.0, np.unique(null_scores))
    answers = np.searchsorted(null_scores[order], candidates, side="right")
    return float(candidates[np.argmax(reached[answers])])
