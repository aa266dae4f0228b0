"""Students that are stopped and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.conftest import Recorder
from tests.trainers.distillation.conftest import (
    INSIDE,
    rewrite_weights,
)
from trainers.entrypoint import train
from trainers.errors import BadDataError
from trainers.reporting import NeverStop, NullSink

STEPS = 9


def tensors(checkpoint: str) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": tensor.clone()
        for name in ("model", "projections", "optimizer", "random")
        for key, tensor in load_file(Path(checkpoint) / f"{name}.safetensors").items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adan"])
def test_stopped_run_resumes_bitwise(config_in, models, teacher, tmp_path, optimizer):
    changes = {
        "optimizer": {"name": optimizer, "learning_rate": 1e-3},
        "model": {"name": "tiny", "teacher": str(teacher)},
        "workspace__model_roots": (str(models),),
        "distillation": {"soft_weight": 0.5, **INSIDE, "hidden_first_fraction": 0.6, "schedule": "linear"},
        "length": {"steps": STEPS},
        "deterministic": True,
    }
    whole = Recorder()
    ended = train(config_in(tmp_path / "whole", **changes), whole, NeverStop())
    config = config_in(tmp_path / "parts", **changes)
    points: dict[str, dict[int, float]] = {}
    resumed = []
    for stop_after in (3, 5, 7, None):
        part = Recorder(stop_after=stop_after)
        outcome = train(config, part, part)
        resumed.append(part.resumed_from)
        for name in ("loss", "task_loss", "soft_loss", "hidden_loss", "relation_loss"):
            points[name] = points.get(name, {}) | part.series(name)
    assert resumed == [0, 4, 6, 8]  # in the first stage, between the two, and in the second
    assert points == {name: whole.series(name) for name in points}
    one, other = tensors(ended.checkpoint), tensors(outcome.checkpoint)
    assert "projections/2.weight" in one
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_projections_are_kept_apart_from_the_model(distil):
    outcome = train(distil(distillation={"soft_weight": 0.5, **INSIDE}), NullSink(), NeverStop())
    names = set(load_file(Path(outcome.checkpoint) / "model.safetensors"))
    assert {name for name in names if not name.startswith(("bert.", "classifier."))} == set()
    assert set(load_file(Path(outcome.checkpoint) / "projections.safetensors")) == {
        "0.weight", "1.weight", "2.weight",
    }  # fmt: skip


@pytest.mark.slow
def test_teacher_that_changed_between_attempts_is_refused(distil, copied):
    config = distil(model__teacher=str(copied))
    part = Recorder(stop_after=2)
    train(config, part, part)
    rewrite_weights(copied, lambda weights: weights | {"classifier.bias": weights["classifier.bias"] + 1})
    with pytest.raises(BadDataError, match=r"checkpoint of step 3: teacher\.sha256 was .* and is"):
        train(config, NullSink(), NeverStop())
