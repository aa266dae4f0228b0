"""The parity check at start: what it compares, and that it finds the faults that it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_ext import encoder as kernels
from tests.trainers.family_models import TEXTS, write_model
from tests.trainers.models.test_families import student_of
from trainers.data import tokenizers
from trainers.data.batches import Segments
from trainers.data.segments import pack
from trainers.data.tokens import tokenise
from trainers.entrypoint import train
from trainers.model_kinds.encoders import ENCODERS
from trainers.model_kinds.families import FAMILIES
from trainers.model_kinds.heads import ClassHead
from trainers.models import dropout, parity
from trainers.models.parity import EncoderParity
from trainers.models.precision import Arithmetic, Autocast
from trainers.reporting import NeverStop
from trainers.tasks.scores import class_loss

PACKING = [
    (family.name, encoder.name)
    for family in FAMILIES.values()
    for encoder in ENCODERS.values()
    if encoder.packs and encoder.supports(family)
]
FP32 = Arithmetic()


@pytest.fixture(autouse=True)
def operators() -> None:
    if reason := kernels.why_unavailable("cpu"):
        pytest.skip(f"no kernels here: {reason}")


def measured(
    folder: Path, family: str, encoder: str, arithmetic: Arithmetic = FP32, *, rate: float = 0.1
) -> EncoderParity:
    """The parity of an encoder on texts, as a run measures it."""
    write_model(folder, family, ClassHead(("no", "yes")))
    tokenizer = tokenizers.load(folder)
    pad_id = tokenizers.SpecialTokens.of(tokenizer, folder).id_of("pad_token")
    data = tokenise([(text,) for text in TEXTS * 3], np.arange(12) % 2, tokenizer, 64, lambda done: None)
    model = student_of(folder, ClassHead(("no", "yes")), dropout=rate)
    state = torch.get_rng_state()
    found = parity.measure(
        model,
        lambda model: ENCODERS[encoder].install(model.model),
        pack(parity.compared(data, pad_id, 1), pad_id=pad_id, multiple=8),
        class_loss,
        encoder=encoder,
        arithmetic=arithmetic,
    )
    assert torch.equal(torch.get_rng_state(), state)
    return found


@given(st.lists(st.integers(2, 600), min_size=1, max_size=50))
def test_short_long_and_odd_examples_are_compared(lengths: list[int]) -> None:
    rows = parity.chosen(np.array(lengths))
    found = [lengths[row] for row in rows]
    assert len(set(rows.tolist())) == len(rows)
    assert {min(lengths), max(lengths)} <= set(found)
    assert any(length % 2 for length in found) or not any(length % 2 for length in lengths)
    assert len(found) <= 4 or sum(found) <= 512


@pytest.mark.parametrize(("family", "encoder"), PACKING)
def test_every_encoder_passes_with_dropout_and_disturbs_no_generator(family, encoder, tmp_path) -> None:
    found = measured(tmp_path, family, encoder)
    assert found.passed
    assert found.dropout_mismatch is not None
    assert 0.0 < found.dropout_mismatch < 1e-5


@pytest.mark.parametrize("encoder", ["packed", "fused"])
def test_sixteen_bits_round_and_pass(encoder: str, tmp_path: Path) -> None:
    found = measured(tmp_path, "bert", encoder, Autocast(torch.device("cpu"), torch.bfloat16))
    assert found.passed
    assert found.dropout_mismatch is not None
    assert found.dropout_mismatch < 0.05


def test_a_model_that_drops_nothing_has_nothing_to_compare(tmp_path: Path) -> None:
    found = measured(tmp_path, "bert", "packed", rate=0.0)
    assert found.passed
    assert found.dropout_mismatch is None


def wrong_mask(attend: Any) -> Any:
    """Attention whose backward pass drops other elements than its forward pass."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any, rest: Any, options: Any) -> torch.Tensor:
            ctx.save_for_backward(query, key, value)
            ctx.rest, ctx.options = rest, options
            return attend(query, key, value, *rest, **options).detach()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            given = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            options = dict(ctx.options)
            if "seed" in options:
                options["seed"] = options["seed"] + 1
            with torch.enable_grad():
                out = attend(*given, *ctx.rest, **options)
            return *torch.autograd.grad(out, given, grads[0]), None, None

    return lambda query, key, value, *rest, **options: Wrong.apply(query, key, value, rest, options)


def break_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dropout, kernels):
        monkeypatch.setattr(module, "segment_attention", wrong_mask(module.segment_attention))


@pytest.mark.parametrize(("family", "encoder"), PACKING)
def test_a_backward_pass_with_another_mask_is_found(family, encoder, tmp_path, monkeypatch) -> None:
    break_masks(monkeypatch)
    found = measured(tmp_path, family, encoder)
    assert found.dropout_mismatch is not None
    assert 0.4 < found.dropout_mismatch < 2.5
    assert not found.passed
    assert found.gradient_max_rel <= max(4 * found.gradient_rounding, 2.0**-19)  # no other check finds it


@pytest.mark.parametrize("encoder", ["packed", "fused"])
def test_positions_that_count_padding_are_found(encoder: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Segments, "counted", lambda self, pad_id: self.position_ids + 1)
    assert not measured(tmp_path, "roberta", encoder).passed


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_a_trained_row_of_padding_is_found(family: str, tmp_path: Path, monkeypatch) -> None:
    embed = kernels.embed_norm
    monkeypatch.setattr(kernels, "embed_norm", lambda *given, padding, **options: embed(*given, **options))
    found = measured(tmp_path, family, "fused")
    assert not found.passed
    assert found.hidden_max_abs <= max(4 * found.hidden_rounding, 2.0**-19)


def test_a_run_warns_of_wrong_gradients_of_dropped_attention(config_in, tmp_path, recorder, monkeypatch):
    break_masks(monkeypatch)
    changes = {"model": {"name": "tiny", "encoder": "packed", "dropout": 0.1}, "length": {"steps": 1}}
    train(config_in(tmp_path, **changes), recorder, NeverStop())
    assert not recorder.facts["encoder_parity"]["passed"]
    (line,) = [line for line in recorder.logs if "differs from the default" in line]
    assert "gradients of dropped attention" in line
