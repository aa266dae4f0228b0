"""Cells of a grid whose values contradict each other: runs with a reason, not a refusal of the spec."""

from __future__ import annotations

from typing import Any

import pytest

from service.config.document import SpecError
from service.config.hardware import CATALOGUE
from service.planner.preview import planned_runs
from service.specs.experiment import ExperimentSpec, read_stored, validate


def spec_of(axes: dict[str, Any], **fields: Any) -> ExperimentSpec:
    search = {"axes": axes, **fields.pop("search", {})}
    return validate({"name": "x", "task": {"name": "imdb"}, "search": search, **fields})


def refused(spec: ExperimentSpec) -> dict[tuple[Any, ...], str]:
    return {
        tuple(plan.point.values()): plan.refusal.reason for plan in spec.runs() if plan.refusal is not None
    }


@pytest.mark.parametrize(
    ("axes", "fields", "cell", "says"),
    [
        (
            {"hardware": ["cpu", "A100"], "precision": ["fp32", "tf32"]},
            {},
            ("cpu", "tf32"),
            "precision: cpu does not support tf32",
        ),
        (
            {"precision": ["fp32", "tf32"]},
            {},
            ("tf32",),
            "precision: cpu does not support tf32",
        ),
        (
            {"parallel.strategy": ["ddp", "single"], "parallel.workers": [2]},
            {},
            ("single", 2),
            "strategy",
        ),
        (
            {"batch.global_size": [16, 15]},
            {"parallel": {"strategy": "ddp", "workers": 2}},
            (15,),
            "15",
        ),
        (
            {"precision": ["fp16", "fp32"]},
            {"numerics": {"parameters": "half"}, "hardware": "A100"},
            ("fp32",),
            "numerics.parameters half needs precision fp16 or bf16, not fp32",
        ),
        (
            {"model.name": ["tiny", "mini"]},
            {"model": {"teacher": "t"}, "distillation": {"layer_map": [0, 1]}},
            ("mini",),
            "distillation.layer_map has 2 layers",
        ),
        (
            {"parallel.workers": [1, 2]},
            {"queue": {"share_device": True}, "parallel": {"strategy": "ddp"}},
            (2,),
            "queue.share_device needs single-worker runs",
        ),
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_values_that_contradict_each_other_make_a_cell_infeasible(
    axes: dict[str, Any], fields: dict[str, Any], cell: tuple[Any, ...], says: str, backwards: bool
) -> None:
    if backwards:  # The first cell may be an infeasible one.
        axes = {name: values[::-1] for name, values in axes.items()}
    spec = spec_of(axes, **fields)
    [(found, reason)] = refused(spec).items()
    assert (found, says in reason) == (cell, True)
    plans = list(spec.runs())
    assert [plan.index for plan in plans] == list(range(len(plans))) == sorted(plan.place for plan in plans)
    assert all(read_stored(plan.spec.canonical_json()) for plan in plans)
    previewed = {tuple(run.point.values()): run for run in planned_runs(spec, CATALOGUE, None)}
    assert [key for key, run in previewed.items() if not run.feasible] == [cell]
    assert previewed[cell].reason == reason
    assert validate(_document(spec)) == spec


def _document(spec: ExperimentSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json")


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"precision": ["fp32", "fp64"]}, "precision: grid point"),
        ({"hardware": ["cpu", "abacus"]}, "hardware: grid point"),
        ({"model.encoder": ["huggingface", "huggingfce"]}, "model.encoder: grid point"),
        ({"batch.global_size": [16, -1]}, "batch.global_size: grid point"),
        ({"task.path": [None, ""]}, "task.path: grid point"),
        ({"precisoin": ["fp32", "fp64"]}, "search.axes.precisoin: unknown field"),
    ],
)
def test_a_value_that_is_wrong_by_itself_refuses_the_spec(axes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        list(spec_of(axes).runs())


@pytest.mark.parametrize("search", [{}, {"name": "random", "samples": 2}, {"name": "tpe", "samples": 2}])
def test_a_spec_whose_cells_are_all_infeasible_is_refused_with_the_first_reason(
    search: dict[str, Any],
) -> None:
    with pytest.raises(SpecError, match=r"precision: .*(V100|cpu).* does not support tf32"):
        list(spec_of({"hardware": ["cpu", "V100"], "precision": ["tf32"]}, search=search).runs())
    with pytest.raises(SpecError, match=r"numerics\.parameters half needs precision fp16 or bf16"):
        list(spec_of({"precision": ["fp32", "tf32"]}, numerics={"parameters": "half"}, search=search).runs())


def test_a_suggesting_search_may_suggest_what_cannot_be_combined() -> None:
    axes = {"precision": ["tf32", "fp32"], "optimizer.name": ["adan", "adamw"]}
    plans = list(spec_of(axes, search={"name": "tpe", "samples": 2}).runs())
    assert {(plan.refusal, str(plan.spec.precision)) for plan in plans} == {(None, "fp32")}


def test_reference_runs_repeat_the_first_cell_that_can_be_trained() -> None:
    plans = list(spec_of({"precision": ["tf32", "fp32"]}, search={"reference_every": 2}).runs())
    assert [plan.point["precision"] for plan in plans if plan.cell == "reference"] == ["fp32", "fp32"]
