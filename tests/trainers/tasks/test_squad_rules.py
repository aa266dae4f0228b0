"""The official rules of SQuAD 2.0, and the official figures of three published systems."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.tasks.squad_v2.scoring import GoldAnswers, best_threshold, means, normalise, with_threshold

OFFICIAL = {
    "bert-single": (78.7501, 81.7837, 74.1228, 80.1987, 83.3642),
    "nlnet-single": (75.8275, 78.7778, 69.6188, 75.5277, 82.0185),
    "bidaf-sa-elmo": (65.7037, 67.8765, 61.4204, 65.7722, 69.9748),
}
"""In percent: exact match, F1, both of questions with an answer, and of those without."""


@pytest.fixture(scope="module")
def golds(real_data):
    tree = json.loads((real_data / "squad_v2" / "dev-v2.0.json").read_text(encoding="utf-8"))
    return {
        question["id"]: GoldAnswers([answer["text"] for answer in question["answers"]])
        for article in tree["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    }


@pytest.mark.parametrize("system", OFFICIAL)
def test_published_predictions_have_the_official_figures(golds, real_data, system):
    file = real_data / "squad_v2" / "official_predictions" / f"{system}.json"
    predictions = json.loads(file.read_text(encoding="utf-8"))
    found = means(
        np.array([gold.exact(predictions[number]) for number, gold in golds.items()]),
        np.array([gold.f1(predictions[number]) for number, gold in golds.items()]),
        np.array([gold.has_answer for gold in golds.values()]),
    )
    names = ("exact_match", "f1", "exact_match_has_answer", "f1_has_answer", "exact_match_no_answer")
    assert tuple(round(100 * found[name], 4) for name in names) == OFFICIAL[system]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat!", "cat"),
        ("an apple, a pear", "apple pear"),
        ("theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("a\u00a0b\tc", "b c"),
        ("“curly” — quotes", "“curly” — quotes"),
        ("the-end", "theend"),
        ("The", ""),
    ],
)
def test_normalisation(text, expected):
    assert normalise(text) == expected


def test_scores_are_the_best_over_answers():
    gold = GoldAnswers(["a tall tree", "oak"])
    assert (gold.exact("The Oak."), gold.f1("The Oak.")) == (1.0, 1.0)
    assert (gold.exact("tree"), gold.f1("tree")) == (0.0, pytest.approx(2 / 3))


def test_repeated_words_count_as_often_as_both_have_them():
    assert GoldAnswers(["b b c"]).f1("b b b") == pytest.approx(2 / 3)


def test_answers_that_normalise_to_nothing_are_dropped():
    assert GoldAnswers(["the", "oak"]).f1("") == 0.0
    nothing = GoldAnswers(["the"])
    assert (nothing.exact(""), nothing.f1(""), nothing.has_answer) == (1.0, 1.0, True)


def test_no_answer_is_right_only_when_nothing_is_said():
    gold = GoldAnswers([])
    assert (gold.exact(""), gold.f1("oak"), gold.has_answer) == (1.0, 0.0, False)


def test_threshold_is_strict():
    scores, has_answer = np.array([0.5, 0.0]), np.array([True, False])
    assert with_threshold(scores, np.array([1.0, 1.0]), has_answer, 1.0).tolist() == [0.5, 0.0]
    assert with_threshold(scores, np.array([0.4, 0.6]), has_answer, 0.5).tolist() == [0.5, 1.0]


def test_a_group_without_questions_has_no_figures():
    everything = means(np.array([1.0]), np.array([1.0]), np.array([True]))
    assert set(everything) == {"exact_match", "f1", "exact_match_has_answer", "f1_has_answer"}
    nothing = means(np.array([1.0]), np.array([1.0]), np.array([False]))
    assert set(nothing) == {"exact_match", "f1", "exact_match_no_answer"}


questions = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.integers(0, 6).map(lambda n: n / 6), st.booleans()),
    min_size=1,
    max_size=30,
)


@given(questions)
def test_tuned_threshold_is_the_best_there_is(rows):
    scores, nulls, has_answer = (np.array(column) for column in zip(*rows, strict=True))
    scores = np.where(has_answer, scores, 0.0)  # a text is wrong where there is no answer

    def reached(threshold):
        return with_threshold(scores, nulls, has_answer, threshold).mean()

    found = reached(best_threshold(scores, nulls, has_answer))
    assert found == pytest.approx(max(reached(threshold) for threshold in (0.0, *nulls)))


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30), st.randoms())
def test_tuned_threshold_is_the_scripts_where_null_scores_differ(rows, random):
    """The script's search, in its own order: one question at a time from the surest answer on."""
    scores, has_answer = (np.array(column) for column in zip(*rows, strict=True))
    scores = np.where(has_answer, scores, 0.0)
    nulls = np.array(random.sample(range(1, 1000), len(rows))) / 1000
    current = best = (~has_answer).sum()
    threshold = 0.0
    for i in np.argsort(nulls):
        current += scores[i] if has_answer[i] else -1
        if current > best + 1e-9:
            best, threshold = current, nulls[i]
    for each in (best_threshold(scores, nulls, has_answer), threshold):
        reached = with_threshold(scores, nulls, has_answer, each).sum()
        assert reached == pytest.approx(best, abs=1e-8)  # The search ignores smaller gains.
