"""Every statistic against an independent implementation, over random figures (scipy, statsmodels, pandas)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas import DataFrame
from scipy import stats
from statsmodels.formula.api import ols
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.anova import anova_lm
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.power import TTestIndPower, TTestPower
from statsmodels.stats.weightstats import ttost_ind, ttost_paired
from statsmodels.tools import add_constant

from service.analysis.answers import Criterion
from service.analysis.claims import Family, holm
from service.analysis.comparison import compare as side_by_side
from service.analysis.drift import drift
from service.analysis.ranking import frontier, rank
from service.analysis.run_table import RunTable
from service.analysis.speedup import ratio
from service.analysis.uncertainty import Resolution, of_pairs, residual_square, with_examples
from service.domain.metrics import Metric
from tests.drawing import scaled
from tests.service.analysis.building import candidate, compare, run

Values = npt.NDArray[np.float64]
random = st.integers(0, 2**32)
seeds = st.integers(5, 20)  # Three or four may agree to within what a machine repeats, by chance.
small = settings(max_examples=scaled(40), deadline=None)


def drawn(random: int, *shape: int, mean: float = 100.0, sd: float = 5.0) -> Values:
    """Normal figures that spread more than a machine repeats."""
    return np.random.default_rng(random).normal(mean, sd, shape)


def by_seed(values: Values, first: int = 0) -> dict[int, float]:
    """Figures by seed."""
    return {first + seed: float(value) for seed, value in enumerate(values)}


@small
@given(random=random, count_a=seeds, count_b=seeds, shift=st.floats(-20, 20))
def test_other_seeds_are_welchs_test_of_scipy(random: int, count_a: int, count_b: int, shift: float) -> None:
    a, b = drawn(random, count_a) + shift, drawn(random + 1, count_b)
    claim = compare("t", by_seed(a), by_seed(b, 100), better="lower")
    expected = stats.ttest_ind(a, b, equal_var=False)
    interval = expected.confidence_interval(0.95)
    assert claim.p_value == pytest.approx(expected.pvalue)
    assert (claim.low, claim.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert claim.error == pytest.approx(math.sqrt(a.var(ddof=1) / count_a + b.var(ddof=1) / count_b))


@small
@given(random=random, count=seeds, margin=st.floats(0.5, 20), shift=st.floats(-10, 10), paired=st.booleans())
def test_equivalence_is_two_one_sided_tests_of_statsmodels(
    random: int, count: int, margin: float, shift: float, paired: bool
) -> None:
    a, b = drawn(random, count) + shift, drawn(random + 1, count)
    claim = compare("t", by_seed(a), by_seed(b, 0 if paired else 100), better="lower", margin=margin)
    reference = (
        ttost_paired(a, b, -margin, margin) if paired else ttost_ind(a, b, -margin, margin, usevar="unequal")
    )
    assert claim.p_equivalent == pytest.approx(reference[0], rel=1e-6, abs=1e-12)


@small
@given(random=random, count=seeds, factor=st.floats(0.3, 3.0), better=st.sampled_from(["lower", "higher"]))
def test_the_ends_of_a_speed_up_are_where_the_test_of_scipy_turns(
    random: int, count: int, factor: float, better: Any
) -> None:
    """Of a and r b: refused at 5% just outside the interval; paired and unpaired."""
    a, b = factor * drawn(random, count), drawn(random + 1, count)
    over, under = (a, b) if better == "lower" else (b, a)
    for first, test in ((0, stats.ttest_rel), (100, _welch)):
        found = ratio(by_seed(a), by_seed(b, first), better=better)
        assert found is not None and found.low is not None and found.high is not None
        assert found.ratio == pytest.approx(over.mean() / under.mean())
        for end in (found.low, found.high):
            least = (1e-3 * max(a.max(), b.max())) ** 2
            agree = (over - end * under).var(ddof=1) if first == 0 else min(a.var(ddof=1), b.var(ddof=1))
            if agree < (1 + end * end) * least:  # Few seeds agree by chance.
                continue
            assert test(over, end * under).pvalue == pytest.approx(0.05, rel=1e-4)


def _welch(a: Values, b: Values) -> Any:
    return stats.ttest_ind(a, b, equal_var=False)


@pytest.mark.slow
@small
@given(random=random, sides=st.integers(2, 6), count=seeds)
def test_a_family_is_never_surer_than_bonferroni_of_one_nor_less_sure_than_holm(
    random: int, sides: int, count: int
) -> None:
    values = drawn(random, sides, count) + np.linspace(0, 20, sides)[:, None]
    family = Family("t", {str(k): by_seed(row) for k, row in enumerate(values)}, better="lower")
    pairs = [(a, b) for a in range(sides) for b in range(a)]
    alone = [float(stats.ttest_rel(values[a], values[b]).pvalue) for a, b in pairs]
    corrected = [family.claim(str(a), str(b)).p_value for a, b in pairs]
    reference = multipletests(alone, method="holm")[1]
    assert holm(alone) == pytest.approx(reference)
    assert all(p <= c * (1 + 1e-9) for p, c in zip(alone, corrected, strict=True))
    assert all(c <= h * (1 + 1e-9) for c, h in zip(corrected, reference, strict=True))
    assert min(corrected) == pytest.approx(min(reference))


@small
@given(random=random, count=st.integers(3, 12), shift=st.floats(1.0, 6.0), paired=st.booleans())
def test_more_seeds_are_what_statsmodels_asks_for(
    random: int, count: int, shift: float, paired: bool
) -> None:
    """80% power at 5%, by a shifted t in the place of the noncentral one: within two seeds or a tenth."""
    a, b = drawn(random, count) + shift, drawn(random + 1, count)
    claim = compare("t", by_seed(a), by_seed(b, 0 if paired else 100), better="lower")
    if claim.more_seeds is None or claim.difference == 0.0:
        return
    if paired:
        effect = abs(claim.difference) / (a - b).std(ddof=1)
        needed = TTestPower().solve_power(effect, alpha=0.05, power=0.8)
    else:
        effect = abs(claim.difference) / math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / 2)
        needed = TTestIndPower().solve_power(effect, alpha=0.05, power=0.8)
    assert count + claim.more_seeds == pytest.approx(max(needed, count + 1), rel=0.1, abs=2.0)


@small
@given(random=random, count=st.integers(3, 30), slope=st.floats(-0.1, 0.1))
def test_drift_is_least_squares_of_statsmodels(random: int, count: int, slope: float) -> None:
    generator = np.random.default_rng(random)
    hours = np.sort(generator.uniform(0, 10, count))
    logs = slope * hours + generator.normal(0, 0.05, count)
    found = drift((hours * 3600).tolist(), np.exp(logs).tolist())
    fitted = OLS(logs, add_constant(hours)).fit()
    low, high = fitted.conf_int()[1]
    assert found.slope_pct == pytest.approx(100 * math.expm1(fitted.params[1]), abs=1e-6)
    if math.sqrt(fitted.mse_resid) > 1e-3:
        assert found.low_pct == pytest.approx(100 * math.expm1(low), abs=1e-6)
        assert found.high_pct == pytest.approx(100 * math.expm1(high), abs=1e-6)


@small
@given(random=random, count=st.integers(2, 6), units=st.integers(3, 30))
def test_examples_add_what_two_way_analysis_of_variance_says(random: int, count: int, units: int) -> None:
    table = drawn(random, count, units, mean=0.1, sd=1.0)
    rows = [{"seed": s, "unit": u, "d": table[s, u]} for s in range(count) for u in range(units)]
    anova = anova_lm(ols("d ~ C(seed) + C(unit)", DataFrame(rows)).fit())["mean_sq"]
    residual = residual_square(table.mean(axis=1), (table.mean(axis=0) ** 2).sum(), (table**2).sum(), units)
    assert residual == pytest.approx(anova["Residual"] / (count * units), rel=1e-6)
    found = with_examples(
        of_pairs(table.mean(axis=1), 0.0), table.mean(), (table.mean(axis=0) ** 2).sum(), residual, units
    )
    assert found.seeds == pytest.approx(anova["C(seed)"] / (count * units), rel=1e-6)
    added = max(0.0, anova["C(unit)"] - anova["Residual"]) / (count * units)
    assert found.interaction == pytest.approx(added, rel=1e-6, abs=1e-12)
    # The interval's end is where the test turns.
    for alpha in (0.05, 0.001):
        assert found.p_value(float(found.reach(alpha))) == pytest.approx(alpha, rel=1e-6)


@small
@given(random=random, cells=st.integers(1, 4), count=st.integers(1, 5))
def test_a_row_is_what_pandas_groups(random: int, cells: int, count: int) -> None:
    generator = np.random.default_rng(random)
    runs = [
        run(1 + 10 * cell + seed, {"a": cell % 2, "b": cell}, seed, cost_usd=float(generator.normal(1, 0.1)))
        for cell in range(cells)
        for seed in range(int(generator.integers(1, count + 1)))
    ]
    frame = DataFrame([{"a": r.point["a"], "b": r.point["b"], "cost": r.cost_usd} for r in runs])
    table = RunTable((), tuple(runs))
    for row in side_by_side(runs, ["a"], [Metric("cost_usd", "lower")], table.column).rows:
        group = frame[frame["a"] == row.point["a"]].groupby("b")["cost"]
        spread = row.figures["cost_usd"]
        assert spread is not None
        assert spread.mean == pytest.approx(group.mean().mean())
        freedom = (group.count() - 1).sum()
        if freedom:
            pooled = (group.var(ddof=0) * group.count()).sum() / freedom
            assert spread.sd == pytest.approx(math.sqrt(pooled))
        else:
            assert spread.sd is None


@small
@given(random=random, count=st.integers(1, 12))
def test_a_score_is_its_formula_and_its_best_is_on_the_frontier(random: int, count: int) -> None:
    values = np.abs(drawn(random, count, 3, mean=1.0, sd=0.5)) + 1e-3
    weights = np.random.default_rng(random).uniform(0.01, 1.0, 3)
    names = ("cost_usd", "total_time_s", "accuracy")
    directions: Mapping[str, Any] = dict(zip(names, ("lower", "lower", "higher"), strict=True))
    candidates = [
        candidate(str(k), dict(zip(names, row, strict=True))) for k, row in enumerate(values.tolist())
    ]
    ranking = rank(candidates, [Criterion(n, w, directions[n]) for n, w in zip(names, weights, strict=True)])
    expected = (values / values.max(axis=0) * weights * [1, 1, -1]).sum(axis=1)
    assert [float(r.score) for r in ranking] == pytest.approx(sorted(expected))
    assert ranking[0].label not in frontier(candidates, directions)


@small
@given(random=random, examples=st.integers(50, 5000), count=st.integers(2, 8))
def test_a_share_whose_seeds_agree_is_tested_with_its_resolution(
    random: int, examples: int, count: int
) -> None:
    """The t-test of the same differences with the stated standard deviation in the place of theirs."""
    generator = np.random.default_rng(random)
    hits_a, hits_b = generator.integers(10, examples, 2)
    a, b = np.full(count, hits_a / examples), np.full(count, hits_b / examples)
    claim = compare("accuracy", by_seed(a), by_seed(b), better="higher", resolution=Resolution(examples))
    assert claim.at_resolution or hits_a == hits_b
    least = max(1 / (4 * examples**2), abs(a[0] - b[0]) / (2 * examples))
    assert claim.resolution == pytest.approx(math.sqrt(least))
    t = (a[0] - b[0]) / math.sqrt(2 * least / count)
    assert claim.p_value == pytest.approx(2 * stats.t.sf(abs(t), count - 1))
