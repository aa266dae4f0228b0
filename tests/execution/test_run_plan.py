"""From a spec to a worker's configuration and to what it takes from the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.execution.run_plan import run_config, shape_of
from service.hardware import CATALOGUE
from service.settings import Settings
from service.spec import validate


def spec(**fields: Any) -> Any:
    return validate({"name": "x", "task": {"name": "imdb"}, **fields})


def test_a_cpu_worker_takes_its_cpus() -> None:
    shape = shape_of(spec(resources={"cpus_per_worker": 2, "memory_gib_per_worker": 1}), CATALOGUE)
    assert (shape.workers, shape.device) == (1, "cpu")
    assert dict(shape.resources) == {"CPU": 2.0, "memory": float(1 << 30)}


def test_a_gpu_worker_takes_a_device_of_its_kind() -> None:
    shape = shape_of(spec(hardware="A100", parallel={"strategy": "ddp", "workers": 4}), CATALOGUE)
    assert shape.device == "cuda"
    assert (shape.workers, dict(shape.resources)["GPU"]) == (4, 1.0)
    assert "accelerator_type:A100" in dict(shape.resources)


@pytest.mark.parametrize(("threads", "expected"), [(None, 3), (7, 7)])
def test_threads_default_to_the_reserved_cpus(tmp_path: Path, threads: int | None, expected: int) -> None:
    config = run_config(
        spec(resources={"cpus_per_worker": 3}, threads=threads),
        experiment_id=5,
        run_id=9,
        seed=11,
        settings=Settings(data_dir=tmp_path, data_roots=str(tmp_path)),
        catalogue=CATALOGUE,
    )
    assert config.threads == expected
    assert config.seed == 11
    assert config.rates.devices_per_worker == 3
    assert config.workspace.checkpoints == str(tmp_path / "experiments/5/runs/9/checkpoints")
    assert config.workspace.data_roots == (str(tmp_path),)
