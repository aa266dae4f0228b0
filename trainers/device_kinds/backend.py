"""Operations that training needs of a device through torch: the CPU's, which the other kinds override."""

import contextlib
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.profiler import ProfilerActivity

from trainers.device_kinds import has_fast_bf16
from trainers.device_kinds.counters import Device
from trainers.errors import BadSpecError

_CLEAR_PEAK = "5"

Result = TypeVar("Result")


class PassRecorder(Protocol):
    """Records the device's work, so that it can be replayed without the host's part."""

    def rehearse(self, work: Callable[[], Result]) -> Result:
        """Runs the work once before it is recorded, so that one-time initialisation is not recorded."""

    def record(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Records work without running it; returns its result and a function that replays it.

        A replay reads and writes the same memory, with the host's numbers as they were when recording; the
        device's generator draws again. Recordings share their private memory: a result is valid until
        another one is replayed.
        """


class Backend:
    counts_kernels = False

    def available(self) -> bool:
        return True

    def device(self, hardware: str) -> torch.device:
        """Returns the device of this worker; raises BadSpecError, which names `hardware`, if it sees none."""
        return torch.device("cpu")

    def name(self, device: torch.device) -> str | None:
        """None where there is no driver."""
        return None

    def memory_bytes(self, device: torch.device) -> int | None:
        """None where the device has the host's memory."""
        return None

    def facts(self, device: torch.device) -> dict[str, object]:
        return {}

    def counters(self, device: torch.device) -> Device:
        """Counters of energy, power, clocks and memory; the null form where there are none."""
        return Device()

    def has_instructions(self, precision: str, device: torch.device) -> bool:
        if precision == "bf16":
            return has_fast_bf16() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())

    def why_not(self, precision: str, device: torch.device) -> str | None:
        """Why the device cannot train in a precision other than fp32, and what to do; None if it can."""
        return None if precision == "bf16" else "it needs a GPU; use precision fp32 or bf16"

    def synchronize(self, device: torch.device) -> None: ...

    def begin_run(self) -> None:
        """Sets torch's process-wide options."""

    def attend_without_dropout(self, device: torch.device) -> None:
        """Selects the kernel of packed attention in half precision, for a run without attention dropout."""

    def free_cache(self) -> None:
        """Frees torch's cached memory."""

    def restart_peak(self, device: torch.device) -> None:
        """Starts a window of `peak_mib` at the memory in use now."""
        # Not permitted in some sandboxes; the peak is then that of the process' life.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK, encoding="ascii")

    def peak_mib(self, device: torch.device) -> float:
        """Most memory in use since `restart_peak`; on the CPU, resident memory of the process."""
        return _resident_peak_kib() / 1024.0

    def random_state(self, device: torch.device) -> torch.Tensor | None:
        """State of the device's own generator; None where it has none."""
        return None

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None: ...

    def keep_random_state(self, device: torch.device) -> AbstractContextManager[None]:
        """Restores all generators on leaving the block."""
        return torch.random.fork_rng([])

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Copies a host tensor to the device without blocking the host."""
        return tensor

    def host_memory(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Host memory for a copy of a device tensor, uninitialised."""
        return torch.empty(shape, dtype=dtype)

    def moment(self, device: torch.device) -> Any:
        """Marks the end of the work queued so far; for `seconds` and `wait`."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Time between two moments; waits for the later one."""
        return float(end - begin)

    def wait(self, moment: Any) -> None: ...

    def recorder(self, device: torch.device) -> PassRecorder:
        """Raises `BadSpecError` where nothing can be recorded."""
        raise BadSpecError(f"model.cuda_graphs needs a GPU, not {device.type}; set model.cuda_graphs: false")

    def pinning(self, device: torch.device) -> AbstractContextManager[object] | None:
        """Context for pinning memory that the device copies from; None where nothing is copied."""
        return None

    def profiler_activities(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU]


def _resident_peak_kib() -> float:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1])
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024.0 if sys.platform == "darwin" else float(peak)  # macOS counts bytes.
