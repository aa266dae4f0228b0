"""Whether a processor's bf16 products are worth taking, by its flags."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainers import device_kinds
from trainers.config import Precision
from trainers.device_kinds import CPU, backend, has_fast_bf16
from trainers.models.precision import Autocast, Rounded, arithmetic_for


@pytest.mark.parametrize(
    ("lines", "fast"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16 avx512_fp16\n", False),
        ("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile amx_int8\n", True),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f avx512_bf16\n", True),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 fma\n", False),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx512_bf16\n\nvendor_id\t: AuthenticAMD\n", False),
        ("flags\t\t: fpu avx2 fma\n", False),
        ("Features\t: fp asimd i8mm bf16\n", True),
        ("", False),
    ],
)
def test_what_makes_bf16_faster(tmp_path: Path, lines: str, fast: bool) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\n" + lines)
    assert has_fast_bf16(tmp_path / "cpuinfo") is fast
    assert not has_fast_bf16(tmp_path / "elsewhere")


def test_without_them_bf16_is_computed_by_fp32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True, raising=False)
    for fast, arithmetic in ((False, Rounded), (True, Autocast)):
        monkeypatch.setattr(backend, "has_fast_bf16", lambda fast=fast: fast)
        assert type(arithmetic_for(Precision.bf16, torch.device("cpu"))) is arithmetic


def test_the_cpu_cautions_of_bf16_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kinds, "has_fast_bf16", lambda: False)
    assert "is slower than fp32 on processors without units for it" in str(CPU.caution("bf16"))
    assert CPU.caution("fp32") is None
    monkeypatch.setattr(device_kinds, "has_fast_bf16", lambda: True)
    assert CPU.caution("bf16") is None
