"""From the logits of windows to one answer per question, and its score by the official rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainers.data.tokens import TokenSet
from trainers.tasks.base import Judged
from trainers.tasks.squad_v2 import rules
from trainers.tasks.squad_v2.rules import GoldAnswers
from trainers.tasks.squad_v2.windows import Question

if TYPE_CHECKING:
    import torch

    from trainers.data.batches import Batch

N_BEST = 20
"""Spans that are kept of each window."""


def best_spans(logits: torch.Tensor, batch: Batch, max_tokens: int) -> torch.Tensor:
    """Returns the null score of each window and its best spans in the context.

    Args:
        logits: (B, S, 2) of first and last token.
        batch: Batch that they belong to.
        max_tokens: longest span.

    Returns:
        (B, 1 + 3 x `N_BEST`) fp32: the score of `[CLS]`; then scores, first tokens and last
        tokens of the spans, best first. A score is the sum of two logits; places that no span
        fills score minus infinity.
    """
    import torch

    first, last = logits.float().unbind(-1)
    outside = ~_in_context(batch)
    size, width = first.shape
    begins = first.masked_fill(outside, -torch.inf)
    ends = last.masked_fill(outside, -torch.inf)
    ends = torch.nn.functional.pad(ends, (0, max_tokens - 1), value=-torch.inf)
    # (B, S, max_tokens): of the span that begins at s and has n + 1 tokens.
    scores = (begins[:, :, None] + ends.unfold(1, max_tokens, 1)).reshape(size, width * max_tokens)
    kept = min(N_BEST, scores.shape[1])
    top, places = scores.topk(kept, dim=1)
    starts = places // max_tokens
    spans = (top, starts.float(), (starts + places % max_tokens).float())
    filled = (
        torch.nn.functional.pad(part, (0, N_BEST - kept), value=value)
        for part, value in zip(spans, (-torch.inf, 0.0, 0.0), strict=True)
    )
    return torch.cat([(first[:, 0] + last[:, 0])[:, None], *filled], dim=1)


def _in_context(batch: Batch) -> torch.Tensor:
    """(B, S) True on the context's tokens: of the second text, all but the `[SEP]` that ends it."""
    import torch

    assert batch.token_type_ids is not None
    second = batch.token_type_ids.bool()
    return second & torch.nn.functional.pad(second[:, 1:], (0, 1), value=False)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Spans that may answer the questions of a part, best first within each question.

    Attributes:
        offsets: (Q+1,) the spans of question i stand from `offsets[i]` to `offsets[i+1]`.
        scores: (K,) of each span.
        begin, end: (K,) its characters in the context, from and up to.
        null_scores: (Q,) score of no answer: the lowest of the question's windows.
    """

    offsets: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    null_scores: npt.NDArray[np.float32]


def merge_windows(observed: npt.NDArray[np.float32], data: TokenSet) -> Candidates:
    """Returns the candidates of all windows of each question together.

    Args:
        observed: (N, K) as `best_spans` gives it, in the order of the part.
        data: the part, as `tokenise_windows` makes it.
    """
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


class GoldQuestions:
    """Contexts and right answers of a part, kept in a file next to its tokens.

    Args:
        file: written by `write`.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    @staticmethod
    def write(file: Path, questions: Sequence[Question]) -> None:
        """Writes what scoring needs of a part's questions."""
        numbers = {text: i for i, text in enumerate(dict.fromkeys(one.context for one in questions))}
        rows = [(numbers[one.context], [answer.text for answer in one.answers]) for one in questions]
        file.write_text(json.dumps({"contexts": list(numbers), "questions": rows}), encoding="utf-8")

    @cached_property
    def contexts(self) -> list[str]:
        """The context of each question."""
        texts = self._read["contexts"]
        return [texts[context] for context, _ in self._read["questions"]]

    @cached_property
    def golds(self) -> list[GoldAnswers]:
        """The right answers of each question."""
        return [GoldAnswers(answers) for _, answers in self._read["questions"]]

    @property
    def texts(self) -> list[list[str]]:
        """The right answers of each question as they were written; none = there is none."""
        return [answers for _, answers in self._read["questions"]]

    @cached_property
    def _read(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = json.loads(self._file.read_text(encoding="utf-8"))
        return found


class SpanScoring:
    """Exact match and F1 at the null threshold that is best for F1, or at one carried over.

    Args:
        data: the part.
        questions: their contexts and right answers.
        max_answer_tokens: longest answer.
    """

    def __init__(self, data: TokenSet, questions: GoldQuestions, max_answer_tokens: int) -> None:
        self._data, self._questions, self._max_tokens = data, questions, max_answer_tokens

    def observe(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns `best_spans` of each window."""
        return best_spans(logits, batch, self._max_tokens)

    @property
    def units(self) -> int:
        """Questions."""
        return int(self._data.columns["question"][-1]) + 1

    def judge(self, observed: npt.NDArray[np.float32], carried: Mapping[str, float]) -> Judged:
        """Returns the answer given, empty = none, and the right ones."""
        texts, null_scores = answers(merge_windows(observed, self._data), self._questions.contexts)
        given = [
            "" if null_score > carried["null_threshold"] else text
            for text, null_score in zip(texts, null_scores, strict=True)
        ]
        golds = self._questions.golds
        has_answer = np.array([gold.has_answer for gold in golds])
        f1 = np.array([gold.f1(text) for gold, text in zip(golds, texts, strict=True)])
        scores = rules.with_threshold(f1, null_scores, has_answer, carried["null_threshold"])
        return Judged(np.arange(len(given)), scores, given, self._questions.texts)

    def score(
        self, observed: npt.NDArray[np.float32], carried: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Returns the metrics; of the scores carried over it uses `null_threshold`."""
        texts, null_scores = answers(merge_windows(observed, self._data), self._questions.contexts)
        golds = self._questions.golds
        has_answer = np.array([gold.has_answer for gold in golds])
        exact = np.array([gold.exact(text) for gold, text in zip(golds, texts, strict=True)])
        f1 = np.array([gold.f1(text) for gold, text in zip(golds, texts, strict=True)])
        if carried is None:
            threshold = rules.best_threshold(f1, null_scores, has_answer)
        else:
            threshold = carried["null_threshold"]
        figures = rules.figures(
            rules.with_threshold(exact, null_scores, has_answer, threshold),
            rules.with_threshold(f1, null_scores, has_answer, threshold),
            has_answer,
        )
        if has_answer.any():
            # What is left when nothing has to be told about whether there is an answer.
            figures["f1_best_span"] = float(f1[has_answer].mean())
        return {**figures, "null_threshold": threshold}


def answers(candidates: Candidates, contexts: Sequence[str]) -> tuple[list[str], npt.NDArray[np.float64]]:
    """Returns the best text for each question, and how surely there is none.

    The best span of which something is left after normalisation answers: articles and
    punctuation alone say nothing. Where numbers are not finite nothing answers.

    Args:
        candidates: Candidates of Q questions.
        contexts: Context of each question.

    Returns:
        Q texts, and (Q,) null scores in [0, 1]: the logistic function of the score of no answer
        minus that of the text.
    """
    texts: list[str] = []
    scores = np.empty(len(contexts))
    for i, context in enumerate(contexts):
        texts.append("")
        scores[i] = -np.inf
        for span in range(int(candidates.offsets[i]), int(candidates.offsets[i + 1])):
            text = context[candidates.begin[span] : candidates.end[span]]
            told = bool(rules.normalise(text))
            if told or not texts[i]:
                texts[i], scores[i] = text, candidates.scores[span]
            if told:
                break
    difference = np.nan_to_num(candidates.null_scores - scores, nan=np.inf, posinf=np.inf, neginf=-np.inf)
    # The logistic function, in a form that does not overflow.
    return texts, 0.5 * (1.0 + np.tanh(0.5 * difference))
