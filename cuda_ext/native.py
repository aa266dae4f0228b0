"""The compiled operators: which can run where, loading, shapes for torch.compile, counters.

`stillhouse::adan_` and `stillhouse::grad_norm` are declared in `csrc/adan_cpu.cpp`; a CPU
library carries the schemas and the CPU kernels, a second one the CUDA kernels.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cuda_ext import BuildError, build

IMPLEMENTATIONS = ("single_unfused", "multi_unfused", "single_fused", "multi_fused")
"""Slowest to fastest; all give the same result to rounding."""

UNFUSED_TWIN: Mapping[str, str] = {"single_fused": "single_unfused", "multi_fused": "multi_unfused"}
"""What runs in place of a fused implementation that cannot."""

_lock = threading.Lock()
_loaded: dict[str, Path] = {}
_unavailable: dict[str, str] = {}

python_counts: Counter[str] = Counter()
"""Tensors updated by the unfused implementations in this process, by name of the implementation."""


def require(device_type: str) -> None:
    """Loads the kernels for `cpu` or `cuda`, compiled at first use; raises BuildError, which says why not."""
    if device_type in _loaded:
        return
    with _lock:
        if device_type in _loaded:
            return
        if device_type in _unavailable:
            raise BuildError(_unavailable[device_type])
        try:
            for kind in ("cpu", "cuda") if device_type == "cuda" else (device_type,):
                if kind not in _loaded:
                    path = build.library(kind)
                    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
                    if kind == "cpu":
                        _register_fakes()
                    _loaded[kind] = path
        except (BuildError, OSError) as error:
            _unavailable[device_type] = str(error)
            raise BuildError(str(error)) from error


def adopt(kind: str, path: Path) -> None:
    """Uses an already loaded library instead of the one that `require` would load."""
    _loaded[kind] = path


def is_loaded(kind: str) -> bool:
    return kind in _loaded


def why_unavailable(device_type: str, load: Callable[[str], None] | None = None) -> str | None:
    """None when `load`, or else `require`, finds kernels for `device_type`; else the reason, in one line."""
    try:
        (load or require)(device_type)
    except BuildError as error:
        return str(error)
    return None


def counters() -> dict[str, int]:
    """Returns what ran in this process so far.

    Counts of `cpu_*` and `cuda_*` are from the kernels' launchers; `single_unfused` and `multi_unfused` are
    tensors updated by PyTorch code.
    """
    counts = {name: python_counts[name] for name in ("single_unfused", "multi_unfused")}
    if "cpu" in _loaded:
        names = ("cpu_calls", "cpu_tensors", "cpu_elements", "cpu_norms")
        counts.update(zip(names, torch.ops.stillhouse.cpu_counters(), strict=True))
    if "cuda" in _loaded:
        names = ("cuda_launches", "cuda_tensors", "cuda_norms", "cuda_tables")
        counts.update(zip(names, torch.ops.stillhouse.cuda_counters(), strict=True))
    return counts


def cpu_capability() -> str:
    """Instruction set of the CPU kernels here: `avx512`, `avx2` or `scalar`."""
    require("cpu")
    return str(torch.ops.stillhouse.cpu_capability())


def grad_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all elements of all `gradients`: one float32, on their device, no synchronisation."""
    norm: Tensor = torch.ops.stillhouse.grad_norm(gradients)
    return norm


def _register_fakes() -> None:
    fake = torch.library.register_fake
    fake("stillhouse::adan_", lambda *_arguments: None)
    fake("stillhouse::grad_norm", lambda grads: grads[0].new_empty((), dtype=torch.float32))


@dataclass(frozen=True)
class Availability:
    implementation: str
    device: str  # `cpu` or `cuda`
    available: bool
    reason: str  # What runs (`avx2 kernels`), or in one line why not


def why_not(implementation: str, device_type: str) -> str | None:
    """None when the implementation runs on this type of device; compiles its kernels if need be."""
    if implementation not in UNFUSED_TWIN:
        return None
    if device_type not in ("cpu", "cuda"):
        return f"there are no kernels for {device_type}"
    return why_unavailable(device_type)


def availability(*, compile_now: bool = True) -> tuple[Availability, ...]:
    """Returns every implementation on `cpu` and `cuda`.

    Without `compile_now`, kernels that a compiler could still make count as available.
    """
    rows = []
    for device in ("cpu", "cuda"):
        fused, unfused = _fused(device, compile_now), (True, "PyTorch operations")
        if device == "cuda" and not torch.cuda.is_available():
            unfused = False, "no CUDA device is visible"
        for implementation in IMPLEMENTATIONS:
            row = fused if implementation in UNFUSED_TWIN else unfused
            rows.append(Availability(implementation, device, *row))
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
    reason = why_unavailable(device)
    if reason is not None:
        return False, reason
    return True, f"{cpu_capability()} kernels" if device == "cpu" else "CUDA kernels"
