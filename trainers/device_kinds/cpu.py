from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from trainers.device_kinds.kind import DeviceKind
from trainers.device_kinds.processor import has_bf16_units

if TYPE_CHECKING:
    from trainers.device_kinds.backend import Backend


@cache
def _load() -> Backend:
    from trainers.device_kinds.backend import Backend

    return Backend()


def _caution(precision: str) -> str | None:
    if precision != "bf16" or has_bf16_units():
        return None
    return (
        "is slower than fp32 on processors without AMX, such as this machine's: its products are "
        "fp32's, with rounded operands and results"
    )


CPU = DeviceKind(
    name="cpu",
    summary="the node's CPUs",
    noun="CPU",
    torch_type="cpu",
    load=_load,
    counted_in_cpus=True,
    link_gb_s=1.0,  # 10 Gbit Ethernet
    serves=MappingProxyType({"model.cuda_graphs": (False,)}),
    caution=_caution,
    emulates_halves=True,
    teacher_precisions=("bf16", "fp32"),
    host_dropout=True,
    kernels="cpu",
)
