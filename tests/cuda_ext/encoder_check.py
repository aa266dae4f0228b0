"""Registers and spills of the encoder's Triton kernels, compiled without a GPU.

python -m tests.cuda_ext.encoder_check           # every target
python -m tests.cuda_ext.encoder_check sm_90     # one of them
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cuda_ext import BuildError
from cuda_ext.build import ARCHITECTURES
from tests.cuda_ext.kernel_check import KernelResources

TARGETS: Mapping[str, int] = MappingProxyType(
    {f"sm_{number}": int(number) for number in (name.replace(".", "") for name in ARCHITECTURES)}
)
"""GPUs that the kernels are compiled for, as Triton numbers them: those of the CUDA kernels."""

WIDTHS = (384, 768, 1024, 3072)  # Widths of rows: MiniLM, BERT-base, BERT-large, and BERT-base's inner layer

REGISTER_LIMIT = 128  # Registers per thread with which 16 warps fit on a multiprocessor

_USED = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+).* LOCAL:(?P<local>\d+)")


@contextmanager
def compilation(target: str) -> Iterator[list[tuple[str, Any]]]:
    """Within it, Triton's launches compile for a target and do not run; yields (kernel, compiled) by launch.

    Raises BuildError if Triton is not installed, or interprets instead of compiling.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise BuildError("TRITON_INTERPRET=1 interprets kernels instead of compiling them; unset it")
    try:
        from triton.backends.compiler import GPUTarget
        from triton.runtime import JITFunction, driver
    except ImportError:
        raise BuildError("Triton is not installed; install triton") from None
    launches: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
        launches.append((kernel.__name__, compiled))
        return compiled

    before = driver._active
    gpu = GPUTarget("cuda", TARGETS[target], 32)
    absent = SimpleNamespace(
        get_current_target=lambda: gpu,
        get_current_device=lambda: str(gpu),  # by which Triton keeps what it has compiled
        get_current_stream=lambda device: 0,
    )
    driver.set_active(absent)
    JITFunction.run = compile_only
    try:
        yield launches
    finally:
        JITFunction.run = run
        driver._active = before


def launch_all(*, rows: int, width: int, dtype: torch.dtype, seed: Tensor, offset: int = 0) -> None:
    """Launches every operator of a training step, within `compilation`; activations take no memory."""
    from cuda_ext import encoder_triton as kernels

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x = empty(rows, width)
    row, parameter = empty(rows, dtype=torch.float32), empty(width, dtype=torch.float32)
    ids, table, types = empty(rows, dtype=torch.int64), empty(512, width), empty(2, width)
    drawn = (0.1, seed, offset)
    kernels.bias_gelu(x, parameter)
    kernels.bias_gelu_backward(x, x, parameter)
    kernels.dropout_add_norm(x, parameter, x, parameter, parameter, 1e-12, *drawn)
    kernels.dropout_add_norm_backward(x, None, x, row, row, parameter, *drawn)
    kernels.joint_gradient([x, x, x], torch.float32)
    padding = (0, -1, -1)
    kernels.embed_norm(ids, ids, ids, table, table, types, parameter, parameter, 1e-12, *drawn, padding)
    kernels.embed_norm_backward(x, ids, ids, ids, table, table, types, row, row, parameter, *drawn, padding)
    kernels.cross_entropy(x, ids, -100)
    kernels.cross_entropy_backward(row, x, ids, row, -100)


def kernel_resources(
    targets: Sequence[str] = tuple(TARGETS), widths: Sequence[int] = WIDTHS
) -> list[KernelResources]:
    """Compiles every kernel for every target as a step in bfloat16 does, from a seed of either kind."""
    resources: dict[int, KernelResources] = {}
    for target in targets:
        for width in widths:
            with compilation(target) as launches:
                for device in ("cpu", "meta"):
                    seed = torch.full((), 2**62 + 1, device=device)
                    launch_all(rows=4096, width=width, dtype=torch.bfloat16, seed=seed)
            for name, compiled in launches:
                if id(compiled) not in resources:
                    usage = _usage(compiled.asm["cubin"])
                    resources[id(compiled)] = KernelResources(target, name, *usage, width=width)
    return list(resources.values())


def _usage(cubin: bytes) -> tuple[int, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=False
        )
    usage = _USED.search(done.stdout)
    if usage is None:
        raise BuildError(f"cuobjdump reports no registers: {(done.stdout + done.stderr).strip()[-200:]}")
    return int(usage["registers"]), int(usage["stack"]) + int(usage["local"])


def main() -> int:
    """Exit code 1 when a kernel spills or takes too many registers."""
    targets = tuple(sys.argv[1:]) or tuple(TARGETS)
    resources = kernel_resources(targets)
    for target in targets:
        rows = [row for row in resources if row.target == target]
        worst = max(rows, key=lambda row: row.registers)
        print(
            f"{target}: {len(rows)} kernels, at most {worst.registers} registers ({worst.kernel}, width "
            f"{worst.width}), {sum(row.spill_bytes for row in rows)} bytes spilled"
        )
    return 0 if all(row.spill_bytes == 0 and row.registers <= REGISTER_LIMIT for row in resources) else 1


if __name__ == "__main__":
    sys.exit(main())
