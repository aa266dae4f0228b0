"""From the logits of windows to one answer per question, and its score by the rules of SQuAD 2.0's script.

Figures are fractions in [0, 1]; the script prints the same in percent.
"""

import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from trainers.data.tokens import TokenSet
from trainers.tasks.base import Carried, Judged, Observed
from trainers.tasks.scores import Batch, Tensor

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")

Scores = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
N_BEST = 20  # Spans that are kept of each window


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


def means(exact: Scores, f1: Scores, has_answer: Flags) -> dict[str, float]:
    """Returns means over all questions, those with an answer and those without; none of empty groups."""
    figures = {"exact_match": float(exact.mean()), "f1": float(f1.mean())}
    if has_answer.any():
        figures["exact_match_has_answer"] = float(exact[has_answer].mean())
        figures["f1_has_answer"] = float(f1[has_answer].mean())
    if not has_answer.all():
        # The F1 of a question without answer is its exact match.
        figures["exact_match_no_answer"] = float(exact[~has_answer].mean())
    return figures


def with_threshold(scores: Scores, null_scores: Scores, has_answer: Flags, threshold: float) -> Scores:
    """Returns (N,) scores if questions with a null score (`na_prob`) above the threshold stay unanswered."""
    return np.where(null_scores > threshold, (~has_answer).astype(np.float64), scores)


def best_threshold(scores: Scores, null_scores: Scores, has_answer: Flags) -> float:
    """Returns the least threshold on the null score, in [0, 1], with the best mean score, as the script does.

    Questions with the same null score stand or fall together, where the script takes them one by one.
    """
    order = np.argsort(null_scores, kind="stable")
    # From nothing answered on, each question that is answered adds its score, or loses its point.
    gains = np.where(has_answer, scores, -1.0)[order]
    reached = np.append(0.0, np.cumsum(gains))
    candidates = np.append(0.0, np.unique(null_scores))
    answers = np.searchsorted(null_scores[order], candidates, side="right")
    return float(candidates[np.argmax(reached[answers])])


def best_spans(logits: Tensor, batch: Batch, max_tokens: int) -> Tensor:
    """(B, 1 + 3 x `N_BEST`): the score of `[CLS]`, then scores, first and last tokens of spans, best first.

    Spans are of at most `max_tokens` in the context. A score is the sum of two logits (B, S, 2); places that
    no span fills score minus infinity.
    """
    import torch

    assert batch.token_type_ids is not None
    second = batch.token_type_ids.bool()
    # The context is the second text without the `[SEP]` that ends it.
    outside = ~(second & torch.nn.functional.pad(second[:, 1:], (0, 1), value=False))
    first, last = logits.float().unbind(-1)
    size, width = first.shape
    begins = first.masked_fill(outside, -torch.inf)
    ends = last.masked_fill(outside, -torch.inf)
    ends = torch.nn.functional.pad(ends, (0, max_tokens - 1), value=-torch.inf)
    # (B, S, max_tokens): of the span that begins at s and has n + 1 tokens.
    scores = (begins[:, :, None] + ends.unfold(1, max_tokens, 1)).reshape(size, width * max_tokens)
    count = min(N_BEST, scores.shape[1])
    top, places = scores.topk(count, dim=1)
    starts = places // max_tokens
    spans = (top, starts.float(), (starts + places % max_tokens).float())
    filled = (
        torch.nn.functional.pad(part, (0, N_BEST - count), value=value)
        for part, value in zip(spans, (-torch.inf, 0.0, 0.0), strict=True)
    )
    return torch.cat([(first[:, 0] + last[:, 0])[:, None], *filled], dim=1)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Spans that may answer the questions of a part, best first within each question."""

    offsets: npt.NDArray[np.int64]  # (Q+1,) the spans of question i are `offsets[i]` to `offsets[i+1]`
    scores: npt.NDArray[np.float32]  # (K,) of each span
    begin: npt.NDArray[np.int64]  # (K,) its characters in the context, from and up to
    end: npt.NDArray[np.int64]
    null_scores: npt.NDArray[np.float32]  # (Q,) score of no answer: the lowest of the question's windows


def merge_windows(observed: Observed, data: TokenSet) -> Candidates:
    """Returns the candidates of all windows of each question together; `observed` is of `best_spans`."""
    question, chars_at, chars = (data.columns[name] for name in ("question", "chars_at", "chars"))
    first_window = np.flatnonzero(np.diff(question, prepend=-1))
    scores, starts, ends = np.split(observed[:, 1:], 3, axis=1)
    windows, places = np.nonzero(np.isfinite(scores))
    score = scores[windows, places]
    order = np.lexsort((-score, question[windows]))
    windows, places = windows[order], places[order]
    at = chars_at[windows]
    counts = np.bincount(question[windows], minlength=len(first_window))
    return Candidates(
        np.concatenate(([0], np.cumsum(counts, dtype=np.int64))),
        score[order],
        chars[at + starts[windows, places].astype(np.int64), 0].astype(np.int64),
        chars[at + ends[windows, places].astype(np.int64), 1].astype(np.int64),
        np.minimum.reduceat(observed[:, 0], first_window),
    )


@dataclass(frozen=True)
class GoldQuestions:
    """Context and right answers of each question of a part, kept in a file next to its tokens."""

    contexts: Sequence[str]
    texts: Sequence[Sequence[str]]

    def write(self, file: Path) -> None:
        numbers = {text: i for i, text in enumerate(dict.fromkeys(self.contexts))}
        rows = [(numbers[text], answers) for text, answers in zip(self.contexts, self.texts, strict=True)]
        file.write_text(json.dumps({"contexts": list(numbers), "questions": rows}), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> Self:
        document = json.loads(file.read_text(encoding="utf-8"))
        contexts, answers = zip(*document["questions"], strict=True)
        return cls([document["contexts"][number] for number in contexts], answers)

    @cached_property
    def golds(self) -> list[GoldAnswers]:
        return [GoldAnswers(answers) for answers in self.texts]


class SpanScoring:
    """Exact match and F1 at the null threshold that is best for F1, or at one carried over."""

    def __init__(self, data: TokenSet, questions: GoldQuestions, max_answer_tokens: int) -> None:
        self._data, self._questions, self._max_tokens = data, questions, max_answer_tokens
        self.units = int(data.columns["question"][-1]) + 1

    def observe(self, logits: Tensor, batch: Batch) -> Tensor:
        return best_spans(logits, batch, self._max_tokens)

    def judge(self, observed: Observed, carried: Carried) -> Judged:
        """Returns the predicted answer, empty = none, and the right ones."""
        texts, null_scores, has_answer, f1 = self._answers(observed)
        threshold = carried["null_threshold"]
        predictions = [
            "" if null > threshold else text for text, null in zip(texts, null_scores, strict=True)
        ]
        scores = with_threshold(f1, null_scores, has_answer, threshold)
        return Judged(np.arange(len(predictions)), scores, predictions, self._questions.texts)

    def score(self, observed: Observed, carried: Carried | None = None) -> dict[str, float]:
        texts, null_scores, has_answer, f1 = self._answers(observed)
        golds = self._questions.golds
        exact = np.array([gold.exact(text) for gold, text in zip(golds, texts, strict=True)])
        if carried is None:
            threshold = best_threshold(f1, null_scores, has_answer)
        else:
            threshold = carried["null_threshold"]
        figures = means(
            with_threshold(exact, null_scores, has_answer, threshold),
            with_threshold(f1, null_scores, has_answer, threshold),
            has_answer,
        )
        if has_answer.any():
            # What is left when nothing has to be told about whether there is an answer.
            figures["f1_best_span"] = float(f1[has_answer].mean())
        return {**figures, "null_threshold": threshold}

    def _answers(self, observed: Observed) -> tuple[list[str], Scores, Flags, Scores]:
        """Returns texts, null scores, which questions have an answer, and the F1 of the texts."""
        texts, null_scores = answers(merge_windows(observed, self._data), self._questions.contexts)
        golds = self._questions.golds
        f1 = np.array([gold.f1(text) for gold, text in zip(golds, texts, strict=True)])
        return texts, null_scores, np.array([gold.has_answer for gold in golds]), f1


def answers(candidates: Candidates, contexts: Sequence[str]) -> tuple[list[str], npt.NDArray[np.float64]]:
    """Returns the best text for each question, and (Q,) null scores in [0, 1].

    Articles and punctuation alone are no answer; where numbers are not finite nothing answers. A null score
    is the logistic function of the score of no answer minus that of the text.
    """
    texts: list[str] = []
    scores = np.empty(len(contexts))
    for i, context in enumerate(contexts):
        texts.append("")
        scores[i] = -np.inf
        for span in range(int(candidates.offsets[i]), int(candidates.offsets[i + 1])):
            text = context[candidates.begin[span] : candidates.end[span]]
            is_answer = bool(normalise(text))
            if is_answer or not texts[i]:
                texts[i], scores[i] = text, candidates.scores[span]
            if is_answer:
                break
    difference = np.nan_to_num(candidates.null_scores - scores, nan=np.inf, posinf=np.inf, neginf=-np.inf)
    # The logistic function, in a form that does not overflow.
    return texts, 0.5 * (1.0 + np.tanh(0.5 * difference))
