"""From a spec to a worker's configuration and to what it takes from the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.config.hardware import CATALOGUE
from service.config.settings import Settings
from service.scheduling.run_plan import run_config, shapes_of
from service.specs.experiment import validate
from trainers.config import RunConfig


def spec(**fields: Any) -> Any:
    return validate({"name": "x", "task": {"name": "imdb"}, **fields})


def test_a_cpu_worker_takes_its_cpus() -> None:
    (shape,) = shapes_of(spec(resources={"cpus_per_worker": 2, "memory_gib_per_worker": 1}), CATALOGUE)
    assert (shape.workers, shape.device) == (1, "cpu")
    assert dict(shape.resources) == {"CPU": 2.0, "memory": float(1 << 30)}


def test_a_gpu_worker_takes_a_device_of_its_kind() -> None:
    (shape,) = shapes_of(spec(hardware="A100", parallel={"strategy": "ddp", "workers": 4}), CATALOGUE)
    assert shape.device == "cuda"
    assert (shape.workers, dict(shape.resources)["GPU"]) == (4, 1.0)
    assert "accelerator_type:A100" in dict(shape.resources)


def test_an_elastic_run_has_a_shape_for_each_number_that_divides_its_batch(tmp_path: Path) -> None:
    elastic = spec(parallel={"strategy": "ddp", "workers": {"min": 1, "max": 4}}, batch={"global_size": 16})
    assert [shape.workers for shape in shapes_of(elastic, CATALOGUE)] == [4, 2, 1]
    config = run_config(
        elastic,
        experiment_id=5,
        run_id=9,
        seed=11,
        workers=2,
        settings=Settings(data_dir=tmp_path, data_roots=str(tmp_path)),
        catalogue=CATALOGUE,
    )
    assert (config.parallel.workers, config.parallel.min_workers) == (2, None)
    assert (config.micro_size, config.accumulation) == (8, 1)
    # It is built without validation, and passes it.
    assert RunConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(("threads", "expected"), [(None, 3), (7, 7)])
def test_threads_default_to_the_reserved_cpus(tmp_path: Path, threads: int | None, expected: int) -> None:
    config = run_config(
        spec(resources={"cpus_per_worker": 3}, threads=threads),
        experiment_id=5,
        run_id=9,
        seed=11,
        workers=1,
        settings=Settings(data_dir=tmp_path, data_roots=str(tmp_path)),
        catalogue=CATALOGUE,
    )
    assert config.threads == expected
    assert config.seed == 11
    assert config.rates.devices_per_worker == 3
    assert config.workspace.checkpoints == str(tmp_path / "experiments/5/runs/9/checkpoints")
    assert config.workspace.data_roots == (str(tmp_path),)


def test_a_run_that_is_measured_again_does_not_see_the_earlier_checkpoints(tmp_path: Path) -> None:
    folders = {
        first: run_config(
            spec(),
            experiment_id=5,
            run_id=9,
            first_attempt=first,
            seed=11,
            workers=1,
            settings=Settings(data_dir=tmp_path, data_roots=str(tmp_path)),
            catalogue=CATALOGUE,
        ).workspace.checkpoints
        for first in (1, 3)
    }
    of_run = tmp_path / "experiments/5/runs/9"
    assert folders == {1: str(of_run / "checkpoints"), 3: str(of_run / "checkpoints-3")}
