"""Answers are about the test part where there is one, and say which part they are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from service.analysis.answers import BadQuestion
from service.analysis.question import Question
from service.analysis.run_table import RunTable
from service.domain.records import PointRow, Run
from tests.service.analysis.building import figures, run_table

Figures = dict[str, Any]


def scored(point: Mapping[str, Any], seed: int) -> Figures:
    """On the test part fp32 is the better one, on the validation part bf16."""
    of = figures(point, seed)
    test_score = of["accuracy"] - (0.05 if point["precision"] == "bf16" else 0.01)
    return {**of, "test_score": test_score, "validation_examples": 1000, "test_examples": 2500}


def evidence_on_test(**more: Any) -> RunTable:
    """A grid whose runs have scored their test parts."""
    made = run_table(of=scored, **more)
    summaries = {run.id: {"test_accuracy": run.test_score} for run in made.runs}
    return RunTable((), made.runs, summaries, made.data)


def test_the_headline_of_every_answer_is_that_of_the_test_part() -> None:
    question = Question(evidence_on_test())
    assert question.judged_by.name == "test_accuracy"
    assert question.validated_by.name == "accuracy"
    assert [metric.name for metric in question.compare().metrics][-1] == "test_accuracy"
    assert [metric.name for metric in question.frontier().metrics][-1] == "test_accuracy"
    assert question.effects().items[-1].model.metric == "test_accuracy"
    recommendation = question.recommend()
    assert "fp32" in recommendation.winner


@pytest.mark.parametrize(
    "ask",
    [
        lambda question: question.compare(),
        lambda question: question.score(),
        lambda question: question.frontier(),
        lambda question: question.effects(),
        lambda question: question.recommend(),
        lambda question: question.speedup(),
    ],
    ids=["compare", "score", "frontier", "effects", "recommend", "speedup"],
)
def test_every_answer_says_which_part_it_is_about(ask: Any) -> None:
    assert "judged by accuracy on test (2,500 examples)" in ask(Question(evidence_on_test())).notes
    rules = {id: {"test.rule": "none (version 1)"} for id in range(1, 13)}
    untested = run_table(data=rules)
    assert (
        "judged by accuracy on validation (25,000 examples): the spec has task.test: none"
        in ask(Question(untested)).notes
    )


def test_a_figure_of_the_validation_part_is_called_so() -> None:
    notes = Question(evidence_on_test()).compare(metrics=["accuracy", "cost_usd"]).notes
    assert "on validation, which also selected the checkpoints: accuracy; on test: test_accuracy" in notes


def test_runs_without_test_figures_among_others_make_validation_the_part() -> None:
    def change(run: Run) -> Figures:
        return {"test_score": None} if run.id == 2 else {}

    question = Question(run_table(of=scored, change=change))
    assert question.judged_by.name == "accuracy"
    assert any(note.endswith("without test figures: run:2") for note in question.compare().notes)


def test_time_to_a_target_is_read_from_evaluations_of_the_validation_part() -> None:
    made = evidence_on_test()
    curves = {run.id: [PointRow("accuracy", 5, 1, 150.0, 0.95)] for run in made.runs}
    answer = Question(made).speedup(curves=curves)
    assert answer.time_to is not None
    assert answer.time_to.metric == "accuracy"
    with pytest.raises(BadQuestion, match="test_accuracy has one value, at the end of a run"):
        Question(made).speedup(curves=curves, target=("test_accuracy", 0.9))
