"""Parity records, availability, gradient noise."""

from __future__ import annotations

import json

import pytest
import torch

from cuda_ext import Adan, ConfigurationError, availability, parity


def test_a_parity_record_passes_and_names_what_ran(implementation: str) -> None:
    record = parity(implementation, steps=3, max_grad_norm=0.5)
    assert record.passed
    assert record.implementation == implementation
    assert sum(record.kernels_ran.values()) > 0
    assert json.loads(json.dumps(record.as_dict()))["implementation"] == implementation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters_have_parity(kernels: None, dtype: torch.dtype) -> None:
    assert parity("multi_fused", dtype=dtype, steps=3).passed


def test_a_wrong_step_fails_its_parity_record(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Adan.step

    def biased(self: Adan, closure: None = None) -> None:
        real(self, closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(1.0 + 1e-4)

    monkeypatch.setattr(Adan, "step", biased)
    assert not parity("multi_fused", steps=3).passed


def test_availability_covers_every_implementation_on_both_devices(kernels: None) -> None:
    rows = {(row.implementation, row.device): row for row in availability()}
    assert len(rows) == 8
    assert rows["multi_fused", "cpu"].available
    assert "kernels" in rows["multi_fused", "cpu"].reason
    if not torch.cuda.is_available():
        assert not rows["multi_fused", "cuda"].available
        assert "CUDA" in rows["multi_fused", "cuda"].reason


def test_gradient_noise_is_that_of_the_two_last_gradients(implementation: str) -> None:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 1025, 70_000)]
    optimizer = Adan(params, implementation=implementation, gradient_noise=True)
    with pytest.raises(ConfigurationError, match="gradient_noise=True"):
        Adan(params, implementation=implementation).gradient_noise()
    gradients = []
    for _ in range(3):
        gradients.append([torch.randn_like(param) + 0.1 for param in params])
        for param, gradient in zip(params, gradients[-1], strict=True):
            param.grad = gradient.clone()
        optimizer.step()
    old, new = (torch.cat([g.double() for g in gs]) for gs in gradients[1:])
    noise = optimizer.gradient_noise()
    assert noise.elements == 71_028
    assert noise.product == pytest.approx(float(old @ new), rel=1e-5, abs=1e-2)
    assert noise.difference_square == pytest.approx(float((new - old).square().sum()), rel=1e-5)
    assert noise.square == pytest.approx(float(new.square().sum()), rel=1e-5)
    assert noise.noise_scale(32) == pytest.approx(32 * noise.difference_square / 2 / noise.product)


def test_the_first_step_has_no_noise_to_tell(implementation: str) -> None:
    param = torch.nn.Parameter(torch.zeros(9))
    optimizer = Adan([param], implementation=implementation, gradient_noise=True)
    param.grad = torch.ones(9)
    optimizer.step()
    noise = optimizer.gradient_noise()
    assert (noise.elements, noise.square) == (0, 0.0)
    assert noise.noise_scale(8) == float("inf")
