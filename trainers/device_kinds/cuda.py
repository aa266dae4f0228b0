from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from trainers.device_kinds.kind import DeviceKind

if TYPE_CHECKING:
    from trainers.device_kinds.backend import Backend


@cache
def _load() -> Backend:
    from trainers.device_kinds.cuda_backend import CudaBackend

    return CudaBackend()


CUDA = DeviceKind(
    name="cuda",
    summary="an NVIDIA GPU",
    noun="GPU",
    torch_type="cuda",
    load=_load,
    ray_resource="GPU",
    ray_scaling=MappingProxyType({"use_gpu": True}),
    proven=False,
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
