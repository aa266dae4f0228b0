"""Optional packages: without one of them the rest is imported, and trains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONAL = ("trainers/models/binary", "trainers/device_kinds/tpu")
COPIED = ("api", "service", "trainers", "cuda_ext", "tests")
SCRIPT = """
import sys
from pathlib import Path

import api.app, service.cli, trainers
from tests.trainers.corpora import write_corpus
from trainers.config import RunConfig
from trainers.entrypoint import train
from trainers.reporting import NeverStop, NullSink

folder = Path(sys.argv[1])
write_corpus(folder / "data" / "reviews", train=24, test=8, seed=7)
train(
    RunConfig.model_validate({
        "task": {"name": "imdb", "path": "reviews", "max_length": 48, "test": "none"},
        "model": {"name": "tiny"}, "length": {"steps": 2}, "batch": {"global_size": 8},
        "threads": 1, "seed": 0,
        "rates": {
            "hardware": "cpu", "device": "cpu", "price_usd_per_hour": 0.05, "price_date": "2026-01-01",
            "tdp_w": 7.5,
        },
        "workspace": {
            "checkpoints": str(folder / "checkpoints"), "cache": str(folder / "cache"),
            "data_roots": (str(folder / "data"),),
        },
    }),
    NullSink(),
    NeverStop(),
)
print(trainers.__file__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", OPTIONAL)
def test_the_rest_works_without(package: str, tmp_path: Path) -> None:
    # With its byte code, which takes as long to write as all the rest of the test.
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*pytest*.pyc"))
    shutil.rmtree(tmp_path / package)
    run = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path / "trainers/__init__.py")
