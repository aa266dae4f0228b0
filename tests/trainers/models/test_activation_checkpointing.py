"""Encoder layers that are computed again in the backward pass: the same results from less memory."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.trainers.conftest import Recorder
from trainers.data.batches import Batch
from trainers.entrypoint import train
from trainers.model_kinds.heads import ClassHead
from trainers.models import dropout, student
from trainers.models.origin import Preset
from trainers.reporting import NeverStop

PLAIN = {"strategy": "single"}
CHECKPOINTED = {"strategy": "single", "activation_checkpointing": True}


def losses(config):
    recorder = Recorder()
    outcome = train(config, recorder, NeverStop())
    return recorder.series("loss"), outcome.summary["validation_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_are_bitwise_those_of_the_plain_run_dropout_included(config_in, tmp_path, precision):
    changes = {"model__dropout": 0.1, "precision": precision, "deterministic": True, "length": {"steps": 4}}
    plain = losses(config_in(tmp_path / "plain", parallel=PLAIN, **changes))
    assert losses(config_in(tmp_path / "again", parallel=CHECKPOINTED, **changes)) == plain


@pytest.mark.slow
def test_two_workers_have_the_losses_of_two_plain_ones(launch, config_in, tmp_path):
    two = {"strategy": "ddp", "workers": 2}
    configs = [
        config_in(
            tmp_path / str(again), parallel={**two, "activation_checkpointing": again}, deterministic=True
        )
        for again in (False, True)
    ]
    ended = launch(configs)
    plain, checkpointed = (run["losses"] for run in ended.results[0]["runs"])
    assert len(plain) == 6
    assert checkpointed == plain


def test_less_is_kept_for_the_backward_pass():
    assert kept_mib(checkpointed=True) < 0.35 * kept_mib(checkpointed=False)


def kept_mib(*, checkpointed: bool) -> float:
    """What a forward pass keeps beside the weights."""
    torch.manual_seed(0)
    model = student.build(
        Preset("mini"), head=ClassHead(("a", "b")), vocabulary_size=100, dropout=0.1, max_length=64, pad_id=0
    )
    dropout.install(model)
    if checkpointed:
        model.checkpoint_activations()
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        if tensor.data_ptr() not in weights:
            kept += tensor.numel() * tensor.element_size()
        return tensor

    ids = torch.randint(0, 100, (4, 64))
    batch = Batch(ids, None, None, torch.zeros(4, dtype=torch.long), torch.arange(4), 4, 256, 256)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(batch).logits.sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return kept / 2**20
