"""Every score of every task against scikit-learn, SciPy, seqeval, and the rules of SQuAD's script."""

from __future__ import annotations

import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from seqeval import metrics as seqeval
from seqeval import scheme
from sklearn import metrics

from tests.drawing import scaled
from trainers.data.batches import Batch
from trainers.data.tokens import TokenSet
from trainers.model_kinds.heads import IGNORED
from trainers.tasks import TASKS
from trainers.tasks.classification.task import ClassScoring, SeveralLabelsScoring
from trainers.tasks.mlm.task import GuessScoring
from trainers.tasks.regression.task import NumberScoring
from trainers.tasks.scores import classification
from trainers.tasks.squad_v2.scoring import GoldQuestions, SpanScoring
from trainers.tasks.tariff.task import CodeScoring
from trainers.tasks.token_classification.task import EntityScoring
from trainers.tasks.wikiqa.task import RankingScoring

Scores = Mapping[str, float]
Case = Callable[[np.random.Generator], tuple[Scores, Scores]]
NOT_OF_PREDICTIONS = {"validation_loss", "sequence_ms"}
ZERO: dict[str, Any] = {"zero_division": 0}


def scored(scoring: Any, logits: torch.Tensor, batch: Batch | None = None) -> Scores:
    found: Scores = scoring.score(scoring.observe(logits, batch).numpy())
    return found


def numbers(rng: np.random.Generator, *shape: int, ties: bool = True) -> torch.Tensor:
    """Logits, some of them equal."""
    drawn = rng.normal(size=shape)
    return torch.from_numpy((np.round(drawn) if ties and rng.random() < 0.3 else drawn).astype(np.float32))


def macro(true: Any, predicted: Any, **options: Any) -> Scores:
    """Macro figures over classes that occur in labels or predictions."""
    found = metrics.precision_recall_fscore_support(true, predicted, average="macro", **ZERO, **options)
    return dict(zip(("precision_macro", "recall_macro", "f1"), map(float, found[:3]), strict=True))


def calibration(confidence: np.ndarray, right: np.ndarray) -> float:
    """Expected calibration error, bin by bin (Guo et al. 2017)."""
    total = 0.0
    for low in range(15):
        inside = [i for i, one in enumerate(confidence) if low == min(14, int(15 * float(one)))]
        if inside:
            gap = np.mean([float(confidence[i]) for i in inside]) - np.mean([right[i] for i in inside])
            total += len(inside) / len(confidence) * abs(gap)
    return float(total)


def of_one_label(rng: np.random.Generator) -> tuple[Scores, Scores]:
    classes, count = int(rng.integers(2, 6)), int(rng.integers(1, 40))
    labels, logits = rng.integers(0, classes, count), numbers(rng, count, classes)
    predicted = logits.argmax(1).numpy()
    micro = {
        f"{name}_micro": float(function(labels, predicted, average="micro", **ZERO))
        for name, function in (
            ("precision", metrics.precision_score),
            ("recall", metrics.recall_score),
            ("f1", metrics.f1_score),
        )
    }
    return scored(ClassScoring(labels, "abcdef"[:classes]), logits), {
        "accuracy": float(metrics.accuracy_score(labels, predicted)),
        **macro(labels, predicted),
        **micro,
        "matthews": float(metrics.matthews_corrcoef(labels, predicted)),
        "calibration_error": calibration(logits.softmax(1).max(1).values.numpy(), predicted == labels),
    }


def of_several_labels(rng: np.random.Generator) -> tuple[Scores, Scores]:
    classes, count = int(rng.integers(2, 6)), int(rng.integers(1, 40))
    labels = (rng.random((count, classes)) < rng.random(classes)).astype(np.int64)
    logits = numbers(rng, count, classes, ties=False)
    likely = logits.sigmoid().numpy()
    predicted = (likely > 0.5).astype(np.int64)
    occurs = np.flatnonzero((labels + predicted).any(0))
    shown = {"labels": occurs.tolist()}
    micro = metrics.precision_recall_fscore_support(labels, predicted, average="micro", **ZERO)
    return scored(SeveralLabelsScoring(labels, "abcdef"[:classes]), logits), {
        "accuracy": float(metrics.accuracy_score(labels, predicted)),
        **(
            macro(labels, predicted, **shown)
            if len(occurs)
            else dict.fromkeys(("precision_macro", "recall_macro", "f1"), 0.0)
        ),
        **dict(zip(("precision_micro", "recall_micro", "f1_micro"), map(float, micro[:3]), strict=True)),
        "matthews": float(metrics.matthews_corrcoef(labels.ravel(), predicted.ravel())),
        "calibration_error": calibration(
            np.where(predicted == 1, likely, 1 - likely).ravel(), (predicted == labels).ravel()
        ),
    }


def of_classes(rng: np.random.Generator) -> tuple[Scores, Scores]:
    return (of_one_label if rng.random() < 0.5 else of_several_labels)(rng)


def of_reviews(rng: np.random.Generator) -> tuple[Scores, Scores]:
    count = int(rng.integers(1, 40))
    labels, logits = rng.integers(0, 2, count), numbers(rng, count, 2)
    predicted = logits.argmax(1).numpy()
    declared = TASKS["imdb"].scores
    return scored(ClassScoring(labels, ("neg", "pos"), declared), logits), {
        "accuracy": float(metrics.accuracy_score(labels, predicted)),
        **macro(labels, predicted),
    }


def of_codes(rng: np.random.Generator) -> tuple[Scores, Scores]:
    codes = np.unique(rng.choice([1, 2, 11, 12, 22], 9) * 10**8 + rng.integers(0, 3, 9) * 10101)
    count, unseen = int(rng.integers(1, 40)), 99 * 10**8
    right = rng.choice([*codes, unseen], count)
    logits = numbers(rng, count, len(codes), ties=False)
    predicted = codes[logits.argmax(1).numpy()]
    top = np.argsort(-logits.numpy(), axis=1)[:, :5]
    as_text = [f"{code:010d}" for code in right], [f"{code:010d}" for code in predicted]
    levels = {
        f"accuracy_level_{level}": float(
            metrics.accuracy_score(*([text[:level] for text in column] for column in as_text))
        )
        for level in (2, 4, 6, 8)
    }
    return scored(CodeScoring(right, codes.tolist(), 10), logits), {
        "accuracy": float(metrics.accuracy_score(right, predicted)),
        **macro(right, predicted),
        "top5_accuracy": float(np.mean([own in codes[row] for own, row in zip(right, top, strict=True)])),
        **levels,
        "unseen_pct": 100.0 * float(np.mean(right == unseen)),
    }


def of_numbers(rng: np.random.Generator) -> tuple[Scores, Scores]:
    count = int(rng.integers(3, 40))
    labels = np.round(rng.normal(size=count), 1)
    predicted = numbers(rng, count, 1)
    ours = predicted[:, 0].numpy().astype(np.float64)
    varied = len(set(ours)) > 1 and len(set(labels)) > 1
    return scored(NumberScoring(labels, None), predicted), {
        "pearson": float(stats.pearsonr(ours, labels).statistic) if varied else 0.0,
        "spearman": float(stats.spearmanr(ours, labels).statistic) if varied else 0.0,
        "rmse": float(metrics.root_mean_squared_error(labels, ours)),
    }


TAGS = ("O", "B-a", "I-a", "B-b", "I-b")


def of_tags(rng: np.random.Generator) -> tuple[Scores, Scores]:
    counts = rng.integers(1, 9, int(rng.integers(1, 6)))
    true = [rng.choice(TAGS, count).tolist() for count in counts]
    predicted = [
        [tag if rng.random() < 0.6 else str(rng.choice(TAGS)) for tag in sentence] for sentence in true
    ]
    observed = np.full((len(counts), int(counts.max())), -1.0, dtype=np.float32)
    for row, sentence in zip(observed, predicted, strict=True):
        row[: len(sentence)] = [TAGS.index(tag) for tag in sentence]
    tags = np.array([TAGS.index(tag) for tag in chain(*true)])
    scoring = EntityScoring(tags, counts, np.ones(len(tags), dtype=np.bool_), TAGS)
    strict = {"mode": "strict", "scheme": scheme.IOB2, **ZERO}
    some = any(tag.startswith("B") for tag in chain(*true, *predicted))

    def entity(function: Any, **options: Any) -> float:
        return float(function(true, predicted, **strict, **options)) if some else 0.0

    return scoring.score(observed), {
        "entity_f1": entity(seqeval.f1_score),
        "entity_precision": entity(seqeval.precision_score),
        "entity_recall": entity(seqeval.recall_score),
        "entity_f1_macro": entity(seqeval.f1_score, average="macro"),
        "tag_accuracy": float(metrics.accuracy_score([*chain(*true)], [*chain(*predicted)])),
    }


def of_answers(rng: np.random.Generator) -> tuple[Scores, Scores]:
    count = int(rng.integers(1, 40))
    questions, labels = rng.integers(0, 6, count), rng.integers(0, 2, count)
    labels[0] = 1
    logits = numbers(rng, count, 2)
    odds = logits.diff(dim=1)[:, 0].numpy()
    precisions, reciprocals = [], []
    for question in sorted(set(questions)):
        mine = np.flatnonzero(questions == question)
        if not labels[mine].any():
            continue
        # Of equal scores the later one is the higher, as trec_eval orders them.
        order = sorted(range(len(mine)), key=lambda i: (odds[mine[i]], i))
        place = np.argsort(order)
        precisions.append(metrics.average_precision_score(labels[mine], place))
        reciprocals.append(1.0 / (len(mine) - max(place[labels[mine] == 1])))
    precision, recall, _ = metrics.precision_recall_curve(labels, odds)
    best = float(np.max(2 * precision * recall / np.maximum(precision + recall, 1e-30)))
    found = scored(RankingScoring(labels, questions), logits)
    predicted = 1.0 / (1.0 + np.exp(-odds.astype(np.float64))) >= found["threshold"]
    assert found["f1"] == pytest.approx(best)
    return found, {
        "map": float(np.mean(precisions)),
        "mrr": float(np.mean(reciprocals)),
        "precision": float(metrics.precision_score(labels, predicted, **ZERO)),
        "recall": float(metrics.recall_score(labels, predicted, **ZERO)),
        "f1": best,
        "accuracy": float(metrics.accuracy_score(labels, predicted)),
        "threshold": found["threshold"],
    }


def of_guesses(rng: np.random.Generator) -> tuple[Scores, Scores]:
    shape = int(rng.integers(1, 6)), int(rng.integers(2, 9))
    labels = np.where(rng.random(shape) < 0.5, rng.integers(0, 7, shape), IGNORED)
    labels[0, 0] = 3
    right = labels[labels != IGNORED]
    logits = numbers(rng, len(right), 7)
    given = torch.from_numpy(labels)
    size = given.numel()
    guessed = (given != IGNORED).flatten().nonzero()[:, 0]
    batch = Batch(given, None, None, given, torch.arange(shape[0]), shape[0], size, size, guessed=guessed)
    ranks = stats.rankdata(-logits.numpy(), axis=1)[np.arange(len(right)), right]
    return scored(GuessScoring(shape[0]), logits, batch), {
        "accuracy": float(np.mean(ranks == 1.0)),
        "mrr": float(np.mean(1.0 / ranks)),
    }


# SQuAD 2.0 by its official script, question by question; its percent are fractions here.

WORDS = ("red", "fox", "the", "an", "owl", "Red,", "...", "U.S.A.")


def squad_normal(text: str) -> list[str]:
    without = "".join(letter for letter in text.lower() if letter not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", without).split()


def squad_f1(gold: str, answer: str) -> float:
    ours, theirs = squad_normal(gold), squad_normal(answer)
    if not ours or not theirs:
        return float(ours == theirs)
    same = sum((Counter(ours) & Counter(theirs)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(theirs), same / len(ours)
    return 2 * precision * recall / (precision + recall)


def of_questions(rng: np.random.Generator) -> tuple[Scores, Scores]:
    most, width = 3, 9
    contexts, golds, chars, questions, logits, best = [], [], [], [], [], []
    for number in range(int(rng.integers(1, 7))):
        words = rng.choice(WORDS, 6).tolist()
        context = " ".join(words)
        ends = np.cumsum([len(word) + 1 for word in words]) - 1
        places = [(int(end) - len(word), int(end)) for word, end in zip(words, ends, strict=True)]
        begin = int(rng.integers(0, 6))
        answered = rng.random() < 0.6
        golds.append([" ".join(words[begin : begin + int(rng.integers(1, 4))])] if answered else [])
        contexts.append(context)
        spans, nulls = [], []
        for _ in range(int(rng.integers(1, 3))):
            window = numbers(rng, width, 2, ties=False)
            questions.append(number)
            logits.append(window)
            # Two tokens of the question, six of the context, one that ends it.
            chars.append(np.array([(0, 0)] * 2 + places + [(0, 0)]))
            first, last = window.numpy().T
            nulls.append(first[0] + last[0])
            own = [
                (first[i] + last[j], context[places[i - 2][0] : places[j - 2][1]])
                for i in range(2, 8)
                for j in range(i, min(8, i + most))
            ]
            spans += sorted(own, reverse=True)[:20]
        spans.sort(key=lambda span: span[0], reverse=True)
        score, text = next((span for span in spans if squad_normal(span[1])), spans[0])
        best.append((text, 1.0 / (1.0 + np.exp(-(float(min(nulls)) - float(score))))))
    right = [[gold for gold in several if squad_normal(gold)] or [""] for several in golds]
    f1 = np.array(
        [max(squad_f1(gold, text) for gold in own) for (text, _), own in zip(best, right, strict=True)]
    )
    exact = np.array(
        [
            max(float(squad_normal(gold) == squad_normal(text)) for gold in own)
            for (text, _), own in zip(best, right, strict=True)
        ]
    )
    has_answer = np.array([bool(several) for several in golds])
    likely = np.array([one for _, one in best])

    def at(values: np.ndarray, threshold: float) -> np.ndarray:
        return np.where(likely - threshold > 1e-9, ~has_answer, values)  # the logistic function rounds

    ids = np.array(questions)
    data = TokenSet(
        np.zeros(len(ids) * width, dtype=np.int64),
        np.arange(len(ids) + 1) * width,
        np.zeros((len(ids), 2), dtype=np.int64),
        columns={
            "question": ids,
            "chars_at": np.arange(len(ids)) * width,
            "chars": np.concatenate(chars),
        },
    )
    types = torch.zeros(len(ids), width, dtype=torch.int64)
    types[:, 2:] = 1
    size = types.numel()
    batch = Batch(types, None, types, types, torch.arange(len(ids)), len(ids), size, size)
    found = scored(SpanScoring(data, GoldQuestions(contexts, golds), most), torch.stack(logits), batch)
    every = [float(at(f1, threshold).mean()) for threshold in (0.0, *likely)]
    threshold = found["null_threshold"]
    assert found["f1"] == pytest.approx(max(every))
    expected = {
        "exact_match": at(exact, threshold).mean(),
        "f1": max(every),
        "null_threshold": threshold,
    }
    if has_answer.any():
        expected["exact_match_has_answer"] = at(exact, threshold)[has_answer].mean()
        expected["f1_has_answer"] = at(f1, threshold)[has_answer].mean()
        expected["f1_best_span"] = f1[has_answer].mean()
    if not has_answer.all():
        expected["exact_match_no_answer"] = at(exact, threshold)[~has_answer].mean()
    return found, {name: float(value) for name, value in expected.items()}


CASES: Mapping[str, Case] = {
    "classification": of_classes,
    "imdb": of_reviews,
    "tariff": of_codes,
    "regression": of_numbers,
    "token_classification": of_tags,
    "squad_v2": of_questions,
    "wikiqa": of_answers,
    "mlm": of_guesses,
}


@pytest.mark.parametrize("task", TASKS)
def test_every_score_is_that_of_an_independent_implementation(task: str) -> None:
    seen: set[str] = set()

    @settings(max_examples=scaled(60), deadline=None)
    @given(st.integers(0, 2**32 - 1))
    def check(seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scikit-learn's, of classes that do not occur
            found, expected = CASES[task](np.random.default_rng(seed))
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
        seen.update(found)

    check()
    assert seen == TASKS[task].scores.keys() - NOT_OF_PREDICTIONS


def test_a_class_that_nobody_predicts_scores_zero_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scores = classification(np.array([0, 0]), np.array([0, 1]), 2)
    assert scores["precision_macro"] == 0.25
