"""A strategy is one entry of `STRATEGIES`: adding it there is enough to choose it and to train with it."""

from __future__ import annotations

import pytest

from service.config.document import SpecError
from service.specs.experiment import json_schema, validate
from trainers.entrypoint import train
from trainers.parallel.replica import Replica
from trainers.parallel_kinds import STRATEGIES, StrategyInfo
from trainers.reporting import NeverStop

MINIMAL = {"name": "twice", "task": {"name": "imdb"}}


class TwiceReplica(Replica):
    """Computes the gradients of each step twice, and takes the second."""

    name = "twice"

    def gradients(self, batch, loss_of, scale):
        super().gradients(batch, loss_of, scale)
        self.module.zero_grad(set_to_none=True)
        return super().gradients(batch, loss_of, scale)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = StrategyInfo(name="twice", summary="gradients twice", replicate=TwiceReplica, several=False)
    monkeypatch.setitem(STRATEGIES, twice.name, twice)


def test_a_run_trains_with_it(configure, recorder):
    changes = {"model__dropout": 0.0, "deterministic": True}
    whole = train(configure(**changes), recorder, NeverStop())
    changes |= {"workspace__checkpoints": configure().workspace.checkpoints + "-twice"}
    twice = train(configure(parallel={"strategy": "twice"}, **changes), recorder, NeverStop())
    assert recorder.facts["strategy"] == "twice"
    assert twice.summary["train_loss"] == whole.summary["train_loss"]


def test_the_published_schema_offers_it():
    strategy = json_schema()["$defs"]["Parallel"]["properties"]["strategy"]
    assert strategy["enum"] == ["single", "ddp", "pipeline", "twice"]
    assert "twice = gradients twice" in strategy["description"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"workers": 2}, "strategy twice has one worker, not 2"),
        ({"workers": {"min": 1, "max": 1}}, "strategy twice has one worker, not a range"),
        ({"compression": "fp16"}, "compression fp16 belongs to strategy ddp, not twice"),
        ({"stages": 2}, "stages belongs to strategy pipeline, not twice"),
    ],
)
def test_what_it_does_not_have_is_refused(fields, reason):
    with pytest.raises(SpecError, match=reason):
        validate({**MINIMAL, "parallel": {"strategy": "twice", **fields}})
