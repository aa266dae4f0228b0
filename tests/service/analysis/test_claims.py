"""Claims: known answers, stated rules, and error rates on simulated truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from service.analysis import AnalysisError
from service.analysis.claims import BOOTSTRAP_FROM, WILCOXON_FROM, compare, compare_pairs, holm
from service.analysis.records import Claim

TIMES_A = {0: 10.0, 1: 11.0, 2: 9.5, 3: 10.5, 4: 10.2}
TIMES_B = {0: 20.1, 1: 21.3, 2: 19.4, 3: 20.8, 4: 20.0}


def test_a_clear_difference_is_a_win_for_the_better_side() -> None:
    claim = compare("total_time_s", TIMES_A, TIMES_B, better="lower")
    assert claim.verdict == "A is better"
    assert claim.difference == pytest.approx(-10.08)
    assert claim.relative == pytest.approx(-10.08 / 20.32)
    assert claim.low < claim.difference < claim.high < 0
    assert compare("accuracy", TIMES_A, TIMES_B, better="higher").verdict == "B is better"


def test_the_same_seeds_are_paired_and_agree_with_scipy() -> None:
    claim = compare("t", TIMES_A, TIMES_B, better="lower")
    assert (claim.test, claim.pairs) == ("paired t-test", 5)
    expected = stats.ttest_rel(list(TIMES_A.values()), list(TIMES_B.values())).pvalue
    assert claim.p_value == pytest.approx(expected)


def test_other_seeds_are_compared_by_welch_and_agree_with_scipy() -> None:
    b = {seed + 100: value for seed, value in TIMES_B.items() if seed < 4}
    claim = compare("t", TIMES_A, b, better="lower")
    assert (claim.test, claim.pairs) == ("Welch's t-test", 0)
    expected = stats.ttest_ind(list(TIMES_A.values()), list(b.values()), equal_var=False).pvalue
    assert claim.p_value == pytest.approx(expected)


def test_many_pairs_are_compared_by_wilcoxon() -> None:
    generator = np.random.default_rng(0)
    a = dict(enumerate(generator.normal(0.0, 1.0, WILCOXON_FROM)))
    b = dict(enumerate(generator.normal(2.0, 1.0, WILCOXON_FROM)))
    assert compare("t", a, b, better="lower").test == "Wilcoxon signed-rank test"


def test_accuracy_within_the_margin_is_equivalent() -> None:
    a = {seed: 0.900 + 0.001 * seed for seed in range(5)}
    b = {seed: 0.901 + 0.001 * seed + 0.0005 * (seed % 2) for seed in range(5)}
    claim = compare("accuracy", a, b, better="higher", margin=0.005)
    assert claim.verdict == "equivalent"
    assert claim.p_equivalent is not None
    assert claim.p_equivalent < 0.05


def test_noise_is_undecided_and_says_about_how_many_more_seeds() -> None:
    a = {0: 1.0, 1: 2.0, 2: 3.0}
    b = {0: 1.9, 1: 1.6, 2: 3.3}
    claim = compare("t", a, b, better="lower")
    assert claim.verdict == "undecided"
    assert claim.more_seeds is not None
    assert claim.more_seeds > 3


def test_the_same_rows_always_give_the_same_interval() -> None:
    a = {seed: math.sin(seed) for seed in range(BOOTSTRAP_FROM)}
    b = {seed: math.cos(seed) for seed in range(BOOTSTRAP_FROM)}
    first, second = (compare("t", a, b, better="lower") for _ in range(2))
    assert first == second
    assert first.interval == "bootstrap-t"


def test_one_disturbed_run_of_five_does_not_blow_the_interval_up() -> None:
    """Seconds of five seeds, measured: the first run of one side paid for the start of its worker."""
    a = {0: 94.9, 1: 73.7, 2: 73.6, 3: 74.2, 4: 74.4}
    b = {0: 78.3, 1: 77.4, 2: 78.9, 3: 79.8, 4: 79.9}
    claim = compare("total_time_s", a, b, better="lower")
    assert (claim.verdict, claim.interval) == ("undecided", "Student's t")
    assert claim.high - claim.low < 2 * (94.9 - 73.6)


def test_zero_variance_is_exact_not_a_division_by_zero() -> None:
    a, b = {0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0}
    claim = compare("t", a, b, better="lower")
    assert (claim.verdict, claim.interval, claim.low, claim.high) == ("A is better", "exact", -1.0, -1.0)
    assert compare("t", a, a, better="lower").verdict == "undecided"
    assert compare("t", a, a, better="lower", margin=0.1).verdict == "equivalent"


def test_one_seed_allows_no_claim() -> None:
    with pytest.raises(AnalysisError, match="B has one seed with accuracy; no claim"):
        compare("accuracy", {0: 0.9, 1: 0.9}, {0: 0.8}, better="higher")


def test_a_value_that_is_not_finite_is_named() -> None:
    with pytest.raises(AnalysisError, match="A has a loss that is not finite at seed 1"):
        compare("loss", {0: 0.9, 1: math.nan}, TIMES_B, better="lower")


def test_holm_agrees_with_the_worked_example() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_all_pairs_are_corrected_together() -> None:
    sides = {"a": TIMES_A, "b": TIMES_B, "c": {seed: value + 0.3 for seed, value in TIMES_A.items()}}
    pairs = [("a", "b"), ("a", "c"), ("b", "c")]
    claims = compare_pairs("t", sides, pairs, better="lower")
    alone = [compare("t", sides[one], sides[other], better="lower") for one, other in pairs]
    found = [claim for claim in claims.values() if isinstance(claim, Claim)]
    assert [claim.p_value for claim in found] == holm([claim.p_value for claim in alone])
    assert [claim.claims for claim in found] == [3, 3, 3]


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_false_claims_and_intervals_hold_their_rates_on_simulated_truth(seeds: int) -> None:
    """400 simulated pairs without a difference."""
    generator = np.random.default_rng(seeds)
    trials, wrong, covered = 400, 0, 0
    for _ in range(trials):
        noise = generator.normal(0.0, 1.0, (2, seeds))
        claim = compare("t", dict(enumerate(noise[0])), dict(enumerate(noise[1])), better="lower")
        wrong += claim.verdict != "undecided"
        covered += claim.low <= 0.0 <= claim.high
    # Three binomial standard errors around the stated 5% and 95%.
    slack = 3 * math.sqrt(0.05 * 0.95 / trials)
    assert wrong / trials <= 0.05 + slack
    assert abs(covered / trials - 0.95) <= slack
