"""Parity records and availability."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from cuda_ext import Adan, availability, measure_parity


def test_a_parity_record_passes_and_names_what_ran(implementation: str) -> None:
    record = measure_parity(implementation, steps=3, max_grad_norm=0.5)
    assert record.passed
    assert record.implementation == implementation
    assert sum(record.kernels_ran.values()) > 0
    assert json.loads(json.dumps(asdict(record)))["implementation"] == implementation


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters_have_parity(kernels: None, dtype: torch.dtype) -> None:
    assert measure_parity("multi_fused", dtype=dtype, steps=3).passed


def test_a_wrong_step_fails_its_parity_record(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Adan.step

    def biased(self: Adan, closure: None = None) -> None:
        real(self, closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(1.0 + 1e-4)

    monkeypatch.setattr(Adan, "step", biased)
    assert not measure_parity("multi_fused", steps=3).passed


def test_availability_covers_every_implementation_on_both_devices(kernels: None) -> None:
    rows = {(row.implementation, row.device): row for row in availability()}
    assert len(rows) == 8
    assert rows["multi_fused", "cpu"].available
    assert "kernels" in rows["multi_fused", "cpu"].reason
    if not torch.cuda.is_available():
        assert not rows["multi_fused", "cuda"].available
        assert "CUDA" in rows["multi_fused", "cuda"].reason
