"""How questions are read and answers said: whole sentences, as a user reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from scipy import stats

from service.analysis.answers import AnalysisError, BadQuestion, Claim, TimeToTarget
from service.analysis.claims import Family
from service.analysis.question import Question, claim_words
from service.analysis.ranking import Configuration
from service.analysis.recommend import Constraint
from service.analysis.speedup import ratio, times_to_target
from service.analysis.uncertainty import Resolution
from service.analysis.words import assignments, metric_of, one_assignment
from service.domain.metrics import Metric
from tests.service.analysis.building import compare, recommend, run_table

FP32, BF16, SIZE = {"precision": "fp32"}, {"precision": "bf16"}, "batch.global_size"
COSTS_A, COSTS_B = {0: 1.0, 1: 1.2, 2: 1.1}, {0: 2.0, 1: 2.3, 2: 2.2}


def test_assignments_are_read_by_name() -> None:
    assert assignments(["accuracy=0.005", " a=b = 1e3"], "margin") == {"accuracy": 0.005, "a=b": 1000.0}
    assert assignments(None, "margin") == {}
    assert one_assignment(["accuracy=0.9"], "target") == ("accuracy", 0.9)
    assert one_assignment([], "target") is None


@pytest.mark.parametrize(
    ("read", "says"),
    [
        (lambda: assignments(["accuracy"], "p"), "'accuracy' is not NAME=NUMBER, such as accuracy=0.005"),
        (lambda: assignments(["=1"], "p"), "'=1' is not NAME=NUMBER, such as accuracy=0.005"),
        (lambda: assignments(["a=x"], "p"), "'a=x' is not NAME=NUMBER, such as accuracy=0.005"),
        (
            lambda: assignments(["x" * 200], "p"),
            f"'{'x' * 100}' is not NAME=NUMBER, such as accuracy=0.005",
        ),
        (lambda: assignments(["a=1", "a=2"], "p"), "'a' is given twice; give it once"),
        (lambda: assignments([f"{'x' * 200}=1"] * 2, "p"), f"'{'x' * 100}' is given twice; give it once"),
        (lambda: one_assignment(["a=1", "b=1"], "p"), "2 values are given; give one"),
        (lambda: metric_of("cost_use", {}, "p"), "unknown metric 'cost_use'; did you mean 'cost_usd'?"),
        (
            lambda: metric_of("test_accuracy", {"accuracy": 0, "top5_accuracy": 0}, "p"),
            "none of these runs has test_accuracy; on the validation part it is accuracy",
        ),
        (
            lambda: metric_of("test_map", {}, "p"),
            "none of these runs has test_map; on the validation part it is map",
        ),
        (
            lambda: metric_of(f"mine:{'x' * 200}", {"mine": 0}, "p"),
            f"'{'x' * 100}' is not a direction; write mine:lower or mine:higher",
        ),
        (
            lambda: metric_of("mine", {"mine": 0}, "p"),
            "the direction of mine is unknown; write mine:lower or mine:higher",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_to_write(read: Callable[[], Any], says: str) -> None:
    with pytest.raises(BadQuestion) as refused:
        read()
    assert (str(refused.value), refused.value.parameter) == (says, "p")


def test_a_metric_has_the_direction_that_is_written_or_known() -> None:
    assert metric_of(" cost_usd ", {}) == Metric("cost_usd", "lower")
    assert metric_of("cost_usd:higher", {}) == Metric("cost_usd", "higher")
    assert metric_of("mine:lower", {"mine": 0}) == Metric("mine", "lower")
    assert metric_of("test_score", {"test_score": 0}, headline="validation_loss").better == "lower"
    with pytest.raises(BadQuestion) as refused:
        metric_of("x" * 200, {"mine": 0})
    assert refused.value.parameter == "metric"
    assert str(refused.value).startswith(f"unknown metric '{'x' * 100}'; ")


# -- Claims ----------------------------------------------------------------------------------


def claim(a: dict[int, float], b: dict[int, float], **asked: Any) -> Claim:
    return compare("cost_usd", a, b, better="lower", **asked)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (
            claim(COSTS_A, COSTS_B),
            "x (A) against y (B): A is better; cost_usd 1.1 against 2.167 "
            "(-49.2%, difference -1.24 to -0.891), p = 0.0015 "
            "(paired t-test over 3 seeds, whose spread is below the figure's resolution)",
        ),
        (
            claim({s + 5: v for s, v in COSTS_A.items()}, {0: 1.0, 1: 1.3}),
            "x (A) against y (B): undecided: about 162 more seeds needed; cost_usd 1.1 against 1.15 "
            "(-4.3%, difference -1.25 to 1.15), p = 0.8 (Welch's t-test over 3 and 2 seeds)",
        ),
        (
            claim({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0}, margin=0.5),
            "x (A) against y (B): undecided: about 5 more seeds needed; cost_usd 1 against 2 "
            "(-50.0%, difference -7.35 to 5.35), p = 0.3 "
            "(paired t-test over 2 seeds, whose spread is below the figure's resolution)",
        ),
        (
            claim({0: 0.5, 1: -0.5}, {0: 0.6, 1: -0.6}),
            "x (A) against y (B): undecided; cost_usd 0 against 0 (difference -1.27 to 1.27), p = 1 "
            "(paired t-test over 2 seeds)",
        ),
    ],
)
def test_a_claim_is_one_line(made: Claim, says: str) -> None:
    assert claim_words("x", "y", made) == says


def test_a_claim_says_within_what_sides_are_equivalent_and_which_way_the_table_points() -> None:
    near = claim(COSTS_A, {0: 1.001, 1: 1.2, 2: 1.101}, margin=0.05)
    assert claim_words("x", "y", near).startswith(
        "x (A) against y (B): equivalent; cost_usd 1.1 against 1.101 "
    )
    assert f", p = {near.p_equivalent:.2g} for within 0.05 (" in claim_words("x", "y", near)
    reversed = claim({0: 10.0, 1: 11.0, 2: 40.0}, {0: 10.5, 1: 11.51}, alpha=0.2)
    assert claim_words("x", "y", reversed).startswith(
        "x (A) against y (B): undecided, because the means over all seeds point the other way: about 1 more "
        "seed needed; "
    )


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        ({"a": {0: 1.0}}, "A has one seed with cost_usd; a claim needs at least two"),
        ({"b": {}}, "B has no seed with cost_usd; a claim needs at least two"),
    ],
)
def test_a_claim_that_cannot_be_made_is_refused_with_the_reason(ask: dict[str, Any], says: str) -> None:
    with pytest.raises(AnalysisError) as refused:
        claim(**{"a": COSTS_A, "b": COSTS_B, **ask})
    assert str(refused.value) == says


# -- Questions -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "parameter", "says"),
    [
        (lambda q: q.compare(a="precision=bf16"), "b", "give both a and b, or neither"),
        (lambda q: q.compare(b="precision=bf16"), "a", "give both a and b, or neither"),
        (
            lambda q: q.compare(a="precision=bf16", b="global_size=16"),
            "b", "a and b name different axes; name the same ones in both",
        ),
        (
            lambda q: q.compare(a="precision=bf16", b="precision=bf16"),
            "b", "a and b are the same; a comparison needs two sides",
        ),
        (lambda q: q.compare(claims=True, alpha=0.0), "alpha", "alpha 0 is not between 0 and 1"),
        (
            lambda q: q.score(strategy="balance", weights={"cost_usd": 1.0}),
            "strategy", "give a strategy or your own weights, not both",
        ),
        (
            lambda q: q.score(weights={"cost_usd": 1.0}, as_published=True),
            "as_published", "as_published applies to strategies; set a strategy, or drop as_published",
        ),
        (
            lambda q: q.score(weights={"cost_usd": 0.0}),
            "weight", "all weights are 0, so all configurations score the same",
        ),
        (
            lambda q: q.score(strategy="balanced"),
            "strategy", "unknown strategy 'balanced'; did you mean 'balance'?",
        ),
        (
            lambda q: q.speedup(baseline="precision=fp32"),
            "baseline", "'precision=fp32' names 2 configurations; name one, with all its axes",
        ),
        (lambda q: q.speedup(target=("f1x", 0.5)), "target", "unknown metric 'f1x'"),
        (lambda q: q.recommend(objective="x"), "objective", "unknown metric 'x'"),
        (lambda q: q.recommend(within={"x": 1.0}), "within", "unknown metric 'x'"),
        (lambda q: q.recommend(at_most={"x": 1.0}), "at_most", "unknown metric 'x'"),
        (lambda q: q.recommend(at_least={"x": 1.0}), "at_least", "unknown metric 'x'"),
    ],
)  # fmt: skip
def test_a_bad_question_names_its_part_and_what_to_ask(
    ask: Callable[[Question], object], parameter: str, says: str
) -> None:
    with pytest.raises(BadQuestion) as refused:
        ask(Question(run_table()))
    assert refused.value.parameter == parameter
    assert str(refused.value).split(";")[: says.count(";") + 1] == says.split(";")


def test_two_points_that_no_run_has_together_are_refused() -> None:
    table = run_table()
    kept = tuple(run for run in table.runs if run.point in ({**FP32, SIZE: 16}, {**BF16, SIZE: 32}))
    with pytest.raises(BadQuestion) as refused:
        Question(replace(table, runs=kept)).compare(
            a="precision=fp32,global_size=16", b="precision=bf16,global_size=16"
        )
    assert refused.value.parameter == "b"
    assert str(refused.value) == "no run has precision=bf16, batch.global_size=16 together"


def test_too_many_pairs_are_counted() -> None:
    axes = {"precision": ["fp32"], "batch.global_size": list(range(33))}
    with pytest.raises(BadQuestion) as refused:
        Question(run_table(axes)).compare(claims=True)
    assert refused.value.parameter == "by"
    assert str(refused.value) == (
        "33 configurations make 528 pairs, more than the limit of 500; group by an axis, or name two sides "
        "as a and b"
    )


# -- Speed-ups -------------------------------------------------------------------------------


def test_a_ratio_is_how_many_times_better_over_paired_seeds() -> None:
    assert ratio({}, {0: 1.0}, better="lower") is None
    assert ratio({0: 1.0, 1: 0.0}, {0: 1.0, 1: 1.0}, better="lower") is None
    alone = ratio({0: 3.0}, {5: 2.0}, better="lower")
    assert alone is not None
    assert (alone.ratio, alone.low, alone.high, alone.pairs) == (1.5, None, None, 0)
    paired = ratio({0: 1.0, 1: 2.0, 2: 90.0}, {0: 2.0, 1: 4.0}, better="higher")
    assert paired is not None
    assert (paired.ratio, paired.pairs) == (2.0, 2)
    apart = ratio({0: 1.0, 1: 3.0}, {1: 2.0, 5: 2.0}, better="lower")
    assert apart is not None
    assert (apart.ratio, apart.pairs) == (1.0, 0)


def test_the_ends_of_a_ratio_whose_seeds_agree_are_fiellers_with_the_least_spread() -> None:
    found = ratio({0: 20.0, 1: 20.0, 2: 20.0}, {0: 10.0, 1: 10.0, 2: 10.0}, better="lower")
    assert found is not None
    assert found.low is not None and found.high is not None
    for end in (found.low, found.high):  # Whole figures: half a step.
        reach = stats.t.ppf(0.975, 2) * math.sqrt((1 + end**2) * 0.5**2 / 3)
        assert abs(20.0 - end * 10.0) == pytest.approx(reach)


def test_times_to_a_target_are_means_of_configurations_that_always_reach_it() -> None:
    times = {"a": [10.0, 20.0], "b": [5.0], "c": [1.0, None], "d": [0.0]}
    assert times_to_target(times, "a") == (
        TimeToTarget("a", 2, 2, 15.0, 1.0), TimeToTarget("b", 1, 1, 5.0, 3.0),
        TimeToTarget("c", 1, 2, None, None), TimeToTarget("d", 1, 1, 0.0, None),
    )  # fmt: skip
    assert [row.speedup for row in times_to_target(times, "c")] == [None] * 4


# -- Recommendations -------------------------------------------------------------------------


def cell(label: str, costs: Any, accuracies: Any, failures: Any = None) -> Configuration:
    figures = {"cost_usd": dict(enumerate(costs)), "accuracy": dict(enumerate(accuracies))}
    return Configuration(label, {"size": label}, figures, failures or {})


WITHIN = Constraint("accuracy", "within_of_best", 0.005)
DEAR, CHEAP, GOOD = (2.0, 2.01, 2.03), (1.0, 1.01, 1.03), (0.9, 0.901, 0.902)
NEAR_2 = "Use a: cost_usd 2.013 with accuracy within 0.005 of the best. "
ALONE = "it is the only configuration that meets the constraints; it also has the best accuracy"


@pytest.mark.parametrize(
    ("cells", "constraints", "says", "excluded"),
    [
        (
            [cell("a", DEAR, GOOD), cell("b", [], [], {0: "oom", 1: "bug", 2: "oom"}), cell("c", [], []),
             cell("d", DEAR, [])],
            [WITHIN],
            f"{NEAR_2}Confidence: {ALONE}. 3 configurations were excluded.",
            {"b": "bug; oom", "c": "has no cost_usd", "d": "has no accuracy"},
        ),
        (
            [cell("a", DEAR, (0.7, 0.701, 0.702)), cell("b", CHEAP, (0.65, 0.652, 0.651))],
            [WITHIN],
            f"{NEAR_2}Confidence: {ALONE}; b (cost_usd -49.7%) was excluded by its mean, but is not shown to "
            "be worse on accuracy; about 1 more seed would decide. 1 configuration was excluded.",
            {"b": "accuracy 0.651 misses accuracy within 0.005 of the best (>= 0.696)"},
        ),
        (
            [cell("a", DEAR, GOOD), cell("b", (2.0, 2.01, 2.031), GOOD)],
            [WITHIN],
            f"{NEAR_2}The runner-up, b, has 2.014 (-0.0%). Confidence: undecided against the runner-up, "
            "p = 0.86 (paired t-test); about 582 more seeds would decide; it also has the best accuracy.",
            {},
        ),
        (
            [cell("a", [2.0], [0.9]), cell("b", [1.0], [0.899])],
            [WITHIN],
            "Use b: cost_usd 1 with accuracy within 0.005 of the best. The runner-up, a, has 2 (-50.0%). "
            "Confidence: not tested: A has one seed with cost_usd; a claim needs at least two; a loss of "
            "accuracy is not tested: A has one seed with accuracy; a claim needs at least two.",
            {},
        ),
        (
            [cell("a", DEAR, GOOD), cell("b", CHEAP, (0.5, 0.502, 0.501))],
            [Constraint("accuracy", "within_of_best", 0.6), Constraint("cost_usd", "at_most", 3.0)],
            "Use b: cost_usd 1.013 with accuracy within 0.6 of the best and cost_usd <= 3. The runner-up, a, "
            "has 2.013 (-49.7%). Confidence: better than the runner-up, p = 1.7e-05 (paired t-test); its "
            "accuracy is equivalent to the best within 0.6 (p = 0.016).",
            {},
        ),
    ],
)  # fmt: skip
def test_a_recommendation_is_said_whole(
    cells: list[Configuration], constraints: list[Constraint], says: str, excluded: dict[str, str]
) -> None:
    answer = recommend(cells, objective="cost_usd", constraints=constraints)
    assert (answer.text, answer.excluded) == (says, excluded)


def test_an_objective_is_equivalent_to_the_runner_ups_within_its_margin() -> None:
    cells = [cell("a", DEAR, (0.9, 0.9, 0.9)), cell("b", CHEAP, (0.899, 0.9, 0.9))]

    def family(metric: str, better: Any, margin: float | None) -> Family:
        figures = {each.label: each.figures[metric] for each in cells}
        return Family(metric, figures, better=better, margin=margin, resolution=Resolution(25_000))

    answer = recommend(cells, objective="accuracy", better="higher", family=family)
    assert answer.sure.startswith("equivalent to the runner-up within 0.005, p = ")
