"""CUDA's run-time compiler, to check kernels for GPUs that the installed toolkit no longer knows.

CUDA 13 has no V100 (7.0). The package index has CUDA 12's run-time compiler and headers, though not its nvcc
(`nvidia-cuda-nvrtc-cu12`, `nvidia-cuda-runtime-cu12`); the image for CUDA 12 has NVIDIA's own nvcc.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cuda_ext.build import SOURCES
from cuda_ext.errors import BuildError

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
template <class... T> cudaError_t cudaLaunchKernel(T...) { return cudaSuccess; }
template <class... T> cudaError_t cudaStreamIsCapturing(T...) { return cudaSuccess; }""",
}  # fmt: skip


def _folder(part: str) -> Path:
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        if (Path(root) / part).is_dir():
            return Path(root) / part
    raise BuildError(
        "CUDA 12's run-time compiler is not installed; install nvidia-cuda-nvrtc-cu12 and "
        "nvidia-cuda-runtime-cu12"
    )


def release() -> str:
    """The compiler's CUDA release, such as `12.6`."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def assemble(source: str, architecture: str) -> str:
    """Compiles a file of `csrc/` for a compute capability such as `7.0`; returns the assembler's output."""
    library, program = _library(), ctypes.c_void_p()
    text = (SOURCES / source).read_bytes()
    options = (
        f"--gpu-architecture=sm_{architecture.replace('.', '')}",
        "-std=c++17",
        "-default-device",
        # Files that call the runtime leave its functions to be linked; else kernels are compiled as wholes.
        f"-rdc={'true' if b'cudaError' in text else 'false'}",
        "--ptxas-options=-v",
        f"-I{SOURCES}",
        f"-I{_folder('cuda_runtime') / 'include'}",
    )
    library.nvrtcCreateProgram(
        ctypes.byref(program),
        text,
        source.encode(),
        len(_HEADERS),
        _strings(_HEADERS.values()),
        _strings(_HEADERS),
    )
    try:
        failed = library.nvrtcCompileProgram(program, len(options), _strings(options))
        size = ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    report = log.value.decode()
    if failed:
        first = next((line for line in report.splitlines() if "error" in line), f"error {failed}")
        raise BuildError(f"CUDA {release()} cannot compile {source} for {architecture}: {first}")
    return report


def _strings(texts: Iterable[str]) -> Any:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_folder("cuda_nvrtc") / "lib" / "libnvrtc.so.12"))
