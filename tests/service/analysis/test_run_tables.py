"""Runs of several experiments: what differs between them becomes an axis."""

from __future__ import annotations

from service.analysis.run_tables import with_differing_fields
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
