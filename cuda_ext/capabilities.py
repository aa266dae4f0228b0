"""Which implementation can run on which device, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from cuda_ext import build, native
from cuda_ext.errors import BuildError

IMPLEMENTATIONS = ("single_unfused", "multi_unfused", "single_fused", "multi_fused")
"""Slowest to fastest; all give the same result to rounding."""

UNFUSED_TWIN: Mapping[str, str] = MappingProxyType(
    {"single_fused": "single_unfused", "multi_fused": "multi_unfused"}
)
"""What runs in place of a fused implementation that cannot."""


@dataclass(frozen=True)
class Availability:
    implementation: str
    device: str
    """`cpu` or `cuda`."""
    available: bool
    reason: str
    """What runs (`avx2 kernels`), or in one line why not."""


def why_not(implementation: str, device_type: str) -> str | None:
    """None when the implementation runs on this type of device; compiles its kernels if need be."""
    if implementation not in UNFUSED_TWIN:
        return None
    if device_type not in ("cpu", "cuda"):
        return f"there are no kernels for {device_type}"
    return native.why_unavailable(device_type)


def availability(*, compile_now: bool = True) -> tuple[Availability, ...]:
    """Returns every implementation on `cpu` and `cuda`.

    Without `compile_now`, kernels that a compiler could still make count as available.
    """
    rows = []
    for device in ("cpu", "cuda"):
        fused_row = _fused(device, compile_now)
        for implementation in IMPLEMENTATIONS:
            if implementation in UNFUSED_TWIN:
                available, reason = fused_row
            elif device == "cuda" and not torch.cuda.is_available():
                available, reason = False, "no CUDA device is visible"
            else:
                available, reason = True, "PyTorch operations"
            rows.append(Availability(implementation, device, available, reason))
    return tuple(rows)


def _fused(device: str, compile_now: bool) -> tuple[bool, str]:
    if device == "cuda" and not torch.cuda.is_available():
        return False, build.why_no_cuda() or "no CUDA device is visible"
    if not compile_now and not build.is_built(device):
        try:
            build.compiler()
            if device == "cuda":
                build.nvcc()
        except BuildError as error:
            return False, str(error)
        return True, "will be compiled at first use"
    reason = native.why_unavailable(device)
    if reason is not None:
        return False, reason
    return True, f"{native.cpu_capability()} kernels" if device == "cpu" else "CUDA kernels"
