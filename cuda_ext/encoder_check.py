"""Registers and spills of the encoder's Triton kernels, compiled without a GPU, and the bytes they move.

python -m cuda_ext.encoder_check           # every target
python -m cuda_ext.encoder_check sm_90     # one of them
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cuda_ext.build import ARCHITECTURES
from cuda_ext.errors import BuildError

TARGETS: Mapping[str, int] = MappingProxyType(
    {f"sm_{number}": int(number) for number in (name.replace(".", "") for name in ARCHITECTURES)}
)
"""GPUs that the kernels are compiled for, as Triton numbers them: those of the CUDA kernels."""

WIDTHS = (384, 768, 1024, 3072)
"""Widths of rows: MiniLM, BERT-base, BERT-large, and BERT-base's inner layer."""

REGISTER_LIMIT = 128
"""Registers per thread with which 16 warps fit on a multiprocessor."""

_POINTERS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("ids_ptr", "types_ptr", "positions_ptr", "labels_ptr"), "i64")
    | dict.fromkeys(("mean_ptr", "rstd_ptr", "sums_ptr", "lse_ptr", "losses_ptr"), "fp32")
)
"""What pointers point to, where it is not an activation or a parameter."""

_SCALARS: Mapping[str, str] = MappingProxyType({"eps": "fp32", "scale": "fp32", "offset": "i64"})
"""Types of numbers other than int32."""
_SEEDS = ("i64", "*i64")

_USED = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+).* LOCAL:(?P<local>\d+)")


@dataclass(frozen=True)
class KernelResources:
    """What one kernel takes on one target.

    Attributes:
        target: such as `sm_90`.
        kernel: its name.
        width: elements of a row.
        registers: of a thread.
        spill_bytes: of a thread, in local memory.
    """

    target: str
    kernel: str
    width: int
    registers: int
    spill_bytes: int


def kernel_resources(
    targets: Sequence[str] = tuple(TARGETS), widths: Sequence[int] = WIDTHS
) -> list[KernelResources]:
    """Compiles every kernel for every target, for bfloat16 with dropout; with a seed, also for one in memory.

    Raises:
        BuildError: Triton is not installed, or it interprets instead of compiling.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise BuildError("TRITON_INTERPRET=1 interprets kernels instead of compiling them; unset it")
    try:
        from cuda_ext import encoder_triton
    except ImportError:
        raise BuildError("Triton is not installed; install triton") from None
    kernels = [value for name, value in vars(encoder_triton).items() if name.endswith("_kernel")]
    return [
        _compiled(kernel, target, width, seed)
        for target in targets
        for width in widths
        for kernel in kernels
        for seed in (_SEEDS if "seed" in kernel.arg_names else _SEEDS[:1])
    ]


def _compiled(kernel: Any, target: str, width: int, seed: str) -> KernelResources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cuda_ext import encoder_triton as kernels

    name = kernel.__name__
    flat = {
        "bias_gelu_kernel": 1024,
        "bias_gelu_backward_kernel": kernels.COLUMNS,
        "totals_kernel": kernels.TOTAL_COLUMNS,
        "joint_gradient_kernel": kernels.JOINT_COLUMNS,
    }
    block = flat.get(name, min(kernels.block_of(width), 4096))
    constants = {"BLOCK": block, "DROPS": True, "OTHER": True, "ROWS": kernels.JOINT_ROWS}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {
        argument: "constexpr"
        if argument in constants
        else f"*{_POINTERS.get(argument, 'bf16')}"
        if argument.endswith("_ptr")
        else {**_SCALARS, "seed": seed}.get(argument, "i32")
        for argument in kernel.arg_names
    }
    sums = "sums_ptr" in kernel.arg_names
    fixed = {"bias_gelu_kernel": 4, "totals_kernel": 4, "joint_gradient_kernel": 8}
    warps = fixed.get(name) or kernels.warps_of(block, sums=sums)
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants),
        target=GPUTarget("cuda", TARGETS[target], 32),
        options={"num_warps": warps},
    )
    registers, spilled = _usage(compiled.asm["cubin"])
    return KernelResources(target, name, width, registers, spilled)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of the one kernel in a cubin, by cuobjdump, which Triton brings."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=False
        )
    found = _USED.search(done.stdout)
    if found is None:
        raise BuildError(f"cuobjdump reports no registers: {(done.stdout + done.stderr).strip()[-200:]}")
    return int(found["registers"]), int(found["stack"]) + int(found["local"])


def bytes_moved(operator: str, *, rows: int, width: int, element: int) -> int:
    """Returns the bytes that a fused operator reads and writes in memory, each array once.

    Parameters, indices and sums over rows are left out: they do not grow with rows x width.

    Args:
        operator: its name in `cuda_ext.encoder_triton.OPERATORS`.
        rows, width: of the activations.
        element: bytes of one.
    """
    return ARRAYS[operator] * rows * width * element


ARRAYS: Mapping[str, int] = MappingProxyType(
    {
        "bias_gelu": 2,
        "bias_gelu_backward": 3,
        "dropout_add_norm": 4,
        "dropout_add_norm_backward": 4,
        "embed_norm": 4,
        "embed_norm_backward": 5,
        "cross_entropy": 1,
        "cross_entropy_backward": 2,
        "bias_gelu_backward_sums": 3,
        "dropout_add_norm_backward_sums": 4,
        "column_totals": 0,
        "joint_gradient": 6,
    }
)
"""Arrays of rows x width that an operator reads or writes."""


def main() -> int:
    """Command line; exit code 1 when a kernel spills or takes too many registers."""
    targets = tuple(sys.argv[1:]) or tuple(TARGETS)
    found = kernel_resources(targets)
    for target in targets:
        rows = [row for row in found if row.target == target]
        worst = max(rows, key=lambda row: row.registers)
        print(
            f"{target}: {len(rows)} kernels, at most {worst.registers} registers ({worst.kernel}, width "
            f"{worst.width}), {sum(row.spill_bytes for row in rows)} bytes spilled"
        )
    return 0 if all(row.spill_bytes == 0 and row.registers <= REGISTER_LIMIT for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
