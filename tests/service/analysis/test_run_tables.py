"""Runs of several experiments: what differs between them becomes an axis."""

from __future__ import annotations

from typing import Any

import pytest

from service.analysis.answers import Selection
from service.analysis.run_table import (
    read_curves,
    read_kernels,
    read_run_table,
    with_differing_fields,
    with_their_differences,
)
from service.domain.records import MeasurementRow
from service.domain.states import RunState
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import NewExperiment, NotFound, RecordBatch, Store
from tests.service.analysis.building import run


def spec(learning_rate: float, **more: object) -> dict[str, object]:
    return {"precision": "fp32", "optimizer": {"name": "adamw", "learning_rate": learning_rate}, **more}


def test_a_field_that_differs_between_experiments_is_an_axis() -> None:
    first = run(1, {"precision": "fp32"}, 0, experiment_id=1, cell="a")
    second = run(2, {"precision": "fp32"}, 0, experiment_id=2, cell="a")
    specs = {(1, "a"): spec(1e-4), (2, "a"): spec(2e-4)}
    points = [found.point for found in with_differing_fields([first, second], specs)]
    assert points == [
        {"precision": "fp32", "optimizer.learning_rate": 1e-4},
        {"precision": "fp32", "optimizer.learning_rate": 2e-4},
    ]


def test_a_list_is_shown_as_its_json() -> None:
    runs = [run(1, {}, 0, experiment_id=1, cell="a"), run(2, {}, 0, experiment_id=2, cell="a")]
    specs = {(1, "a"): {"model": {"layers": None}}, (2, "a"): {"model": {"layers": [2, 5]}}}
    points = [found.point for found in with_differing_fields(runs, specs)]
    assert points == [{"model.layers": None}, {"model.layers": "[2, 5]"}]


def test_fields_of_sections_within_sections_tell_experiments_apart() -> None:
    runs = [run(id, {}, 0, experiment_id=id, cell="a") for id in (1, 2)]
    specs = {(id, "a"): {"model": {"binary": {"derivative": of}}} for id, of in ((1, "tanh"), (2, "swish"))}
    points = [found.point for found in with_differing_fields(runs, specs)]
    assert points == [{"model.binary.derivative": "tanh"}, {"model.binary.derivative": "swish"}]


def test_settings_of_distillation_are_no_difference_without_a_teacher() -> None:
    runs = [run(id, {}, 0, experiment_id=id, cell="a") for id in (1, 2)]
    specs = {
        (1, "a"): {"model": {"teacher": None}, "distillation": {"soft_weight": 0.5}},
        (2, "a"): {"model": {"teacher": "run:7"}, "distillation": {"soft_weight": 0.7}},
    }
    points = [found.point for found in with_differing_fields(runs, specs)]
    assert points == [{"model.teacher": None}, {"model.teacher": "run:7"}]


def test_the_same_spec_with_other_seeds_stays_one_cell() -> None:
    runs = [
        run(1, {"precision": "fp32"}, 0, experiment_id=1, cell="a"),
        run(2, {"precision": "fp32"}, 1, experiment_id=2, cell="a"),
    ]
    specs = {(1, "a"): spec(1e-4, name="one"), (2, "a"): spec(1e-4, name="two", max_restarts=5)}
    assert with_differing_fields(runs, specs) == runs


def test_an_axis_of_one_experiment_is_read_from_the_spec_of_the_other() -> None:
    runs = [
        run(1, {"precision": "bf16"}, 0, experiment_id=1, cell="a"),
        run(2, {}, 0, experiment_id=2, cell="b"),
    ]
    specs = {(1, "a"): {"precision": "bf16"}, (2, "b"): {"precision": "fp32"}}
    assert [found.point for found in with_differing_fields(runs, specs)] == [
        {"precision": "bf16"},
        {"precision": "fp32"},
    ]


# -- From the store --------------------------------------------------------------------------

DATA = {"train.sha256": "a" * 64, "max_length": 128}


@pytest.fixture
def finished(store: Store, queue: Queue) -> Any:
    """Submits an experiment of two seeds and two precisions, and ends its runs; one of them fails."""

    def call(**fields: Any) -> int:
        spec = validate(
            {
                "name": "n", "task": {"name": "imdb"}, "seeds": [0, 1],
                "search": {"axes": {"precision": ["fp32", "bf16"]}}, **fields,
            }
        )  # fmt: skip
        experiment, _ = store.submissions.submit(
            NewExperiment(spec, list(spec.runs()), spec_text="x", owner="ada")
        )
        (claimed,) = queue.claim("s", lease_s=60)
        store.drivers.started(experiment.id, claimed.attempt, "here", 1)
        *ending, last = store.runs.page(experiment_id=experiment.id).items
        for number, one in enumerate(ending):
            attempt = store.attempts.open(one.id, claimed.attempt)
            facts = {
                "data": {**DATA} if number else dict(reversed(DATA.items())), "device_shared": number == 1,
                "cpu": "x86", "gpu": "A100" if number else None, "hostname": "h",
            }  # fmt: skip
            store.attempts.run_started(one.id, attempt, total_steps=1, resumed_from_step=0, facts=facts)
            kernel = MeasurementRow(
                one.id, attempt, "kernel_ms_per_step", 2.0 + number, "ms", "sampled", "kernel:gemm", 0.0, 1.0
            )
            store.recording.record(RecordBatch(measurements=[kernel]))
            summary = {"cost_usd": 1.0 + number, "total_time_s": 10.0, "mine": 0.5}
            store.attempts.finish_run(one.id, attempt, RunState.succeeded, summary=summary)
        attempt = store.attempts.open(last.id, claimed.attempt)
        store.attempts.finish_run(last.id, attempt, RunState.failed)
        return experiment.id

    return call


def test_a_run_table_has_all_that_judges_the_runs(store: Store, finished: Any) -> None:
    id = finished()
    table = read_run_table(store, [id, id])
    first, second, third, last = (one.id for one in table.runs)
    assert [one.id for one in table.experiments] == [id]
    assert [one.state for one in table.runs] == [RunState.succeeded] * 3 + [RunState.failed]
    assert [table.summaries[one]["mine"] for one in (first, second, third)] == [0.5] * 3
    assert table.summaries.keys() == table.data.keys() == {first, second, third}
    assert table.data[first] == DATA
    assert table.data[first] is table.data[second]
    assert table.shared == {second}
    assert table.environments == (
        ({"cpu": "x86", "gpu": None}, (first,)), ({"cpu": "x86", "gpu": "A100"}, (second, third)),
    )  # fmt: skip
    assert (table.left_out, table.references, table.with_overhead, last) == ((), (), False, last)
    assert table.unit_scores(table.runs[0]) is None
    assert read_run_table(store, [id], unit_scores=lambda of: {"x": 1.0}).unit_scores(table.runs[0]) == {
        "x": 1.0
    }


def test_a_filter_narrows_everything_that_is_read(store: Store, finished: Any) -> None:
    id = finished()
    table = read_run_table(store, [id], Selection(filter="precision = 'fp32'"))
    kept = {one.id for one in table.runs}
    assert [one.point["precision"] for one in table.runs] == ["fp32", "fp32"]
    assert table.summaries.keys() == table.data.keys() == kept
    assert {one for _, of in table.environments for one in of} == kept
    with pytest.raises(NotFound):
        read_run_table(store, [id + 1])


def test_overhead_is_added_to_runs_and_summaries_alike(store: Store, finished: Any) -> None:
    id = finished()
    total = store.accounting.ledger(id).total
    plain, loaded = (read_run_table(store, [id], Selection(with_overhead=of)) for of in (False, True))
    assert loaded.with_overhead
    for before, after in zip(plain.runs[:3], loaded.runs[:3], strict=True):
        assert before.cost_usd is not None
        assert after.cost_usd == pytest.approx(before.cost_usd + total.overhead_usd / 3)
        assert loaded.summaries[after.id]["total_time_s"] == pytest.approx(10.0 + total.overhead_s / 3)
    assert loaded.summaries.keys() == plain.summaries.keys()


def test_what_differs_between_experiments_is_read_from_their_specs(store: Store, finished: Any) -> None:
    ids = [finished(optimizer={"learning_rate": rate}) for rate in (1e-4, 2e-4)]
    points = [one.point for one in read_run_table(store, ids).runs]
    assert [point["optimizer.learning_rate"] for point in points] == [1e-4] * 4 + [2e-4] * 4
    alone = read_run_table(store, ids[:1]).runs
    assert with_their_differences(store, ids[:1], alone) == list(alone)
    assert {*alone[0].point} == {"precision"}


def test_kernels_are_read_by_run_and_name(store: Store, finished: Any) -> None:
    id = finished()
    first, second, third, _ = (one.id for one in store.runs.page(experiment_id=id).items)
    assert read_kernels(store, [id]) == {
        one: {"gemm": {"kernel_ms_per_step": 2.0 + number}}
        for number, one in enumerate((first, second, third))
    }
    assert read_curves(store, store.runs.page(experiment_id=id).items, ["accuracy"]) == {}
