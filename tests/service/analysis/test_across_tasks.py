"""Configurations over several tasks, against SciPy's U statistic and a bootstrap in plain Python."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from scipy import stats

from service.analysis import AnalysisError
from service.analysis.across_tasks import across_tasks
from service.analysis.answers import BadQuestion
from service.analysis.run_table import RunTable
from tests.service.analysis.building import run

TASKS = {"imdb": "accuracy", "squad_v2": "f1", "wikiqa": "map"}
PRECISIONS = ("fp32", "bf16", "fp16")


def table(seeds: int = 4, number: int = 0, axis: str = "task.name", skip: Any = None) -> RunTable:
    generator = np.random.default_rng(number)
    runs = []
    for (task, headline), precision, seed in itertools.product(TASKS.items(), PRECISIONS, range(seeds)):
        named = task if axis == "task.name" else f"{task}+{task}.d"
        point: dict[str, Any] = {axis: named, "precision": precision}
        values: dict[str, Any] = {
            "task": task, "headline": headline,
            headline: round(float(generator.normal(0.8 + 0.01 * PRECISIONS.index(precision), 0.02)), 2),
            "cost_usd": float(generator.lognormal()),
        }  # fmt: skip
        if skip is None or not skip(task, precision, seed):
            runs.append(run(len(runs) + 1, point, seed, **values))
    return RunTable(experiments=(), runs=tuple(runs))


def figures_of(of: RunTable, metric: str | None = None) -> Mapping[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for each in of.runs:
        value = getattr(each, metric or TASKS[each.task])
        found.setdefault((each.task, str(each.point["precision"])), []).append(value)
    return found


@pytest.mark.parametrize("number", range(20))
def test_probability_rank_and_wins_are_those_of_scipy(number: int) -> None:
    of = table(2 + number % 4, number)
    answer = across_tasks(of)
    values = figures_of(of)
    assert len(answer.improvements) == 3
    for pair in answer.improvements:
        a, b = (label.removeprefix("precision=") for label in (pair.a, pair.b))
        shares = [
            stats.mannwhitneyu(values[task, a], values[task, b]).statistic
            / (len(values[task, a]) * len(values[task, b]))
            for task in TASKS
        ]
        assert pair.probability == pytest.approx(statistics.fmean(shares))
    means = [[round(statistics.fmean(values[task, p]), 12) for p in PRECISIONS] for task in TASKS]
    ranks = np.mean([stats.rankdata([-mean for mean in of_task]) for of_task in means], axis=0)
    standings = {standing.label: standing for standing in answer.standings}
    for at, precision in enumerate(PRECISIONS):
        standing = standings[f"precision={precision}"]
        assert standing.mean_rank == pytest.approx(ranks[at])
        assert standing.wins == sum(
            of_task[at] == pytest.approx(max(of_task), rel=1e-12) for of_task in means
        )
        assert standing.means == pytest.approx({t: of_t[at] for t, of_t in zip(TASKS, means, strict=True)})
    assert [s.mean_rank for s in answer.standings] == sorted(s.mean_rank for s in answer.standings)


def test_intervals_are_those_of_a_stratified_bootstrap() -> None:
    of = table(5, 3)
    values, drawn = figures_of(of), random.Random(1)
    pair = across_tasks(of).improvements[0]
    a, b = (label.removeprefix("precision=") for label in (pair.a, pair.b))
    resampled = []
    for _ in range(2000):
        of_tasks = []
        for task in TASKS:
            x, y = (drawn.choices(values[task, side], k=5) for side in (a, b))
            of_tasks.append(statistics.fmean(float(p > q) + 0.5 * (p == q) for p in x for q in y))
        resampled.append(statistics.fmean(of_tasks))
    low, high = np.quantile(resampled, (0.025, 0.975))
    assert pair.low == pytest.approx(low, abs=0.03)
    assert pair.high == pytest.approx(high, abs=0.03)
    assert pair.low is not None
    assert pair.high is not None
    assert pair.low <= pair.probability <= pair.high


def test_the_same_runs_give_the_same_intervals() -> None:
    assert across_tasks(table()) == across_tasks(table())


def test_two_seeds_have_no_interval() -> None:
    answer = across_tasks(table(2))
    assert {(of.low, of.high) for of in (*answer.standings, *answer.improvements)} == {(None, None)}
    assert any("no intervals: they need 3 seeds" in note for note in answer.notes)


def test_lower_is_better_where_the_figure_says_so() -> None:
    of = table()
    answer = across_tasks(of, metric="cost_usd")
    values = figures_of(of, "cost_usd")
    assert {each.metric.better for each in answer.tasks} == {"lower"}
    pair = answer.improvements[0]
    shares = [stats.mannwhitneyu(values[task, "bf16"], values[task, "fp32"]).statistic / 16 for task in TASKS]
    assert (pair.a, pair.b) == ("precision=fp32", "precision=bf16")
    assert pair.probability == pytest.approx(statistics.fmean(shares))
    assert answer.standings[0].means["imdb"] > 0


def test_axes_that_the_task_sets_are_no_part_of_a_configuration() -> None:
    answer = across_tasks(table(axis="task.name+task.path"))
    assert {standing.label for standing in answer.standings} == {f"precision={p}" for p in PRECISIONS}
    assert "set by the task: task.name+task.path" in answer.notes


def test_a_configuration_without_a_result_on_every_task_is_left_out() -> None:
    answer = across_tasks(table(skip=lambda task, precision, seed: (task, precision) == ("wikiqa", "fp16")))
    assert answer.left_out == {"precision=fp16": "has no run of wikiqa"}
    assert len(answer.improvements) == 1
    with pytest.raises(AnalysisError, match="fewer than two configurations have results on every task"):
        across_tasks(table(skip=lambda task, precision, seed: task == "wikiqa" and precision != "fp32"))


def test_one_task_is_refused_and_so_is_an_unknown_figure() -> None:
    with pytest.raises(AnalysisError, match=r"the runs are of one task \(imdb\)"):
        across_tasks(table(skip=lambda task, precision, seed: task != "imdb"))
    with pytest.raises(BadQuestion, match="unknown metric 'price'"):
        across_tasks(table(), metric="price")
