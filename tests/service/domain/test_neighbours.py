"""When a run counts as disturbed, and what every answer says of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.analysis.answers import AnalysisError, Selection
from service.analysis.question import Question
from service.analysis.run_table import RunTable, read_run_table
from service.db.schema import NEIGHBOUR_COLUMNS
from service.domain.neighbours import Neighbour, disturbances, in_words, of_cpus, of_time
from service.domain.records import MeasurementRow, Run
from service.domain.states import RunState
from service.scheduling.queue import Queue
from service.specs.experiment import ExperimentSpec, validate
from service.store import NewExperiment, RecordBatch, Store
from tests.service.analysis.building import run, run_table

FOREIGN, OTHER, SAME = Neighbour.foreign, Neighbour.other_experiment, Neighbour.same_experiment


def measured(id: int, seed: int, precision: str = "fp32", **pct: float | None) -> Run:
    columns = {of_time(kind): pct.get(str(kind), 0.0) for kind in Neighbour}
    return run(id, {"precision": precision}, seed, **columns)


# -- The rule ----------------------------------------------------------------------------------


def test_strangers_disturb_above_a_tenth_of_the_time() -> None:
    runs = [measured(1, 0, foreign=10.0), measured(2, 1, foreign=10.1), measured(3, 2, other_experiment=60.0)]
    assert disturbances(runs) == {2: (FOREIGN,), 3: (OTHER,)}


def test_company_that_all_runs_of_a_configuration_had_disturbs_none() -> None:
    assert disturbances([measured(seed, seed, same_experiment=40.0 + 9 * seed) for seed in range(3)]) == {}


def test_where_some_ran_alone_those_with_company_are_disturbed() -> None:
    crowded = [measured(seed, seed, same_experiment=90.0) for seed in range(2)]
    alone = measured(2, 2, same_experiment=4.0)
    other_cell = measured(3, 0, "bf16", same_experiment=95.0)
    assert disturbances([*crowded, alone, other_cell]) == {0: (SAME,), 1: (SAME,)}


def test_runs_that_were_not_looked_at_are_neither_alone_nor_disturbed() -> None:
    old = measured(1, 0, foreign=None, other_experiment=None, same_experiment=None)
    assert disturbances([old, measured(2, 1, same_experiment=80.0)]) == {}


def test_a_failed_run_is_not_disturbed() -> None:
    failed = run(1, {"precision": "fp32"}, 0, state=RunState.failed, neighbours_foreign_pct=90.0)
    assert disturbances([failed]) == {}


def test_one_cause_is_named_and_several_are_counted() -> None:
    assert in_words(2, 3, {"same_experiment": 2}) == "2 of 3 runs disturbed: same experiment"
    assert in_words(1, 1, {"foreign": 1}) == "1 of 1 run disturbed: foreign processes"
    causes = {"foreign": 2, "other_experiment": 1}
    assert in_words(2, 2, causes).startswith("2 of 2 runs disturbed: ")
    assert in_words(2, 3, causes) == "2 of 3 runs disturbed: foreign processes (2), another experiment (1)"


# -- Answers -----------------------------------------------------------------------------------


def disturbed_by(run: Run) -> dict[str, Any]:
    """Of bf16 two seeds of three beside a stranger; everything else alone."""
    crowded = run.point["precision"] == "bf16" and run.point["batch.global_size"] == 16 and run.seed > 0
    return {of_time(kind): 55.0 if crowded and kind is FOREIGN else 0.0 for kind in Neighbour}


def test_every_answer_names_configurations_with_disturbed_runs() -> None:
    found = run_table(change=disturbed_by)
    question = Question(_judged(found))
    table = question.compare()
    assert [(row.disturbed, dict(row.disturbed_by)) for row in table.rows] == [
        (0, {}), (0, {}), (2, {"foreign": 2}), (0, {})
    ]  # fmt: skip
    said = (
        "2 of 12 runs disturbed: foreign processes (precision=bf16 batch=16); they may be "
        "slower than their configuration: leave them out with --undisturbed, or remeasure them with retry "
        "--disturbed"
    )
    for notes in (
        table.notes, question.recommend().notes, question.frontier().notes, question.score().notes,
        question.effects().notes, question.speedup().notes,
    ):  # fmt: skip
        assert said in notes


def test_configurations_measured_under_different_conditions_are_named() -> None:
    def company(run: Run) -> dict[str, Any]:
        return {of_time(SAME): 80.0 if run.point["precision"] == "bf16" else 0.0}

    axes = {"precision": ["fp32", "bf16"], "batch.global_size": [16]}
    notes = Question(_judged(run_table(axes, change=company))).compare().notes
    assert (
        "measured under different conditions: precision=bf16 batch=16 next to runs of the same "
        "experiment; precision=fp32 batch=16 without"
    ) in notes


def _judged(found: RunTable) -> RunTable:
    return replace(found, disturbed=disturbances(found.runs))


# -- From measurements to answers --------------------------------------------------------------


@pytest.fixture
def asked() -> ExperimentSpec:
    return validate({"name": "neighbours", "task": {"name": "imdb"}, "seeds": [0, 1, 2]})


def tell(store: Store, run_id: int, attempt: int, share: float, *, of: Neighbour = FOREIGN,
         scope: str = "host:a", window: tuple[float, float] = (0.0, 30.0)) -> None:  # fmt: skip
    row = MeasurementRow(run_id, attempt, of_time(of), share, "%", "sampled", scope, *window)
    store.recording.record(RecordBatch(measurements=[row]))


def test_a_runs_share_is_over_all_windows_and_attempts_by_time(
    store: Store, queue: Queue, asked: ExperimentSpec
) -> None:
    experiment, _ = store.submissions.submit(
        NewExperiment(asked, list(asked.runs()), spec_text="x", owner="ada")
    )
    (claimed,) = queue.claim("s", lease_s=60)
    store.drivers.started(experiment.id, claimed.attempt, "here", 1)
    first, second, _ = store.runs.page(experiment_id=experiment.id).items
    number = store.attempts.open(first.id, claimed.attempt)
    tell(store, first.id, number, 100.0, window=(0.0, 30.0))
    tell(store, first.id, number, 0.0, window=(30.0, 60.0))
    assert store.runs.get(first.id).neighbours_foreign_pct == pytest.approx(50.0)
    store.attempts.run_started(first.id, number, total_steps=1, resumed_from_step=0, facts={})
    store.attempts.finish_run(first.id, number, RunState.failed, retry_delay_s=0.0)
    number = store.attempts.open(first.id, claimed.attempt)
    tell(store, first.id, number, 25.0, window=(100.0, 240.0))
    found = store.runs.get(first.id)
    assert found.neighbours_foreign_pct == pytest.approx((30 * 100 + 140 * 25) / 200)
    assert found.neighbours_same_experiment_pct is None
    # Its workers wait for each other: the machine with the most company decides.
    tell(store, first.id, number, 90.0, scope="host:b", window=(100.0, 240.0))
    assert store.runs.get(first.id).neighbours_foreign_pct == pytest.approx(90.0)
    assert store.runs.page(filter="neighbours_foreign_pct > 80").items == [store.runs.get(first.id)]
    assert store.runs.get(second.id).neighbours_foreign_pct is None


def finished(store: Store, queue: Queue, asked: ExperimentSpec, shares: list[float]) -> int:
    """An experiment whose runs ended beside strangers for these shares of their time."""
    experiment, _ = store.submissions.submit(
        NewExperiment(asked, list(asked.runs()), spec_text="x", owner="ada")
    )
    (claimed,) = queue.claim("s", lease_s=60)
    store.drivers.started(experiment.id, claimed.attempt, "here", 1)
    for stored, share in zip(store.runs.page(experiment_id=experiment.id).items, shares, strict=True):
        number = store.attempts.open(stored.id, claimed.attempt)
        store.attempts.run_started(stored.id, number, total_steps=1, resumed_from_step=0, facts={})
        tell(store, stored.id, number, share)
        summary = {"cost_usd": 1.0 + share, "accuracy": 0.9}
        store.attempts.finish_run(stored.id, number, RunState.succeeded, summary=summary)
    return experiment.id


def test_undisturbed_leaves_them_out_and_says_so(store: Store, queue: Queue, asked: ExperimentSpec) -> None:
    number = finished(store, queue, asked, [0.0, 90.0, 0.0])
    answer = Question(read_run_table(store, [number], Selection(undisturbed=True))).compare(
        metrics=["cost_usd"]
    )
    (row,) = answer.rows
    assert row.figures["cost_usd"] is not None
    assert (row.figures["cost_usd"].mean, row.figures["cost_usd"].n, row.disturbed) == (1.0, 2, 0)
    assert "1 disturbed run is left out: run:2" in answer.notes
    everything = Question(read_run_table(store, [number])).compare(metrics=["cost_usd"])
    assert "1 of 3 runs disturbed: foreign processes" in " ".join(everything.notes)


def test_when_all_were_disturbed_the_answer_says_what_to_do(
    store: Store, queue: Queue, asked: ExperimentSpec
) -> None:
    number = finished(store, queue, asked, [90.0, 90.0, 90.0])
    with pytest.raises(AnalysisError, match=rf"3 were disturbed; .*stillhouse retry {number} --disturbed"):
        Question(read_run_table(store, [number], Selection(undisturbed=True)))


def test_metrics_md_defines_what_is_measured_of_neighbours() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = page.split("## Neighbours\n")[1].split("\n## ")[0]
    names = set(re.findall(r"`(neighbours_\w+)`", section))
    assert names == {name(kind) for kind in Neighbour for name in (of_time, of_cpus)}
    assert set(NEIGHBOUR_COLUMNS) == {of_time(kind) for kind in Neighbour}
