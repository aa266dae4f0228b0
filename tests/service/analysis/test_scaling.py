"""Efficiency of strong and weak scaling, against Fieller's interval by its closed form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats

from service.analysis.answers import ScalingRow
from service.analysis.question import Question
from tests.service.analysis.building import run_table

STRONG = {"precision": ["fp32", "bf16"], "parallel.workers": [1, 2, 4]}
LINKED = {"parallel.workers+batch.global_size": ["1+16", "2+32", "4+64"]}


def noisy(point: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Each doubling of the workers gains 1.6; seeds share a part of the noise."""
    workers, batch = _shape(point)
    noise = 1 + 0.01 * seed + 0.003 * ((seed * 7 + workers * 3) % 5)
    rate = 100.0 * 1.6 ** math.log2(workers) / noise
    steps = 6400 // batch
    return {
        "workers": workers, "global_batch_size": batch, "total_steps": steps, "samples_per_s": rate,
        "total_time_s": steps * batch / rate, "cost_usd": 1.0, "energy_kwh": 1.0, "accuracy": 0.9,
    }  # fmt: skip


def _shape(point: Mapping[str, Any]) -> tuple[int, int]:
    if linked := point.get("parallel.workers+batch.global_size"):
        workers, batch = linked.split("+")
        return int(workers), int(batch)
    return point["parallel.workers"], point.get("batch.global_size", 64)


def rows(axes: Mapping[str, Any], **asked: Any) -> tuple[ScalingRow, ...]:
    return Question(run_table(axes, of=noisy, seeds=4)).speedup(**asked).scaling


def fieller(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Interval of mean(a) / mean(b), paired, from the quadratic in the ratio."""
    n = len(a)
    t2 = stats.t.ppf(0.975, n - 1) ** 2 / n
    covariance = np.cov(a, b, ddof=1)
    x = b.mean() ** 2 - t2 * covariance[1, 1]
    y = a.mean() * b.mean() - t2 * covariance[0, 1]
    z = a.mean() ** 2 - t2 * covariance[0, 0]
    root = math.sqrt(y * y - x * z)
    return (y - root) / x, (y + root) / x


def test_strong_scaling_is_the_speed_up_over_workers_at_equal_global_batch() -> None:
    found = rows(STRONG)
    assert [(row.kind, row.workers, row.baseline_workers) for row in found] == [
        ("strong", 2, 1), ("strong", 4, 1), ("strong", 2, 1), ("strong", 4, 1),
    ]  # fmt: skip
    assert found[0].baseline == "precision=fp32, parallel.workers=1"
    assert found[2].baseline == "precision=bf16, parallel.workers=1"
    assert found[0].efficiencies.keys() == {"total_time_s", "samples_per_s"}
    for row in found:
        one, several = (
            np.array([noisy({"parallel.workers": n}, seed)["total_time_s"] for seed in range(4)])
            for n in (1, row.workers)
        )
        of = row.efficiencies["total_time_s"]
        speedup = row.speedups["total_time_s"]
        assert of is not None
        assert speedup is not None
        assert of.ratio == pytest.approx(one.mean() / several.mean() / row.workers)
        assert of.ratio == pytest.approx(speedup.ratio / row.workers)
        expected = [end / row.workers for end in fieller(one, several)]
        assert [of.low, of.high] == pytest.approx(expected, rel=1e-6)


def test_weak_scaling_is_throughput_over_workers_at_equal_batch_per_worker() -> None:
    found = rows(LINKED)
    assert [(row.kind, row.workers, row.global_batch_size) for row in found] == [
        ("weak", 2, 32), ("weak", 4, 64),
    ]  # fmt: skip
    for row in found:
        one, several = (
            np.array([noisy(dict(zip(LINKED, [f"{n}+{16 * n}"], strict=True)), seed)["samples_per_s"]
                      for seed in range(4)])
            for n in (1, row.workers)
        )  # fmt: skip
        of = row.efficiencies["samples_per_s"]
        assert of is not None
        assert of.ratio == pytest.approx(several.mean() / one.mean() / row.workers)
        assert [of.low, of.high] == pytest.approx(
            [end / row.workers for end in fieller(several, one)], rel=1e-6
        )


def test_times_of_unlike_work_are_compared_by_the_examples_trained_on() -> None:
    """As many updates everywhere, so that N workers train on N times the examples."""

    def same_updates(point: Mapping[str, Any], seed: int) -> dict[str, Any]:
        figures = noisy(point, seed)
        examples = 100 * figures["global_batch_size"]
        return {**figures, "total_steps": 100, "total_time_s": examples / figures["samples_per_s"]}

    def unknown(point: Mapping[str, Any], seed: int) -> dict[str, Any]:
        return {**same_updates(point, seed), "total_steps": None}

    row, _ = Question(run_table(LINKED, of=same_updates)).speedup().scaling
    of = row.efficiencies["total_time_s"]
    rate = row.efficiencies["samples_per_s"]
    assert of is not None
    assert rate is not None
    assert of.ratio == pytest.approx(rate.ratio, rel=1e-3)
    row, _ = Question(run_table(LINKED, of=unknown)).speedup().scaling
    assert row.efficiencies["total_time_s"] is None


def test_axes_of_workers_and_batch_have_both_kinds() -> None:
    found = rows({"parallel.workers": [1, 2], "batch.global_size": [32, 64]})
    one, two = (f"parallel.workers={n}, batch.global_size={{}}" for n in (1, 2))
    assert [(row.kind, row.label, row.baseline) for row in found] == [
        (kind, two.format(own), one.format(base))
        for kind, own, base in (("strong", 32, 32), ("strong", 64, 64), ("weak", 64, 32))
    ]  # fmt: skip


def test_without_one_worker_the_fewest_are_the_baseline() -> None:
    [row] = rows({"parallel.workers": [2, 4]}, metrics=["samples_per_s"])
    assert (row.workers, row.baseline_workers) == (4, 2)
    of = row.efficiencies["samples_per_s"]
    assert of is not None
    assert of.ratio == pytest.approx(0.8, rel=0.02)


def test_no_axis_of_workers_no_scaling_and_one_seed_no_interval() -> None:
    assert Question(run_table()).speedup().scaling == ()
    found = Question(run_table(STRONG, of=noisy, seeds=1)).speedup().scaling
    of = found[0].efficiencies["total_time_s"]
    assert of is not None
    assert (of.low, of.high) == (None, None)
    assert rows(STRONG, metrics=["cost_usd"]) == ()


def test_runs_that_were_given_unlike_numbers_of_workers_have_none() -> None:
    table = run_table({"parallel.workers": [1, 2]}, of=noisy, change=lambda r: {"workers": 3 - r.id % 2})
    assert Question(table).speedup().scaling == ()
