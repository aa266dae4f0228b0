"""Registers and spills of every CUDA kernel, as the assembler reports them; needs nvcc, no GPU.

python -m tests.cuda_ext.kernel_check            # every target
python -m tests.cuda_ext.kernel_check 9.0        # one of them
python -m tests.cuda_ext.kernel_check 7.0        # V100, by CUDA 12's run-time compiler

CUDA 13 has no V100 (7.0). The package index has CUDA 12's run-time compiler and headers, though not its nvcc
(`nvidia-cuda-nvrtc-cu12`, `nvidia-cuda-runtime-cu12`); the image for CUDA 12 has NVIDIA's own nvcc.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from os import cpu_count
from pathlib import Path
from typing import Any

from cuda_ext import BuildError, build

REGISTER_LIMIT = 64  # Registers per thread with which four blocks of 256 threads fit on a multiprocessor
VOLTA = "7.0"  # A V100's compute capability, which CUDA 13 does not know
_ENTRY = re.compile(r"Compiling entry function '(?P<kernel>\w+)' for '(?P<target>\w+)'")
_SPILL = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")
_USED = re.compile(r"Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?")


@dataclass(frozen=True)
class KernelResources:
    target: str
    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int = 0
    width: int = 0  # Of the rows that a kernel is compiled for; 0 = of any


def parse(log: str) -> list[KernelResources]:
    kernels: list[KernelResources] = []
    kernel = target = ""
    spill = 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            kernel, target, spill = entry["kernel"], entry["target"], 0
        elif spilled := _SPILL.search(line):
            spill = int(spilled["stores"]) + int(spilled["loads"])
        elif (used := _USED.search(line)) and kernel:
            kernels.append(
                KernelResources(target, kernel, int(used["registers"]), spill, int(used["shared"] or 0))
            )
            kernel = ""
    return kernels


def kernel_resources(
    architectures: tuple[str, ...] = build.ARCHITECTURES, units: Sequence[str] = build.CUDA_UNITS
) -> list[KernelResources]:
    """Assembles every kernel for every target; results for the same sources are read from the cache."""
    if architectures == (VOLTA,):
        logs = (nvrtc_assemble(f"{unit}.cu", VOLTA) for unit in units)
        return [resources for log in logs for resources in parse(log)]
    nvcc = build.nvcc()
    _, release = build.toolkit(nvcc)
    digest = hashlib.sha256(release.encode())
    patterns = ("*_cuda*.cu*", "adan_*.h", "binary_product.h", "number_formats.h")
    for path in sorted(path for pattern in patterns for path in build.SOURCES.glob(pattern)):
        digest.update(path.read_bytes())
    folder = build.cache_folder() / f"resources-{digest.hexdigest()[:20]}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    jobs = [
        (unit, folder / f"{architecture}-{unit.name}.json")
        for architecture in architectures
        for unit in build.cuda_units(nvcc, (architecture,), "-Xptxas=-v", units=units)
    ]
    with ThreadPoolExecutor(cpu_count() or 1) as pool:
        parts = list(pool.map(lambda job: _resources_of(*job), jobs))
    return [resources for part in parts for resources in part]


def _resources_of(unit: build.Unit, cached: Path) -> list[KernelResources]:
    if cached.exists():
        return [KernelResources(**row) for row in json.loads(cached.read_text())]
    with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
        source, output = str(build.SOURCES / unit.source), f"{folder}/kernels.cubin"
        kernels = parse(build.run([unit.compiler, *unit.flags, "-cubin", source, "-o", output]))
        note = Path(folder) / "note.json"
        note.write_text(json.dumps([asdict(resources) for resources in kernels]))
        note.replace(cached)
    return kernels


def summary(kernels: list[KernelResources]) -> str:
    lines = []
    for target in sorted(
        {resources.target for resources in kernels}, key=lambda name: int(name.removeprefix("sm_"))
    ):
        rows = [resources for resources in kernels if resources.target == target]
        most = max(resources.registers for resources in rows)
        spills = sum(resources.spill_bytes for resources in rows)
        lines.append(f"{target}: {len(rows)} kernels, at most {most} registers, {spills} bytes spilled")
    return "\n".join(lines)


def within_limits(kernels: list[KernelResources]) -> bool:
    return all(row.spill_bytes == 0 and row.registers <= REGISTER_LIMIT for row in kernels)


# There are no host headers. Functions that launch are compiled for the device as well, and never called: they
# only need something to call.
_HEADERS = {
    "algorithm": """#pragma once
namespace std {
template <class T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T> constexpr T max(T a, T b) { return a < b ? b : a; }
template <class I, class O> O copy(I from, I end, O to) { while (from != end) *to++ = *from++; return to; }
}""",
    "cmath": "",
    "cstdint": """#pragma once
typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned uint32_t;
typedef unsigned long long uint64_t;""",
    "cstring": """#pragma once
namespace std { using ::memcpy; }
template <class... T> cudaError_t cudaLaunchKernel(T...) { return cudaSuccess; }""",
}  # fmt: skip


def _nvrtc_folder(part: str) -> Path:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (Path(root) / part).is_dir():
            return Path(root) / part
    raise BuildError(
        "CUDA 12's run-time compiler is not installed; install nvidia-cuda-nvrtc-cu12 and "
        "nvidia-cuda-runtime-cu12"
    )


def nvrtc_release() -> str:
    """The compiler's CUDA release, such as `12.6`."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def nvrtc_assemble(source: str, architecture: str) -> str:
    """Compiles a file of `csrc/` for a compute capability such as `7.0`; returns the assembler's output."""
    library, program = _nvrtc(), ctypes.c_void_p()
    text = (build.SOURCES / source).read_bytes()
    options = (
        f"--gpu-architecture=sm_{architecture.replace('.', '')}",
        "-std=c++17",
        "-default-device",
        # Files that call the runtime leave its functions to be linked; else kernels are compiled as wholes.
        f"-rdc={'true' if b'cudaError' in text else 'false'}",
        "--ptxas-options=-v",
        f"-I{build.SOURCES}",
        f"-I{_nvrtc_folder('cuda_runtime') / 'include'}",
    )
    library.nvrtcCreateProgram(
        ctypes.byref(program),
        text,
        source.encode(),
        len(_HEADERS),
        _c_strings(_HEADERS.values()),
        _c_strings(_HEADERS),
    )
    try:
        failed = library.nvrtcCompileProgram(program, len(options), _c_strings(options))
        size = ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    report = log.value.decode()
    if failed:
        first = next((line for line in report.splitlines() if "error" in line), f"error {failed}")
        raise BuildError(f"CUDA {nvrtc_release()} cannot compile {source} for {architecture}: {first}")
    return report


def _c_strings(texts: Iterable[str]) -> Any:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _nvrtc() -> ctypes.CDLL:
    return ctypes.CDLL(str(_nvrtc_folder("cuda_nvrtc") / "lib" / "libnvrtc.so.12"))


def main() -> int:
    """Exit code 1 when a kernel spills or takes too many registers."""
    kernels = kernel_resources(tuple(sys.argv[1:]) or build.ARCHITECTURES)
    print(summary(kernels))
    return 0 if within_limits(kernels) else 1


if __name__ == "__main__":
    sys.exit(main())
