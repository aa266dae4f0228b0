"""The CUDA kernels of Adan on the CPU, through ctypes: see `host_cuda/cuda_runtime.h`."""

from __future__ import annotations

import ctypes
import math
import shlex
import subprocess
from collections.abc import Sequence
from ctypes import c_bool, c_char_p, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cuda_ext import build
from cuda_ext.adan_state import state_dtypes

FOLDER = Path(__file__).parent / "host_cuda"
ORDERS = ("forward", "reverse", "random")
GUARD = 16
"""Elements before and after each buffer, which no kernel may touch."""
NORM_CHUNK = 8192
"""Elements of a chunk of the norm, and of the shipped kernel."""
STORAGES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MASTERS = {None: 0, "master": 1, "remainder": 2}
GROUP_OPTIONS = {"lr": 1e-2, "betas": (0.98, 0.92, 0.99), "eps": 1e-8, "weight_decay": 0.01}


class Row(ctypes.Structure):
    """`AdanTensor`."""

    _fields_ = [
        *((name, c_void_p) for name in ("param", "grad", "m", "v", "n", "g_prev", "master", "step")),
        ("numel", c_int64),
        ("first_chunk", c_int64),
        ("group", c_int32),
        ("aligned", c_int32),
    ]


class GroupRow(ctypes.Structure):
    """`AdanGroup`."""

    _fields_ = [
        *((name, c_double) for name in ("lr", "beta1", "beta2", "beta3", "eps", "weight_decay")),
        *((name, c_double) for name in ("log_beta1", "log_beta2", "log_beta3")),
        ("lr_tensor", c_void_p),
        ("no_prox", c_int32),
        ("maximize", c_int32),
    ]


class Launch(ctypes.Structure):
    """`AdanLaunch`."""

    _fields_ = [
        ("tensors", ctypes.POINTER(Row)),
        ("tensor_count", c_int64),
        ("chunk_count", c_int64),
        ("groups", ctypes.POINTER(GroupRow)),
        ("group_count", c_int32),
        ("storage", c_int32),
        ("master", c_int32),
        ("bfloat16_moments", c_bool),
        ("grad_scale", c_void_p),
        ("found_inf", c_void_p),
        ("grad_norm", c_void_p),
        ("max_grad_norm", c_double),
    ]


@dataclass
class Problem:
    """Parameters, state and settings of one launch, with guards around every buffer."""

    sizes: Sequence[int]
    dtype: torch.dtype = torch.float32
    completing: str | None = None
    moments: torch.dtype = torch.float32
    offsets: Sequence[int] = (0,)
    """Elements by which the buffers are misaligned, in turn."""
    steps: Sequence[int] = (0,)
    """Steps that the tensors have taken, in turn."""
    groups: Sequence[dict[str, Any]] = ({},)
    """Options of the groups that tensors belong to, in turn; `lr_tensor` replaces `lr` in the kernel."""
    max_grad_norm: float = 0.0
    grad_scale: float | None = None
    found_inf: float | None = None
    seed: int = 0
    buffers: list[dict[str, Tensor]] = field(init=False)
    scalars: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        dtypes = {"param": self.dtype, "grad": self.dtype, **state_dtypes(self.dtype, self.moments)}
        if self.completing is not None:
            dtypes[self.completing] = torch.float32 if self.completing == "master" else torch.int16
        self.buffers = []
        for index, size in enumerate(self.sizes):
            buffers = {}
            for position, (name, dtype) in enumerate(dtypes.items()):
                memory = torch.randn(
                    size + 2 * GUARD + self.offsets[(index + position) % len(self.offsets)],
                    generator=generator,
                )
                if name == "exp_avg_sq":
                    memory.square_()
                buffers[name] = (memory * (100.0 if dtype == torch.int16 else 0.1)).to(dtype)
            buffers["step"] = torch.tensor(float(self.steps[index % len(self.steps)]))
            self.buffers.append(buffers)
        self.scalars = {
            name: torch.tensor(value)
            for name in ("grad_scale", "found_inf")
            if (value := getattr(self, name)) is not None
        }

    def inside(self, index: int, name: str) -> Tensor:
        """Returns a buffer without its guards."""
        memory = self.buffers[index][name]
        end = memory.numel() - GUARD
        return memory[end - self.sizes[index] : end]

    def rows(self, chunk: int) -> ctypes.Array[Row]:
        """Returns the table, as `prepare_launch` makes it."""
        rows = (Row * len(self.sizes))()
        chunks = 0
        names = {"m": "exp_avg", "v": "exp_avg_diff", "n": "exp_avg_sq"}
        for index, (row, size) in enumerate(zip(rows, self.sizes, strict=True)):
            aligned = True
            for name in ("param", "grad", "m", "v", "n", "g_prev", "master"):
                buffer = self.completing if name == "master" else names.get(name, name)
                if buffer is None:
                    continue
                inside = self.inside(index, buffer)
                item = inside.element_size()
                # Not its own data_ptr(), which is 0 for a tensor without elements.
                address = self.buffers[index][buffer].data_ptr() + inside.storage_offset() * item
                setattr(row, name, address)
                aligned &= address % (4 * item) == 0
            row.step = self.buffers[index]["step"].data_ptr()
            row.numel, row.first_chunk = size, chunks
            row.group, row.aligned = self.group_of(index), aligned
            chunks += -(-size // chunk)
        return rows

    def group_of(self, index: int) -> int:
        """Returns the group of a tensor: consecutive tensors share one, as in an optimizer."""
        return index * len(self.groups) // len(self.sizes)

    def options(self, group: int) -> dict[str, Any]:
        """Returns the options of a group, with defaults."""
        return {**GROUP_OPTIONS, **self.groups[group]}

    def launch(self, chunk: int, norm: Tensor | None = None) -> Launch:
        """Returns the arguments of one step; `norm` clips it."""
        rows = self.rows(chunk)
        groups = (GroupRow * len(self.groups))()
        for number, row in enumerate(groups):
            options = self.options(number)
            row.lr, row.eps, row.weight_decay = options["lr"], options["eps"], options["weight_decay"]
            row.beta1, row.beta2, row.beta3 = options["betas"]
            row.log_beta1, row.log_beta2, row.log_beta3 = (
                math.log(beta) if beta else -math.inf for beta in options["betas"]
            )
            row.no_prox, row.maximize = options.get("no_prox", False), options.get("maximize", False)
            if "lr_tensor" in options:
                rate = self.scalars.setdefault(f"lr_{number}", torch.tensor(options["lr_tensor"]))
                row.lr_tensor = rate.data_ptr()
        launch = Launch(
            tensors=rows,
            tensor_count=len(rows),
            chunk_count=sum(-(-size // chunk) for size in self.sizes),
            groups=groups,
            group_count=len(groups),
            storage=STORAGES[self.dtype],
            master=MASTERS[self.completing],
            bfloat16_moments=self.moments == torch.bfloat16,
            max_grad_norm=self.max_grad_norm,
        )
        for name, scalar in self.scalars.items():
            if name in ("grad_scale", "found_inf"):
                setattr(launch, name, scalar.data_ptr())
        if norm is not None:
            launch.grad_norm = norm.data_ptr()
        return launch


class HostCuda:
    """The library of the kernels, on a device of `multiprocessors`."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("store_rows", "cuda_update", "cuda_norm"):
            getattr(self._library, name).restype = c_char_p
        for name in ("workspace_bytes", "chunk_elements"):
            getattr(self._library, name).restype = c_int64
        self._library.stillhouse_adan_variant.restype = c_bool
        sizes = (c_int64 * 3)()
        self._library.structure_bytes(sizes)
        assert list(sizes) == [ctypes.sizeof(kind) for kind in (Row, GroupRow, Launch)]
        self.set_device()

    @property
    def chunk(self) -> int:
        """Elements of a chunk of the chosen variant."""
        return int(self._library.chunk_elements())

    def choose(self, variant: int) -> None:
        """Chooses a variant of the fp32 kernel."""
        assert self._library.stillhouse_adan_variant(c_int32(variant))

    def set_device(self, multiprocessors: int = 2, order: str = "forward", seed: int = 0) -> None:
        """Sets the size of the device, and in which order its blocks and threads run."""
        self._library.set_device(
            c_int32(multiprocessors), c_int32(ORDERS.index(order)), ctypes.c_uint32(seed)
        )
        self.workspace = torch.zeros(int(self._library.workspace_bytes()), dtype=torch.uint8)

    def stored(self, rows: ctypes.Array[Row]) -> Tensor:
        """Returns the table in device memory."""
        table = torch.zeros(ctypes.sizeof(rows), dtype=torch.uint8)
        self._check(self._library.store_rows(rows, c_int64(len(rows)), c_void_p(table.data_ptr())))
        assert bytes(table.tolist()) == bytes(rows)
        return table

    def norm(self, problem: Problem, *, table: bool = True) -> Tensor:
        """Returns the norm of the stored gradients."""
        launch = problem.launch(NORM_CHUNK)
        norm = torch.full((), -1.0)
        on_device = self.stored(problem.rows(NORM_CHUNK)) if table else None
        error = self._library.cuda_norm(
            ctypes.byref(launch),
            c_void_p(on_device.data_ptr() if on_device is not None else None),
            c_void_p(norm.data_ptr()),
            c_void_p(self.workspace.data_ptr()),
        )
        self._check(error)
        return norm

    def step(self, problem: Problem, norm: Tensor | None = None, *, table: bool = True) -> None:
        """Takes one step by the CUDA kernel."""
        launch = problem.launch(self.chunk, norm)
        on_device = self.stored(problem.rows(self.chunk)) if table else None
        error = self._library.cuda_update(
            ctypes.byref(launch),
            c_void_p(on_device.data_ptr() if on_device is not None else None),
            c_void_p(self.workspace.data_ptr()),
        )
        self._check(error)

    def step_on_cpu(self, problem: Problem, norm: Tensor | None = None) -> None:
        """Takes one step by the scalar CPU kernel."""
        self._library.cpu_update(ctypes.byref(problem.launch(self.chunk, norm)))

    def _check(self, error: bytes | None) -> None:
        assert error is None, error.decode()
        counters = self.workspace[:64]
        assert not counters.any(), "a launch left a counter that is not zero"


def compiled(folder: Path) -> HostCuda:
    """Compiles the kernels for the CPU into `folder`.

    Raises:
        BuildError: there is no C++ compiler.
    """
    library = folder / "adan_on_host.so"
    command = [
        *shlex.split(build.compiler()),
        *("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
        *("-ffp-contract=off", "-fno-strict-aliasing"),
        *(f"-I{FOLDER}", f"-I{build.SOURCES}", str(FOLDER / "adan_on_host.cpp"), "-o", str(library)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return HostCuda(library)
