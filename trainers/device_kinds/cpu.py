"""The CPU."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from trainers.device_kinds.kind import DeviceKind

if TYPE_CHECKING:
    from trainers.device_kinds.backend import Backend


@cache
def _load() -> Backend:
    from trainers.device_kinds.backend import Backend

    return Backend()


CPU = DeviceKind(
    name="cpu",
    summary="the node's CPUs",
    noun="CPU",
    torch_type="cpu",
    load=_load,
    counted_in_cpus=True,
    link_gb_s=1.0,  # 10 Gbit Ethernet
    emulates_halves=True,
    teacher_precisions=("bf16", "fp32"),
    host_dropout=True,
    kernels="cpu",
)
