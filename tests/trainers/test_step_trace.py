"""Launches, bytes and host reads of a training step, counted without a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.encoders import traced
from cuda_ext import encoder as kernels
from trainers.telemetry.step_trace import StepTrace

META = torch.device("meta")


def test_an_operator_is_a_launch_and_a_view_is_none():
    x = torch.empty(4, 6, device=META)
    with StepTrace() as trace:
        y = (x.view(6, 4).t() + 1.0).unsqueeze(0)
        y.mul_(2.0)
    assert trace.launches == {"aten.add.Tensor": 1, "aten.mul_.Tensor": 1}
    assert trace.bytes == 4 * (2 * 24 + 2 * 24)


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


LAUNCHES = {"huggingface": 970, "packed": 600, "fused": 390}
"""Upper bounds for a training step of BERT-base in bf16."""


@pytest.mark.parametrize("encoder", LAUNCHES)
def test_launches_of_a_step_of_bert_base(encoder):
    if reason := kernels.why_unavailable("cpu"):
        pytest.skip(f"no kernels here: {reason}")
    assert traced("base", encoder)[0] <= LAUNCHES[encoder]
