from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainers.config import TaskConfig
from trainers.data.formats import Row
from trainers.data.layouts import TRAIN
from trainers.data.selection import Indices, held_out, numbers_of
from trainers.data.tokens import TokenSet
from trainers.errors import BadDataError
from trainers.model_kinds.heads import ClassHead
from trainers.tasks.base import Carried, Judged, Observed, Parts, Scoring
from trainers.tasks.dataset import DatasetTask, Tokenising, drawn, same_answer
from trainers.tasks.scores import Batch, Tensor, class_loss

Numbers = npt.NDArray[np.integer]
_CLASSES = ("other", "answer")


def ranking(scores: npt.NDArray[np.floating], relevant: Numbers, queries: Numbers) -> dict[str, float]:
    """Returns mean average precision and mean reciprocal rank over the queries with a relevant candidate.

    Of equal scores the later candidate comes first, as trec_eval orders them by descending document number: a
    model that cannot tell candidates apart gains nothing from their order in the file. NaN where a score is
    NaN. All arguments are (N,); raises `ValueError` without such a query.
    """
    _, precisions, best = by_query(scores, relevant, queries)
    if not len(precisions):
        raise ValueError("no query has a relevant candidate")
    if np.isnan(scores).any():
        return {"map": float("nan"), "mrr": float("nan")}
    return {"map": float(precisions.mean()), "mrr": float((1.0 / best).mean())}


def by_query(
    scores: npt.NDArray[np.floating], relevant: Numbers, queries: Numbers
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(Q,) numbers, average precisions and best ranks of queries with a relevant candidate; see `ranking`."""
    order = np.lexsort((-np.arange(len(scores)), -scores, queries))
    hits, of_query = relevant[order] == 1, queries[order]
    numbers, first, place = np.unique(of_query, return_index=True, return_inverse=True)
    ranks = np.arange(len(order)) - first[place] + 1
    cumulative = np.cumsum(hits)
    before = (cumulative - hits)[first]
    precision = (cumulative - before[place]) / ranks
    total = np.bincount(place, weights=hits, minlength=len(numbers))
    answerable = total > 0
    summed = np.bincount(place, weights=precision * hits, minlength=len(numbers))
    best = np.full(len(numbers), np.inf)
    np.minimum.at(best, place[hits], ranks[hits])
    return numbers[answerable].astype(np.int64), summed[answerable] / total[answerable], best[answerable]


def best_f1_threshold(scores: npt.NDArray[np.floating], labels: Numbers) -> float:
    """Returns the highest threshold at which calling scores that reach it positive gives the best F1.

    It is halfway between the scores that it separates, in float64; the upper one where no number is between
    them. Scores are finite, and a label is 1.
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
    """Returns precision, recall and F1 of class 1, and accuracy; 0 where nothing is predicted or true."""
    # numpy would round the threshold to fp32 scores' format, past one of those that it parts.
    predicted, actual = scores.astype(np.float64) >= threshold, labels == 1
    hits = int((predicted & actual).sum())
    return {
        "precision": hits / max(1, int(predicted.sum())),
        "recall": hits / max(1, int(actual.sum())),
        "f1": 2 * hits / max(1, int(predicted.sum() + actual.sum())),
        "accuracy": float((predicted == actual).mean()),
    }


@dataclass(frozen=True, slots=True)
class Pair:
    """A question and a sentence that may answer it; `key` is the question's id, or its text."""

    key: str
    texts: tuple[str, str]
    stratum: int  # 1 = the sentence answers


class WikiQa(DatasetTask[Pair, ClassHead]):
    """Tell the sentences that answer from the others; sizes count questions, an example is a sentence."""

    spellings = {"0": 0, "1": 1}  # noqa: RUF012

    def example(self, row: Row, task: TaskConfig) -> Pair:
        question = row.text(_named(row, "question", "Question"))
        sentence = row.text(_named(row, "sentence", "answer", "Sentence"))
        name = _named(row, "label", "Label")
        label = self.spellings.get(str(row.label(name)).strip())
        if label is None:
            raise row.refusal(
                name, f"unknown label {row.fields[name]!r}; use one of {', '.join(self.spellings)}"
            )
        number = row.fields.get(_named(row, "question_id", "QuestionID"))
        return Pair(str(number) if number not in (None, "") else question, (question, sentence), label)

    def units(self, examples: Sequence[Pair]) -> Sequence[str]:
        return [pair.key for pair in examples]

    def split_stratum(self, example: Pair) -> int:
        """Returns -1 when the sentence answers: a question has the smallest of its sentences."""
        return -example.stratum

    def unit_names(self, examples: Sequence[Pair]) -> Iterable[str]:
        return dict.fromkeys(pair.key for pair in examples)

    def unit_sources(self, examples: Sequence[Pair], places: Sequence[str]) -> list[list[str]]:
        sources: dict[str, list[str]] = {}
        for pair, place in zip(examples, places, strict=True):
            sources.setdefault(pair.key, []).append(place)
        return list(sources.values())

    def hold_out(self, whole: Sequence[Pair], task: TaskConfig) -> tuple[Indices, Indices]:
        """Holds out whole questions, with the same share of answerable ones."""
        numbers = numbers_of([pair.key for pair in whole])
        answerable = np.zeros(int(numbers.max()) + 1, dtype=np.int64)
        np.maximum.at(answerable, numbers, [pair.stratum for pair in whole])
        _, held = held_out(answerable, task.validation_fraction, task.split_seed)
        inside = np.isin(numbers, held)
        return np.flatnonzero(~inside), np.flatnonzero(inside)

    def draw(self, parts: Parts[Pair], task: TaskConfig) -> dict[str, list[Pair]]:
        questions = {part: _by_question(pairs) for part, pairs in parts.items()}
        chosen = drawn(questions, _answerable, task)
        for part, several in chosen.items():
            if part != TRAIN and not any(map(_answerable, several)):
                raise BadDataError(
                    f"the {part} part has no question with a sentence that answers it (label 1), so nothing "
                    "can be ranked; add questions"
                )
        return {part: [pair for question in several for pair in question] for part, several in chosen.items()}

    def review(self, parts: Parts[Pair], head: ClassHead, task: TaskConfig) -> Iterable[str]:
        return same_answer(parts, lambda pair: f"label {pair.stratum}", "add sentences of the other label")

    def tokenise(self, examples: Sequence[Pair], head: ClassHead, by: Tokenising) -> TokenSet:
        labels = np.array([pair.stratum for pair in examples], dtype=np.int64)
        tokens = by.texts(examples, labels)
        return replace(
            tokens, columns={**tokens.columns, "question": numbers_of([pair.key for pair in examples])}
        )

    def any_truth(self, head: ClassHead, task: TaskConfig) -> int:
        return 1  # So that no question is without an answer, which is not ranked.

    def head(self, parts: Parts[Pair], chosen: Parts[Pair], task: TaskConfig) -> ClassHead:
        return ClassHead(_CLASSES)

    def scoring(self, tokens: TokenSet, head: ClassHead, task: TaskConfig, gold: Path) -> Scoring:
        return RankingScoring(tokens.labels, tokens.columns["question"])

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        return class_loss(logits, batch, operator=self.cross_entropy)


class RankingScoring:
    """MAP and MRR of the sentences of each question, and the answers' class at its best threshold."""

    def __init__(self, labels: npt.NDArray[np.int64], questions: npt.NDArray[np.int64]) -> None:
        self._labels, self._questions = labels, questions
        self.units = len(np.unique(questions[labels == 1]))

    def observe(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns (B, 1) by how much the logit of the answers' class is the larger."""
        return logits.float().diff(dim=1)

    def score(self, observed: Observed, carried: Carried | None = None) -> dict[str, float]:
        """The threshold carried over is a probability."""
        scores = observed[:, 0].astype(np.float64)
        likely = _probability(scores)
        if carried is None:
            least = best_f1_threshold(scores, self._labels)
            threshold = float(_probability(least))
            if not np.array_equal(likely >= threshold, scores >= least):
                # Between neighbours a probability rounds: that of the lowest score above is as good.
                threshold = float(likely[scores >= least].min())
            of_class = positive_class(scores, self._labels, least)
        else:
            threshold = carried["threshold"]
            of_class = positive_class(likely, self._labels, threshold)
        return {**ranking(scores, self._labels, self._questions), **of_class, "threshold": threshold}

    def judge(self, observed: Observed, carried: Carried) -> Judged:
        """Returns each question's sentences from 0, best first, those that answer, and what is likely to."""
        questions, precisions, _ = by_query(observed[:, 0], self._labels, self._questions)
        ranked: list[list[int]] = []
        right: list[list[int]] = []
        likely: list[list[float]] = []
        for question in questions:
            members = np.flatnonzero(self._questions == question)
            ranked.append(np.lexsort((-np.arange(len(members)), -observed[members, 0])).tolist())
            right.append(np.flatnonzero(self._labels[members] == 1).tolist())
            likely.append(_probability(observed[members, 0].astype(np.float64)).round(6).tolist())
        return Judged(questions, precisions, ranked, right, probabilities=likely)


def _probability(log_odds: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Returns the probability of the second class by how much its logit is the larger."""
    # Below -700 the exponential leaves float64.
    return np.asarray(1.0 / (1.0 + np.exp(-np.maximum(log_odds, -700.0))))


def _named(row: Row, *names: str) -> str:
    return next((name for name in names if name in row.fields), names[0])


def _by_question(pairs: Sequence[Pair]) -> list[list[Pair]]:
    questions: dict[str, list[Pair]] = {}
    for pair in pairs:
        questions.setdefault(pair.key, []).append(pair)
    return list(questions.values())


def _answerable(question: Sequence[Pair]) -> int:
    return int(any(pair.stratum for pair in question))
