"""An optimizer is one entry of `OPTIMIZERS`: adding it there is enough to choose it and to train with it."""

from __future__ import annotations

import pytest
import torch

from service.config.document import SpecError
from service.specs.experiment import json_schema, validate
from trainers.entrypoint import train
from trainers.optimizers import OPTIMIZERS
from trainers.optimizers.info import Built, Groups, Hyperparameters, Implementation, OptimizerInfo, States
from trainers.reporting import NeverStop

MINIMAL = {"name": "momentum", "task": {"name": "imdb"}}


def build(groups: Groups, chosen: Hyperparameters) -> Built:
    """Stochastic gradient descent with momentum."""
    (momentum,) = chosen.betas
    return Built(
        torch.optim.SGD(groups, lr=chosen.learning_rate, momentum=momentum, foreach=True),
        Implementation.multi_unfused.value,
        "torch.optim.SGD",
    )


SGD = OptimizerInfo(
    name="sgd",
    summary="stochastic gradient descent with momentum",
    build=build,
    betas=(0.9,),
    states=States(moments=1),
    implementations=(Implementation.multi_unfused,),
)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, SGD.name, SGD)


def test_a_run_trains_with_it(configure, recorder):
    config = configure(optimizer={"name": "sgd", "learning_rate": 0.1})
    outcome = train(config, recorder, NeverStop())
    assert outcome.summary["steps"] == 6
    assert recorder.facts["optimizer_library"] == "torch.optim.SGD"
    assert recorder.facts["optimizer_implementation"] == "multi_unfused"
    losses = [*recorder.series("loss").values()]
    assert losses[-1] < losses[0]


def test_a_resumed_run_restores_its_states(configure, recorder):
    changes = {"optimizer": {"name": "sgd", "learning_rate": 0.1}, "deterministic": True}
    whole = train(configure(**changes), recorder, NeverStop())
    recorder.stop_after = 3
    changes |= {"workspace__checkpoints": configure().workspace.checkpoints + "-stopped"}
    train(configure(**changes), recorder, recorder)
    recorder.stop_after = None
    resumed = train(configure(**changes), recorder, NeverStop())
    assert recorder.resumed_from in range(3, 6)
    assert resumed.summary["train_loss"] == whole.summary["train_loss"]


def test_its_memory_is_planned_for(configure):
    half = {"precision": "bf16", "numerics": {"parameters": "half"}}
    assert configure(optimizer={"name": "sgd"}).state_bytes == 4
    assert configure(optimizer={"name": "sgd"}, **half).state_bytes == 4 + 4


def test_the_published_schema_offers_it():
    name = json_schema()["$defs"]["Optimizer"]["properties"]["name"]
    assert name["enum"] == ["adamw", "adan", "sgd"]
    assert "sgd = stochastic gradient descent with momentum" in name["description"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"betas": [0.9, 0.99]}, "betas has 2 values, but sgd takes 1"),
        ({"implementation": "multi_fused"}, "implementation multi_fused belongs to adamw, adan, not sgd"),
        ({"moments": "bf16"}, "moments bf16 belongs to adan, not sgd"),
        ({"no_prox": True}, "no_prox belongs to adan, not sgd"),
    ],
)
def test_what_it_does_not_have_is_refused(fields, reason):
    with pytest.raises(SpecError, match=reason):
        validate({**MINIMAL, "optimizer": {"name": "sgd", **fields}})


def test_it_is_not_compressed_to_one_bit():
    parallel = {"strategy": "ddp", "workers": 2, "compression": "onebit"}
    with pytest.raises(SpecError, match=r"needs optimizer\.name adan, not sgd"):
        validate({**MINIMAL, "optimizer": {"name": "sgd"}, "parallel": parallel})


def test_an_optimizer_that_is_not_registered_is_refused():
    with pytest.raises(SpecError, match="input should be 'adamw', 'adan' or 'sgd'"):
        validate({**MINIMAL, "optimizer": {"name": "lion"}})
