"""TPUs: what their runs reserve from Ray, what is refused at submission, and what a preview says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from service.config.document import SpecError
from service.config.hardware import CATALOGUE
from service.planner.preview import notes_of, planned_runs
from service.scheduling.cluster import ClusterNode, ClusterSnapshot, at_a_time, unsatisfiable
from service.scheduling.run_plan import Shape, shapes_of
from service.specs.experiment import ExperimentSpec, validate
from trainers.device_kinds.tpu import TPU

ONE = {"strategy": "single"}
EIGHT = {"strategy": "ddp", "workers": 8}


def spec_of(**fields: Any) -> ExperimentSpec:
    document = {
        "name": "on a TPU", "task": {"name": "imdb", "train_examples": 25_000}, "hardware": "tpu-v5e",
        "precision": "bf16", "length": {"epochs": 1}, **fields,
    }  # fmt: skip
    return validate(document)


def shape_of(**fields: Any) -> Shape:
    (shape,) = shapes_of(spec_of(**fields), CATALOGUE)
    return shape


def host(chips: float, kind: str = "TPU-V5LITEPOD") -> ClusterSnapshot:
    """Returns a cluster of one node, with the resources that Ray gives a TPU host."""
    resources = {"CPU": 24.0, "TPU": chips, f"accelerator_type:{kind}": 1.0}
    return ClusterSnapshot(0.0, True, None, (ClusterNode("t", "t", True, resources, resources),))


def test_a_worker_reserves_one_chip_of_its_model() -> None:
    shape = shape_of()
    assert dict(shape.resources) == {"CPU": 1.0, "TPU": 1.0, "accelerator_type:TPU-V5LITEPOD": 0.001}
    assert shape.kind is TPU


@pytest.mark.parametrize(
    ("parallel", "snapshot", "reason"),
    [
        (ONE, host(4), None),
        (EIGHT, host(8), None),
        (EIGHT, host(4), "the cluster has room for 4 at a time"),
        (ONE, host(8, "TPU-V6E"), "hardware tpu-v5e .* the cluster has TPU-V6E"),
    ],
)
def test_a_host_with_the_chips_takes_a_run(
    parallel: dict[str, Any], snapshot: ClusterSnapshot, reason: str | None
) -> None:
    found = unsatisfiable(spec_of(parallel=parallel), snapshot, CATALOGUE)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(reason, found)


def test_a_host_takes_as_many_runs_as_it_has_chips() -> None:
    assert at_a_time(spec_of(), host(8).nodes, CATALOGUE) == 8


@pytest.mark.parametrize(
    ("parallel", "workers", "topology"),
    [(ONE, 1, "1x1"), (EIGHT, 8, "2x4"), ({**EIGHT, "workers": 16}, 16, "4x4")],
)
def test_ray_accepts_the_slice_that_a_worker_group_asks_for(
    parallel: dict[str, Any], workers: int, topology: str
) -> None:
    from ray.train import ScalingConfig

    scaling = ScalingConfig(**shape_of(parallel=parallel).scaling)
    assert (scaling.use_tpu, scaling.num_workers, scaling.topology) == (True, workers, topology)
    assert scaling.num_tpus_per_worker == 1


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"model": {"encoder": "packed"}}, "model.encoder", "packs texts of any length"),
        ({"model": {"encoder": "fused"}}, "model.encoder", "use one of eager, huggingface"),
        ({"precision": "fp16"}, "precision", "tpu-v5e does not support fp16; it supports fp32, bf16"),
        ({"precision": "tf32"}, "precision", "tpu-v5e does not support tf32"),
        (
            {"optimizer": {"implementation": "multi_fused"}},
            "optimizer.implementation",
            "use auto or single_un",
        ),
        (
            {"model": {"compile": True}},
            "model.compile",
            "model.compile true is not supported on hardware tpu-v5e; use false",
        ),
        ({"model": {"teacher": "hub:a/b"}}, "model.teacher", "use unset"),
        ({"numerics": {"parameters": "half"}}, "numerics.parameters", "use fp32"),
        ({"batch": {"micro_tokens": 4096}}, "batch.micro_tokens", "compiles for one shape of batches"),
        ({"task": {"name": "mlm", "path": "texts"}}, "task.name", "use other hardware"),
        (
            {"queue": {"share_device": True}},
            "queue.share_device",
            "is not supported on hardware tpu-v5e; use false",
        ),
        ({"deterministic": True}, "deterministic", "is not supported on hardware tpu-v5e; use false"),
        (
            {"parallel": {"strategy": "pipeline", "workers": 4}},
            "parallel.strategy",
            "parallel.strategy pipeline is not supported on hardware tpu-v5e; use single or ddp",
        ),
        (
            {"parallel": {**EIGHT, "workers": 3}, "batch": {"global_size": 24}},
            "parallel.workers",
            "3 is not the size of a slice of tpu-v5e, which Ray reserves whole; use one of 1, 4, 8",
        ),
    ],
)
def test_what_a_tpu_lacks_is_refused_in_one_line(fields: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(SpecError) as refused:
        spec_of(**fields)
    (message,) = [problem.message for problem in refused.value.problems if problem.path == field]
    assert reason in message
    assert "\n" not in message


def test_a_point_of_a_grid_is_refused_and_the_others_stay() -> None:
    axes = {"model.encoder": ["huggingface", "packed"]}
    runs = list(planned_runs(spec_of(search={"name": "grid", "axes": axes}), CATALOGUE, None))
    assert [run.feasible for run in runs] == [True, False]
    assert "packs texts of any length" in str(runs[1].reason)


def test_a_preview_shows_the_price_and_what_is_missing() -> None:
    spec = spec_of()
    cpus = ClusterSnapshot(0.0, True, None, (ClusterNode("n", "n", True, {"CPU": 4.0}, {}),))
    (run,) = planned_runs(spec, CATALOGUE, cpus)
    assert (run.price_usd_per_hour, run.accelerators, run.feasible) == (1.20, 1, False)
    assert "no node has hardware tpu-v5e (Ray resource accelerator_type:TPU-V5LITEPOD)" in str(run.reason)
    package, unproven = notes_of(spec, CATALOGUE)
    assert package.startswith("hardware tpu-v5e needs torch_tpu on its nodes, which is ")
    assert package.endswith("installed here: pip install 'stillhouse[tpu]'")
    assert unproven == "hardware tpu-v5e: this version has never been run on such a TPU"
    assert notes_of(spec_of(hardware="cpu", precision="fp32"), CATALOGUE) == ()


@pytest.mark.parametrize("name", ["TPUv2", "TPUv3"])
def test_tpus_that_torch_tpu_does_not_support_are_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"'{name}' is listed for comparison only: torch-tpu, which starts"):
        spec_of(hardware=name)
