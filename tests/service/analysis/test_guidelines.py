"""Guidelines quote the comparisons of single experiments, count them, and say where they disagree."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from service.analysis import AnalysisError
from service.analysis.answers import BadQuestion, Guide, Guideline
from service.analysis.guidelines import guide_of
from service.analysis.question import Question
from service.analysis.run_table import RunTable
from service.domain.metrics import Metric
from service.domain.records import Experiment, Run
from tests.service.analysis.building import run_table

FASTER, SLOWER = 0.5, 1.5


def experiment(id: int) -> Experiment:
    known = {"id": id, "name": f"sweep-{id}", "project": "nlp", "ended_s": 300.0}
    return Experiment(**{**dict.fromkeys(field.name for field in fields(Experiment)), **known})


def sweep(
    id: int, axes: Mapping[str, Any], seeds: int = 3, bf16: float = FASTER, noise: float = 0.02, **values: Any
) -> tuple[Experiment, RunTable]:
    """A grid in which bf16 takes `bf16` times as long as everything else."""
    generator = np.random.default_rng(id)

    def figures(point: Mapping[str, Any], seed: int) -> dict[str, Any]:
        seconds = 20.0 * (bf16 if point.get("precision") == "bf16" else 1.0)
        seconds *= float(np.exp(generator.normal(0.0, noise)))
        accuracy = 0.9 + 0.002 * seed + float(generator.normal(0.0, 0.01))
        task = {"task": of} if (of := point.get("task.name")) else {}
        return {"total_time_s": seconds, "cost_usd": seconds / 100, "accuracy": accuracy, "hardware": "cpu",
                "student": "mini", **task, **values}  # fmt: skip

    table = run_table(axes, seeds, figures)
    ids = {run.id: 1000 * id + run.id for run in table.runs}
    return experiment(id), replace(
        table,
        runs=tuple(replace(run, id=ids[run.id], experiment_id=id) for run in table.runs),
        summaries={ids[of]: summary for of, summary in table.summaries.items()},
    )


def one(guide: Guide, metric: str = "total_time_s", axis: str = "precision", task: str = "imdb") -> Guideline:
    [found] = [
        each for each in guide.guidelines if (each.axis, each.metric.name, each.task) == (axis, metric, task)
    ]
    return found


def of_run(table: RunTable, at: int) -> Run:
    return table.runs[at]


@pytest.mark.parametrize("number", range(12))
def test_each_claim_is_that_of_its_experiments_comparison(number: int) -> None:
    generator = np.random.default_rng(number)
    pool: dict[str, list[Any]] = {
        "precision": ["fp32", "bf16", "fp16"][: 2 + number % 2],
        "batch.global_size": [16, 32, 64],
        "optimizer.name": ["adamw", "adan"],
    }
    tables = []
    for id in range(1, 4):
        names = generator.permutation(list(pool))[: 1 + (number + id) % 3]
        axes = {name: list(generator.permutation(np.array(pool[name], dtype=object))) for name in names}
        tables.append(sweep(id, axes, 1 + (number + id) % 4, float(generator.choice([0.5, 1.0, 1.5]))))
    guide = guide_of(tables)
    quoted: dict[tuple[int, str, str, str], Any] = {
        (of.experiment_id, each.axis, of.pair.a, of.pair.b): None
        for each in guide.guidelines
        for of in each.evidence
    }
    compared = set()
    for made, table in tables:
        question = Question(table)
        for axis in question.axes:
            claims = question.compare(by=[axis], claims=True, untested=True).claims
            compared |= {(made.id, axis, pair.a, pair.b) for pair in claims}
            evidence = [
                of.pair
                for each in guide.guidelines
                for of in each.evidence
                if (of.experiment_id, each.axis) == (made.id, axis)
            ]
            assert sorted(evidence, key=repr) == sorted(claims, key=repr)
    assert quoted.keys() == compared


def test_experiments_that_agree_are_counted_though_their_sides_are_in_another_order() -> None:
    tables = [
        sweep(1, {"precision": ["fp32", "bf16"]}),
        sweep(2, {"precision": ["bf16", "fp32"]}, 4),
        sweep(3, {"precision": ["fp32", "bf16"]}, seeds=1),
    ]
    found = one(guide_of(tables))
    assert (found.a, found.b) == ("precision=fp32", "precision=bf16")
    assert (found.finding, found.counts) == ("B is better", {"B is better": 2, "untested": 1})
    assert found.smallest == pytest.approx(1.0, abs=0.1)
    assert found.largest == pytest.approx(1.0, abs=0.1)
    assert (found.seeds_fewest, found.seeds_most) == (3, 4)
    assert found.metric == Metric("total_time_s", "lower")


def test_experiments_that_disagree_are_conflicting_and_not_decided() -> None:
    axes = {"precision": ["fp32", "bf16"]}
    found = one(guide_of([sweep(1, axes), sweep(2, axes, bf16=SLOWER)]))
    assert (found.finding, found.counts) == ("conflicting", {"B is better": 1, "A is better": 1})


def test_one_seed_and_too_few_seeds_are_said_plainly() -> None:
    axes = {"precision": ["fp32", "bf16"]}
    found = one(guide_of([sweep(1, axes, seeds=1)]))
    assert (found.finding, found.smallest, found.evidence[0].pair.claim) == ("untested", None, None)
    found = one(guide_of([sweep(1, axes, seeds=2, bf16=1.0), sweep(2, axes, seeds=1)]))
    assert (found.finding, found.counts) == ("undecided", {"undecided": 1, "untested": 1})


def test_tasks_and_hardware_stand_apart() -> None:
    axes = {"precision": ["fp32", "bf16"]}
    both = {"task.name": ["imdb", "tariff"], **axes}
    guide = guide_of([sweep(1, both), sweep(2, axes), sweep(3, axes, hardware="t4")])
    groups = {(each.task, each.hardware): len(each.evidence) for each in guide.guidelines}
    assert groups == {("imdb", "cpu"): 2, ("tariff", "cpu"): 1, ("imdb", "t4"): 1}
    assert {each.axis for each in guide.guidelines} == {"precision"}
    assert [(of.id, of.tasks, of.seeds) for of in guide.sources][:2] == [
        (1, ("imdb", "tariff"), 3),
        (2, ("imdb",), 3),
    ]


def test_reused_runs_count_in_the_experiment_that_trained_them() -> None:
    axes = {"precision": ["fp32", "bf16"]}
    first = sweep(1, axes)
    copied = replace(
        first[1],
        runs=tuple(
            replace(run, id=5000 + run.id, experiment_id=2, reused_from=run.id) for run in first[1].runs
        ),
        summaries={},
    )
    guide = guide_of([first, (experiment(2), copied)])
    assert one(guide).counts == {"B is better": 1}
    assert guide.left_out == {"2": "its runs are reused, and count in experiment 1"}
    own = replace(of_run(copied, 0), reused_from=None)
    guide = guide_of([first, (experiment(2), replace(copied, runs=(own, *copied.runs[1:])))])
    assert "some of its runs are reused from experiment 1" in guide.sources[1].notes


def test_an_effect_that_depends_on_another_axis_says_on_which() -> None:
    made, table = sweep(1, {"precision": ["fp32", "bf16"], "batch.global_size": [16, 32]}, 5)
    large = [
        replace(run, total_time_s=20.0 + 0.01 * run.seed) if run.point["batch.global_size"] == 32 else run
        for run in table.runs
    ]
    guide = guide_of([(made, replace(table, runs=tuple(large)))])
    assert one(guide).evidence[0].depends_on == ("batch.global_size",)
    assert one(guide, axis="batch.global_size").evidence[0].depends_on == ("precision",)
    assert one(guide, "cost_usd").evidence[0].depends_on == ()


def test_axes_and_figures_can_be_chosen() -> None:
    tables = [
        sweep(1, {"precision": ["fp32", "bf16"], "batch.global_size": [16, 32]}),
        sweep(2, {"seed2": [1]}),
    ]
    guide = guide_of(tables, by=["global_size"], metrics=["cost_usd"])
    assert {(each.axis, each.metric.name) for each in guide.guidelines} == {("batch.global_size", "cost_usd")}
    with pytest.raises(BadQuestion, match="no finished experiment varies 'lambda'; axes: precision, batch"):
        guide_of(tables, by=["lambda"])
    with pytest.raises(BadQuestion, match="unknown metric 'price'"):
        guide_of(tables, metrics=["price"])


def test_what_says_nothing_is_left_out_with_its_reason() -> None:
    with pytest.raises(AnalysisError, match=r"^no finished experiment varies an axis$"):
        guide_of([sweep(1, {"precision": ["bf16"]})])
    many = {"optimizer.learning_rate": [0.001 * number for number in range(40)]}
    guide = guide_of([sweep(1, {"precision": ["fp32", "bf16"]}), sweep(2, many, seeds=2)])
    assert list(guide.left_out) == ["2, optimizer.learning_rate"]
    assert "more than the limit of 500" in guide.left_out["2, optimizer.learning_rate"]
    assert [of.id for of in guide.sources] == [1]


def test_each_family_is_counted_in_the_notes() -> None:
    axes = {"precision": ["fp32", "bf16"]}
    guide = guide_of([sweep(id, axes) for id in (1, 2)])
    metrics = {each.metric.name for each in guide.guidelines}
    assert any(note.startswith(f"{2 * len(metrics)} families of claims are quoted") for note in guide.notes)
    assert all(len({of.experiment_id for of in each.evidence}) == 2 for each in guide.guidelines)
    assert list(itertools.chain(*(source.notes for source in guide.sources)))
