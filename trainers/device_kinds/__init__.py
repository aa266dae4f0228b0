"""Kinds of devices that runs are placed on. Imports no torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from trainers.device_kinds.kind import DeviceKind
from trainers.registry import Deferred, by_name, entries_of

if TYPE_CHECKING:
    import torch

FAST_BF16 = ({"amx_bf16"}, {"bf16"}, {"AuthenticAMD", "avx512_bf16"})
"""What `/proc/cpuinfo` has of processors whose bf16 products beat fp32: AMX, Arm's BFMMLA, AMD's AVX-512.

With Intel's AVX-512 they do not: in the presets' shapes, oneDNN's bf16 products reach 0.55 to 0.62 of the
rate of MKL's in fp32 on a Xeon, and 2.1 to 2.6 times it on an EPYC (docs/precision.md).
"""


def has_fast_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether bf16 products are faster than fp32's; False where the system does not list flags."""
    return any(needed <= _flags(cpuinfo) for needed in FAST_BF16)


@cache
def _flags(cpuinfo: Path) -> frozenset[str]:
    """Flags and maker of the first processor."""
    try:
        first = cpuinfo.read_text(encoding="ascii", errors="replace").partition("\n\n")[0]
    except OSError:
        return frozenset()
    named = (line.partition(":") for line in first.splitlines())
    return frozenset(
        word
        for name, _, words in named
        if name.strip() in ("flags", "Features", "vendor_id")
        for word in words.split()
    )


def _caution(precision: str) -> str | None:
    if precision != "bf16" or has_fast_bf16():
        return None
    return (
        "is slower than fp32 on processors without units for it, such as this machine's: its products are "
        "fp32's, with rounded operands and results"
    )


CPU = DeviceKind(
    name="cpu",
    summary="the node's CPUs",
    noun="CPU",
    torch_type="cpu",
    load=Deferred("trainers.device_kinds.backend:Backend"),
    counted_in_cpus=True,
    link_gb_s=1.0,  # 10 Gbit Ethernet
    serves={"model.cuda_graphs": (False,)},
    caution=_caution,
    emulates_halves=True,
    teacher_precisions=("bf16", "fp32"),
    host_dropout=True,
    kernels="cpu",
)
CUDA = DeviceKind(
    name="cuda",
    summary="an NVIDIA GPU",
    noun="GPU",
    torch_type="cuda",
    load=Deferred("trainers.device_kinds.cuda_backend:CudaBackend"),
    ray_resource="GPU",
    pod_resource="nvidia.com/gpu",
    ray_scaling={"use_gpu": True},
    trained_on=("H200",),
    process_group="nccl",
    link_gb_s=25.0,  # PCIe 4 x16
    behind_host=True,
    nvml=True,
    searches_micro_batch=True,
    width_multiple=8,  # of matrix units; on CPU every column of padding costs time
    # fp16 is as fast as bf16, and eight times as precise.
    teacher_precisions=("fp16", "bf16", "fp32"),
    autocast_widens_norms=True,
    kernels="cuda",
)

DEVICE_KINDS: dict[str, DeviceKind] = by_name(CPU, CUDA, *entries_of("trainers.device_kinds.tpu"))
"""All values of `device` in the hardware catalogue."""


def kind_of(device: torch.device) -> DeviceKind:
    return next(kind for kind in DEVICE_KINDS.values() if kind.torch_type == device.type)


def trained_on() -> list[DeviceKind]:
    return [kind for kind in DEVICE_KINDS.values() if kind.installed]


def free_caches() -> None:
    for kind in trained_on():
        kind.backend.free_cache()
