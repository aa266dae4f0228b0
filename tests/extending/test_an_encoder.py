"""An encoder is one entry of `ENCODERS`: adding it there is enough to choose it and to train with it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from service.config.document import SpecError
from service.specs.experiment import json_schema, validate
from trainers.entrypoint import train
from trainers.model_kinds.encoders import ENCODERS, EncoderInfo
from trainers.reporting import NeverStop

MINIMAL = {"name": "signs", "task": {"name": "imdb"}}


class SignLinear(nn.Linear):
    """A Linear whose weights count by their signs and one scale; gradients pass straight through."""

    products = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(B, S, H) -> (B, S, H)."""
        SignLinear.products += 1
        signs = self.weight.sign() * self.weight.abs().mean()
        straight = self.weight + (signs - self.weight).detach()
        return nn.functional.linear(input, straight, self.bias)


def install(model: nn.Module) -> None:
    """Replaces the layers' Linears."""
    for module in model.base_model.encoder.modules():
        if type(module) is nn.Linear:
            module.__class__ = SignLinear


SIGNS = EncoderInfo(
    name="signs",
    summary="weights of one bit",
    install=install,
    devices=("cpu",),
    precisions=("fp32",),
    compiles=False,
)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODERS, SIGNS.name, SIGNS)


def test_a_run_trains_with_it(configure, recorder):
    plain = train(configure(), recorder, NeverStop())
    before = SignLinear.products
    config = configure(
        model={"name": "tiny", "encoder": "signs"},
        workspace__checkpoints=configure().workspace.checkpoints + "-signs",
    )
    outcome = train(config, recorder, NeverStop())
    assert outcome.summary["steps"] == 6
    assert outcome.summary["train_loss"] != plain.summary["train_loss"]
    assert outcome.summary["parameters"] == plain.summary["parameters"]
    layers, products_of_layer, steps = 2, 6, 6
    assert SignLinear.products - before >= layers * products_of_layer * steps


def test_the_published_schema_offers_what_is_registered():
    encoder = json_schema()["$defs"]["Model"]["properties"]["encoder"]
    assert encoder["enum"] == list(ENCODERS)
    assert "signs = weights of one bit" in encoder["description"]


@pytest.mark.parametrize(
    ("document", "field", "reason"),
    [
        ({"precision": "bf16"}, "", "model.encoder signs computes in fp32, not bf16; set precision: fp32"),
        ({"hardware": "T4"}, "model.encoder", "signs runs on cpu, but hardware T4 is cuda; change hardware"),
        ({"model": {"encoder": "signs", "compile": True}}, "model", "does not work with encoder signs"),
        ({"model": {"encoder": "absent"}}, "model.encoder", "'fused', 'binary' or 'signs'"),
    ],
)
def test_what_it_cannot_run_is_refused(document, field, reason):
    with pytest.raises(SpecError, match=reason) as refused:
        validate({**MINIMAL, "model": {"encoder": "signs"}, **document})
    assert [problem.path for problem in refused.value.problems] == [field]
