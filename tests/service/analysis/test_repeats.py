"""Repeats of a seed: one value of accuracy, several of time, and whether they agree."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from service.analysis.question import Question
from service.analysis.repeats import compared_values, means_by_seed, replicate_of, seed_of
from service.analysis.run_table import RunTable
from service.analysis.speedup import ratio
from service.domain.records import Run
from tests.service.analysis.building import compare, run

Draw = Callable[[str, int, int], dict[str, Any]]  # Figures of a precision, a seed and a repeat


def question(seeds: int, repeats: int, of: Draw, precisions: tuple[str, ...] = ("fp32", "bf16")) -> Question:
    runs: list[Run] = []
    for precision, repeat, seed in itertools.product(precisions, range(repeats), range(seeds)):
        figures = {"train_loss": 0.5, **of(precision, seed, repeat)}
        runs.append(run(len(runs) + 1, {"precision": precision}, seed, repeat=repeat, **figures))
    return Question(RunTable((), tuple(runs), {made.id: {"validation_examples": 1000} for made in runs}))


def noisy(size: float, of_seed: float = 0.0) -> Draw:
    """bf16 takes half as long; noise of each run, and what a seed does to one side alone."""
    generator = np.random.default_rng(4)  # Times of 3 to 5 repeats are alike in all seeds

    def draw(precision: str, seed: int, repeat: int) -> dict[str, Any]:
        apart = of_seed * seed * (precision == "bf16")
        base = 50.0 if precision == "bf16" else 100.0
        time_s = base * (1 + apart + size * float(generator.normal()))
        return {
            "total_time_s": time_s,
            "cost_usd": time_s,
            "accuracy": 0.9 + 0.01 * seed * (precision == "bf16"),
        }

    return draw


def test_each_repeat_is_a_value_of_time_and_none_of_accuracy() -> None:
    asked = question(3, 5, noisy(0.05))
    answer = asked.compare(metrics=["total_time_s", "accuracy"], claims=True)
    time, accuracy = (pair.claim for pair in answer.claims)
    assert time is not None
    assert accuracy is not None
    assert (time.pairs, time.seeds_a, accuracy.pairs, accuracy.seeds_a) == (15, 3, 3, 3)
    assert "paired t-test over 15 runs of 3 seeds" in answer.claims[0].text
    assert "paired t-test over 3 seeds" in answer.claims[1].text
    rows = answer.rows
    assert [row.figures["total_time_s"].n for row in rows if row.figures["total_time_s"]] == [15, 15]
    assert [row.figures["accuracy"].n for row in rows if row.figures["accuracy"]] == [3, 3]
    assert (rows[0].finished, rows[0].planned) == (15, 15)


def test_a_claim_over_runs_is_the_paired_t_test_of_the_runs() -> None:
    noise = np.random.default_rng(0).normal(size=(3, 4))
    noise -= 0.9 * noise.mean(axis=1, keepdims=True)  # Seeds are alike.
    keys = [seed + 2**32 * repeat for seed in range(3) for repeat in range(4)]
    a = dict(zip(keys, (10.0 + noise).ravel().tolist(), strict=True))
    b = dict.fromkeys(keys, 10.2)
    claim = compare("total_time_s", a, b, better="lower")
    assert claim.pairs == 12
    expected = stats.ttest_rel(list(a.values()), list(b.values())).pvalue
    assert claim.p_value == pytest.approx(expected)
    found = ratio(b, a, better="lower")
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert (found.low <= 1.0 <= found.high) == (claim.low <= 0.0 <= claim.high)


def test_accuracy_claims_are_those_of_single_runs_however_often_a_seed_runs() -> None:
    single = question(3, 1, noisy(0.05)).compare(metrics=["accuracy"], claims=True)
    repeated = question(3, 6, noisy(0.05)).compare(metrics=["accuracy"], claims=True)
    assert repeated.claims[0].claim == single.claims[0].claim
    assert repeated.rows[0].figures == single.rows[0].figures


def test_where_seeds_are_not_alike_a_test_of_time_is_over_seeds() -> None:
    asked = question(4, 3, noisy(0.001, of_seed=0.1))
    answer = asked.compare(metrics=["total_time_s"], claims=True)
    claim = answer.claims[0].claim
    assert claim is not None
    assert (claim.pairs, claim.seeds_a) == (4, 4)
    means = [
        means_by_seed(cell.figures["total_time_s"]) for cell in asked.cells([asked.metric("total_time_s")])
    ]
    expected = stats.ttest_rel(list(means[0].values()), list(means[1].values())).pvalue
    assert claim.p_value == pytest.approx(expected)


def test_one_seed_repeated_has_claims_of_time_for_this_seed_alone() -> None:
    answer = question(1, 5, noisy(0.01)).compare(metrics=["total_time_s", "accuracy"], claims=True)
    time, accuracy = answer.claims
    assert time.claim is not None
    assert time.claim.verdict == "B is better"
    assert "over 5 runs of 1 seed" in time.text
    assert accuracy.claim is None
    assert "B" in accuracy.text or "one seed" in accuracy.text
    assert any("hold for this seed" in note for note in answer.notes)


def test_other_seeds_are_compared_by_their_means_or_not_at_all() -> None:
    a = {0: 1.0, 2**32: 1.2, 1: 2.0, 1 + 2**32: 2.2}
    b = {5: 3.0, 5 + 2**32: 3.2, 6: 4.0}
    found = compared_values(a, b)
    assert found.pairs == 0
    assert found.a.tolist() == pytest.approx([1.1, 2.1])
    assert found.b.tolist() == pytest.approx([3.1, 4.0])
    point = {"precision": "fp32"}
    runs = [run(at, point, 0, repeat=at, total_time_s=1.0 + at) for at in range(3)]
    runs += [run(9 + at, {"precision": "bf16"}, 1, repeat=at, total_time_s=1.0 + at) for at in range(3)]
    answer = Question(RunTable((), tuple(runs))).compare(metrics=["total_time_s"], claims=True, untested=True)
    assert answer.claims[0].claim is None
    assert "share fewer than two runs with total_time_s" in answer.claims[0].text


def test_what_both_sides_kept_of_a_seed_is_paired() -> None:
    a = {0: 1.0, 2**32: 1.1, 2 * 2**32: 1.2, 1: 2.0}
    b = {2**32: 1.0, 2 * 2**32: 1.3, 1: 2.0, 1 + 2**32: 2.2}  # Seeds are alike.
    assert [seed_of(key) for key in compared_values(a, b).of_a] == [1, 0, 0]


def test_an_interaction_is_tested_over_the_same_units_as_a_claim() -> None:
    generator = np.random.default_rng(1)
    runs: list[Run] = []
    for precision, size, seed, repeat in itertools.product(("fp32", "bf16"), (16, 32), range(3), range(4)):
        point = {"precision": precision, "batch.global_size": size}
        time_s = 100 * float(np.exp(0.05 * generator.normal()))
        runs.append(run(len(runs) + 1, point, seed, repeat=repeat, total_time_s=time_s))
    (answer,) = Question(RunTable((), tuple(runs))).effects(metrics=["total_time_s"]).items
    logs = {
        (r.point["precision"], r.point["batch.global_size"], r.seed, r.repeat): np.log(r.total_time_s)
        for r in runs
    }
    contrast = np.array(
        [
            [logs["fp32", 16, s, r] - logs["fp32", 32, s, r] - logs["bf16", 16, s, r] + logs["bf16", 32, s, r]
             for r in range(4)]
            for s in range(3)
        ]
    )  # fmt: skip
    between = 4 * contrast.mean(axis=1).var(ddof=1)
    within = contrast.var(axis=1, ddof=1).mean()
    alike = between <= stats.f.ppf(0.3, 2, 9) * within
    over = contrast.ravel() if alike else contrast.mean(axis=1)
    term = answer.model.terms[-1]
    assert (term.axes, term.seeds) == (("precision", "batch.global_size"), 3)
    assert term.p_value == pytest.approx(stats.ttest_1samp(over, 0.0).pvalue)


def test_repeats_that_agree_are_said_to_and_time_has_its_noise() -> None:
    answer = question(2, 3, noisy(0.02)).compare()
    assert [(of.label, of.seed, of.runs, of.equal) for of in answer.agreement] == [
        (f"precision={precision}", seed, 3, True) for precision in ("fp32", "bf16") for seed in (0, 1)
    ]
    assert "repeats of a seed agree bitwise in train_loss and accuracy, in all 4 cases" in answer.notes
    spreads = [of.time_rsd_pct for of in answer.agreement]
    assert all(spread is not None and 0.1 < spread < 6.0 for spread in spreads)
    pooled = np.sqrt(np.mean([spread**2 for spread in spreads if spread is not None]))
    assert f"time varies by {pooled:.2g}% between repeats of a seed" in " ".join(answer.notes)


def test_the_last_bit_of_a_loss_tells_that_training_is_not_deterministic() -> None:
    def drifting(precision: str, seed: int, repeat: int) -> dict[str, Any]:
        unlike = precision == "bf16" and seed == 1 and repeat == 2
        return {
            "total_time_s": 10.0,
            "accuracy": 0.9,
            "train_loss": np.nextafter(0.5, 1.0) if unlike else 0.5,
        }

    answer = question(2, 3, drifting).compare()
    (unlike,) = (of for of in answer.agreement if not of.equal)
    assert (unlike.label, unlike.seed, list(unlike.differing)) == ("precision=bf16", 1, ["train_loss"])
    (note,) = (note for note in answer.notes if "bitwise" in note)
    assert "in 3 of 4 cases, not in precision=bf16 seed 1 (train_loss" in note


def test_without_repeats_nothing_is_said_of_them() -> None:
    answer = question(3, 1, noisy(0.02)).compare()
    assert answer.agreement == ()
    assert not any("repeat" in note for note in answer.notes)


def test_a_reused_run_is_no_repeat() -> None:
    runs = [run(1, {"p": 1}, 0, total_time_s=1.0), run(2, {"p": 1}, 0, repeat=1, total_time_s=2.0)]
    copied = [*runs, run(3, {"p": 1}, 0, repeat=2, reused_from=1, total_time_s=1.0)]
    (of,) = Question(RunTable((), tuple(copied))).compare(metrics=["total_time_s"]).agreement
    assert of.runs == 2
    assert replicate_of(runs[1], each=True) == 2**32


@pytest.mark.parametrize(
    ("seeds", "of_seed", "most"),
    [(1, 0.0, 0.07), (2, 1.5, 0.07), (3, 0.0, 0.07), (3, 1.0, 0.07), (5, 1.0, 0.07), (5, 5.0, 0.07)],
)
def test_equal_configurations_get_no_more_false_claims_of_time_by_repeats(
    seeds: int, of_seed: float, most: float
) -> None:
    """`of_seed` is what a seed does to one side alone, in standard deviations of the noise of a run."""
    generator = np.random.default_rng(7)
    keys = [seed + 2**32 * repeat for repeat in range(4) for seed in range(seeds)]
    claimed = 0
    for _ in range(400):
        a, b = (
            dict(zip(keys, (100 + generator.normal(size=(4, seeds)) + of_side).ravel().tolist(), strict=True))
            for of_side in of_seed * generator.normal(size=(2, seeds))
        )
        claimed += compare("total_time_s", a, b, better="lower").p_value < 0.05
    assert claimed / 400 <= most
