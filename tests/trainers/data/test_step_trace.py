"""Launches, bytes and host reads of a training step, counted without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.encoders import PAD, Traced, build, examples, install, list_launches, traced
from benchmarks.step_trace import StepTrace
from cuda_ext import encoder as kernels
from trainers.data.batches import collate
from trainers.data.segments import pack
from trainers.models.packed_attention import PACKED_ATTENTION, flash
from trainers.tasks.scores import class_loss

META = torch.device("meta")


def test_an_operator_is_a_launch_and_a_view_is_none():
    x = torch.empty(4, 6, device=META)
    with StepTrace() as trace:
        y = (x.view(6, 4).t() + 1.0).unsqueeze(0)
        y.mul_(2.0)
    assert trace.launches == {"aten.add.Tensor": 1, "aten.mul_.Tensor": 1}
    assert trace.bytes == 4 * (2 * 24 + 2 * 24)


def test_an_operator_counts_as_the_kernels_that_it_launches():
    x, weight, bias = (torch.empty(shape, device=META) for shape in ((8, 4), (4, 4), (4,)))
    indices = torch.zeros(8, dtype=torch.int64, device=META)
    with StepTrace() as trace:
        torch.addmm(bias, x, weight)
        torch.addmm(x, x, weight)
        torch.ops.aten.embedding_dense_backward(x, indices, 9, -1, False)
    assert trace.launches == {"aten.addmm.default": 1 + 2, "aten.embedding_dense_backward.default": 2}


def test_a_list_of_tensors_takes_a_launch_for_so_many_tensors_or_blocks():
    assert list_launches([1] * 110, 110) == 1
    assert list_launches([1] * 111, 110) == 2
    assert list_launches([320 * 65_536], 110) == 1
    assert list_launches([320 * 65_536 + 1, 5], 110) == 2


def test_the_gradient_of_a_selection_is_a_launch():
    x = torch.empty(1, 6, device=META, requires_grad=True)
    with StepTrace() as trace:
        (x[0] * 2.0).sum().backward()
    assert trace.launches["aten.select_backward.default"] == 1
    assert "aten.select.int" not in trace.launches


def test_tensors_of_the_host_are_not_counted():
    with StepTrace() as trace:
        torch.ones(3) + 1.0
    assert trace.launched == trace.bytes == 0


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.cpu(),
        lambda x: torch.empty(3).copy_(x),
    ],
    ids=["item", "bool", "to", "copy"],
)
def test_a_host_read_is_counted(read):
    x = torch.empty(3, device=META)
    with StepTrace() as trace:
        read(x)
    assert trace.host_reads.total() == 1


def test_a_wide_copy_of_16_bits_is_seen():
    x = torch.empty(3, 5, dtype=torch.bfloat16, device=META)
    with StepTrace() as trace:
        x.float().to(torch.bfloat16)
    assert trace.widened == [15]


def test_the_peak_is_of_what_is_alive_at_once():
    with StepTrace() as trace:
        x = torch.ones(10, device=META)
        for _ in range(3):
            x = x + 1.0
    assert trace.peak_bytes == 2 * 40


LAUNCHES = {"huggingface": 985, "packed": 645, "fused": 358}
"""Upper bounds for a training step of BERT-base in bf16: forward, backward, norm and optimizer."""


@pytest.fixture(scope="module")
def traces() -> dict[str, Traced]:
    if reason := kernels.why_unavailable("cpu"):
        pytest.skip(f"no kernels here: {reason}")
    return {encoder: traced("base", encoder) for encoder in LAUNCHES}


@pytest.mark.parametrize("encoder", LAUNCHES)
def test_launches_of_a_step_of_bert_base(encoder, traces):
    assert traces[encoder].launches <= LAUNCHES[encoder]


def test_a_fused_step_moves_fewer_bytes_and_needs_no_more_memory(traces):
    # `packed` too: without values, the default's attention is traced as single operations.
    fused, packed, default = (traces[encoder] for encoder in ("fused", "packed", "huggingface"))
    assert fused.bytes_per_token_layer < packed.bytes_per_token_layer < default.bytes_per_token_layer
    assert fused.peak_mib <= packed.peak_mib <= default.peak_mib


def test_parts_of_another_class_compute_the_layer_part_by_part(monkeypatch):
    """A hook reads what a module returns: the layer is then not one operation, and launches more."""
    model = install(build("tiny"), "fused", host=False).to(torch.bfloat16).to(META).train()
    batch = pack(collate(examples([9, 7], 16), np.arange(2), PAD, 8), pad_id=PAD, multiple=8).to(META)
    whole = launched(model, batch)
    layer = model.model.base_model.encoder.layer[0]
    layer.intermediate.register_forward_hook(lambda module, given, result: None)
    assert launched(model, batch) > whole


def launched(model, batch) -> int:
    with StepTrace() as trace:
        class_loss(model(batch).logits, batch).backward()
    return trace.launched


def test_activations_stay_in_16_bits_under_autocast(monkeypatch):
    """Only the gradient of the embeddings' output is widened: their tables and its computation are fp32."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, PACKED_ATTENTION, by_flash)
    model = install(build("tiny"), "fused", host=False).train()
    width = model.model.config.hidden_size
    batch = pack(collate(examples([40, 56], 64), np.arange(2), PAD, 8), pad_id=PAD, multiple=8)
    with FakeTensorMode(allow_non_fake_inputs=True), StepTrace("cpu") as trace:
        with torch.autocast("cpu", torch.bfloat16):
            loss = class_loss(model(batch).logits, batch)
        loss.backward()
    assert trace.host_reads.total() == 0
    of_tokens = [size for size in trace.widened if size % batch.tokens == 0]
    assert of_tokens == [batch.tokens * width]


def by_flash(module, query, key, value, attention_mask, dropout=0.0, scaling=None, segments=None, **options):
    """A GPU's attention, whatever the device of the fake tensors."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return flash(q, k, v, segments, dropout, scaling), None
