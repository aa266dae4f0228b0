"""Bad input: a typed error that says what to do, or the documented behaviour."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cuda_ext import (
    Adan,
    ConfigurationError,
    HyperParameterError,
    LayoutError,
    SparseGradientError,
    TensorMismatchError,
)
from tests.cuda_ext.paired import Paired


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape or (5,), dtype=dtype))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": (0.98, 0.92, 1.0)}, "betas"),
        ({"betas": (-0.1, 0.92, 0.99)}, "betas"),
        ({"betas": (0.9, 0.99)}, "takes three"),
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": torch.ones(2)}, "tensor of 2 elements"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": float("inf")}, "weight_decay"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
    ],
)
def test_hyper_parameters_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(HyperParameterError, match=message):
        Adan([parameter()], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "fastest"}, "choose one of auto, single_unfused"),
        ({"master_weights": "half"}, "choose one of auto, fp32"),
        ({"moments_dtype": torch.float16}, r"torch.float32 or torch.bfloat16"),
        ({"capturable": True}, "CUDA"),
    ],
)
def test_options_that_cannot_be_served_are_refused(
    options: dict[str, Any], message: str, kernels: None
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Adan([parameter()], **options)


def test_a_refused_group_is_not_added(kernels: None) -> None:
    optimizer = Adan([parameter()])
    with pytest.raises(HyperParameterError):
        optimizer.add_param_group({"params": [parameter()], "lr": -1.0})
    assert len(optimizer.param_groups) == 1


def test_half_precision_cannot_be_split() -> None:
    with pytest.raises(ConfigurationError, match="bfloat16"):
        Adan([parameter(dtype=torch.float16)], master_weights="split")


def test_double_precision_runs_unfused_with_one_warning_or_is_refused(kernels: None) -> None:
    with pytest.raises(TensorMismatchError, match="multi_unfused"):
        Adan([parameter(dtype=torch.float64)], implementation="multi_fused")
    with pytest.warns(RuntimeWarning, match="multi_unfused instead of multi_fused"):
        optimizer = Adan([parameter(dtype=torch.float64)])
    assert optimizer.implementation == "multi_unfused"
    optimizer.param_groups[0]["params"][0].grad = torch.ones(5, dtype=torch.float64)
    optimizer.step()
    assert optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].dtype == torch.float64


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(TensorMismatchError, match="complex64"):
        Adan([parameter(dtype=torch.complex64)])


def test_sparse_gradients_are_refused_with_a_reason(implementation: str) -> None:
    embedding = torch.nn.Embedding(7, 3, sparse=True)
    optimizer = Adan(embedding.parameters(), implementation=implementation)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(SparseGradientError, match="sparse=False"):
        optimizer.step()


def test_a_gradient_of_another_dtype_is_refused_before_anything_is_written(implementation: str) -> None:
    params = [parameter(), parameter()]
    optimizer = Adan(params, implementation=implementation)
    params[0].grad = torch.ones(5)
    params[1].grad = torch.ones(5)
    params[1].data = params[1].data.half()
    with pytest.raises(TensorMismatchError, match="float32"):
        optimizer.step()
    assert torch.equal(params[0], torch.ones(5))


def test_state_of_a_wrong_dtype_is_refused_before_anything_is_written(fused: str) -> None:
    param = parameter()
    optimizer = Adan([param], implementation=fused)
    param.grad = torch.ones(5)
    optimizer.step()
    before = param.detach().clone()
    optimizer.state[param]["exp_avg_sq"] = torch.zeros(5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="exp_avg_sq of parameter 0"):
        optimizer.step()
    assert torch.equal(param, before)


def test_clipping_over_two_devices_is_refused(kernels: None) -> None:
    params = [parameter(), torch.nn.Parameter(torch.ones(5, device="meta"))]
    with pytest.warns(RuntimeWarning, match="no kernels for meta"):
        optimizer = Adan(params, max_grad_norm=1.0)
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(ConfigurationError, match="clip_grad_norm_"):
        optimizer.step()


def test_a_parameter_with_gaps_is_refused_fused_and_served_unfused(implementation: str) -> None:
    strided = torch.zeros(6, 8)[:, ::2]
    paired = Paired([([strided, torch.zeros(3)], {})], implementation=implementation)
    drawn = paired.set_gradients()
    if implementation.endswith("_unfused"):
        paired.optimizer.step()
        paired.advance_reference(drawn)
        assert paired.worst_error() < 1e-3
    else:
        with pytest.raises(LayoutError, match="make it contiguous"):
            paired.optimizer.step()


def test_dense_parameters_in_another_order_follow_the_reference(implementation: str) -> None:
    """Channels-last and transposed parameters keep their order; other gradients are copied into it."""
    for value in (torch.zeros(3, 5, 7, 2).to(memory_format=torch.channels_last), torch.zeros(33, 65).t()):
        paired = Paired([([value], {})], implementation=implementation)
        paired.step(2)
        drawn = paired.set_gradients()
        param = paired.flat()[0]
        param.grad = drawn[0].contiguous()
        assert param.grad.stride() != param.stride()
        paired.optimizer.step()
        paired.advance_reference(drawn)
        paired.step(1)
        assert paired.worst_error() < 1e-3
        assert param.stride() == value.stride()
