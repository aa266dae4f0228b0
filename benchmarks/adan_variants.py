"""Variants of Adan's fp32 CUDA kernel, of which the first ships, in the order of `adan_cuda_variants.cu`.

A to C are the kernels that chapter 4 of the study compares. `python -m benchmarks.optimizer --variants`
compiles them all, and times them where there is a GPU.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

import torch

from cuda_ext import BuildError, build, native
from tests.cuda_ext import kernel_check


@dataclass(frozen=True)
class Variant:
    """How a variant divides its work.

    Attributes:
        name: what sets it apart.
        threads: of a block.
        blocks: per multiprocessor, at least; the compiler keeps registers to what that needs.
        width: elements of one access.
        ahead: accesses to each array that a thread has under way before it uses the first.
        stages: turns that it copies to shared memory before it needs them; 0 = none.
        chunk: elements that a block takes at a time.
    """

    name: str
    threads: int
    blocks: int
    width: int
    ahead: int
    stages: int
    chunk: int


VARIANTS = (
    Variant("shipped", 256, 4, 4, 1, 0, 8192),
    Variant("A: float4, 1,024 threads", 1024, 1, 4, 1, 0, 65536),
    Variant("B: an element a thread", 1024, 1, 1, 1, 0, 65536),
    Variant("C: four elements a thread, unrolled", 512, 2, 1, 4, 0, 65536),
    Variant("chunk 2,048", 256, 4, 4, 1, 0, 2048),
    Variant("chunk 32,768", 256, 4, 4, 1, 0, 32768),
    Variant("chunk 65,536", 256, 4, 4, 1, 0, 65536),
    Variant("two float4 ahead", 256, 2, 4, 2, 0, 8192),
    Variant("four float4 ahead", 256, 1, 4, 4, 0, 8192),
    Variant("cp.async, three stages", 128, 4, 4, 1, 3, 8192),
)

_SHAPE = re.compile(r"ShapeILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)EEEff")


@dataclass(frozen=True)
class _Multiprocessor:
    threads: int
    shared_kib: int


# CUDA C++ Programming Guide, technical specifications per compute capability; all have 65,536 registers.
_MULTIPROCESSORS = {
    "7.0": _Multiprocessor(2048, 96),
    "7.5": _Multiprocessor(1024, 64),
    "8.0": _Multiprocessor(2048, 164),
    "8.6": _Multiprocessor(1536, 100),
    "8.9": _Multiprocessor(1536, 100),
    "9.0": _Multiprocessor(2048, 228),
    "10.0": _Multiprocessor(2048, 228),
    "12.0": _Multiprocessor(1536, 100),
}
_REGISTERS = 65536


@dataclass(frozen=True)
class VariantResources:
    """What a variant takes on a compute capability.

    Attributes:
        occupancy_pct: threads that fit on a multiprocessor by registers, shared memory and threads, of the
            most that it holds.
    """

    variant: str
    architecture: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    occupancy_pct: float


def variant_resources(architectures: tuple[str, ...] = build.ARCHITECTURES) -> list[VariantResources]:
    """Compiles every variant for every compute capability; needs nvcc, no GPU.

    Raises:
        BuildError: nvcc is missing or refuses the sources.
    """
    found = {}
    for row in kernel_check.kernel_resources(architectures, units=("adan_cuda_variants",)):
        if shape := _SHAPE.search(row.kernel):
            found[row.target, tuple(map(int, shape.groups()))] = row
    resources = []
    for architecture in architectures:
        for variant in VARIANTS:
            shape = (
                variant.threads, variant.blocks, variant.width, variant.ahead, variant.stages, variant.chunk,
            )  # fmt: skip
            row = found[f"sm_{architecture.replace('.', '')}", shape]
            resources.append(
                VariantResources(
                    variant.name,
                    architecture,
                    row.registers,
                    row.spill_bytes,
                    row.shared_bytes,
                    _occupancy_pct(architecture, variant.threads, row.registers, row.shared_bytes),
                )
            )
    return resources


def _occupancy_pct(architecture: str, threads: int, registers: int, shared_bytes: int) -> float:
    """Registers are given to warps in units of 256; of shared memory the system takes 1 KiB a block."""
    multiprocessor = _MULTIPROCESSORS[architecture]
    of_block = -(-registers * 32 // 256) * 256 * threads // 32
    blocks = min(
        multiprocessor.threads // threads,
        _REGISTERS // of_block,
        multiprocessor.shared_kib * 1024 // (shared_bytes + 1024),
    )
    return round(100.0 * blocks * threads / multiprocessor.threads, 1)


class VariantKernels:
    """The CUDA library with all variants, in the place of the one that trains, for this process.

    Raises:
        BuildError: it cannot be built here, or this process has loaded the one that trains.
    """

    def __init__(self) -> None:
        if native.is_loaded("cuda"):
            raise BuildError("this process has already loaded the CUDA kernels that train")
        native.require("cpu")
        path = build.compile_plan(build.cuda_plan(variants=True), build.cache_folder())
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        native.adopt("cuda", path)
        self._library = ctypes.CDLL(str(path))

    def choose(self, variant: Variant) -> None:
        """Makes fp32 steps use a variant from the next launch on."""
        if not self._library.stillhouse_adan_variant(ctypes.c_int(VARIANTS.index(variant))):
            raise BuildError(f"the library has no variant {variant.name}")
