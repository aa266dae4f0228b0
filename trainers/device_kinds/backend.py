"""What training asks of a device through torch; the CPU's answers, and the base of the other kinds'."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch.profiler import ProfilerActivity

from trainers.device_kinds.processor import has_bf16_units
from trainers.errors import BadSpecError
from trainers.telemetry.devices import Device

_CLEAR_PEAK = "5"


Result = TypeVar("Result")


class Recorder(Protocol):
    """Records what the device is given to do, and gives it the same again without the host's work."""

    def rehearse(self, work: Callable[[], Result]) -> Result:
        """Does what will be recorded, so that whatever happens only once has happened by then."""

    def record(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Records work without doing it.

        A replay reads and writes the same memory: numbers of the host are those of the recording. What is
        drawn by the device's generator is drawn again. Recordings share the memory that only they use:
        results are valid until another one is replayed.

        Returns:
            What it returned, and what replays it.
        """


class Backend:
    """Operations on devices of a kind. Here: the host computes, and nothing runs behind it.

    Attributes:
        counts_kernels: torch's profiler reads hardware counters of each kernel.
    """

    counts_kernels = False

    def available(self) -> bool:
        """Returns whether this process sees such a device."""
        return True

    def device(self, hardware: str) -> torch.device:
        """Returns the device of this worker.

        Args:
            hardware: name in the catalogue, for the error.

        Raises:
            BadSpecError: this worker sees none.
        """
        return torch.device("cpu")

    def name(self, device: torch.device) -> str | None:
        """Names that the driver gives the device; None where there is no driver."""
        return None

    def memory_bytes(self, device: torch.device) -> int | None:
        """Returns the memory of the device; None where it is the host's."""
        return None

    def facts(self, device: torch.device) -> dict[str, object]:
        """Returns what the record has of the device besides its CPU."""
        return {}

    def counters(self, device: torch.device) -> Device:
        """Counters of energy, power, clocks and memory; the null form where there are none."""
        return Device()

    def has_instructions(self, precision: str, device: torch.device) -> bool:
        """Returns whether the device has instructions for a half precision that are faster than fp32's."""
        if precision == "bf16":
            return has_bf16_units() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())

    def why_not(self, precision: str, device: torch.device) -> str | None:
        """Why the device does not train in a precision other than fp32, and what to do; None when it does."""
        return None if precision == "bf16" else "it needs a GPU; use precision fp32 or bf16"

    def synchronize(self, device: torch.device) -> None:
        """Waits until the device has done what it was given."""

    def begin_run(self) -> None:
        """Chooses among what torch leaves open, for the whole process."""

    def attend_without_dropout(self, device: torch.device) -> None:
        """Chooses the kernel of packed attention in half precision, for a run that drops none of it."""

    def free_cache(self) -> None:
        """Returns memory that torch caches."""

    def restart_peak(self, device: torch.device) -> None:
        """Begins a window of `peak_mib` with what is in use now."""
        # Not permitted in some sandboxes; the peak is then that of the process' life.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK, encoding="ascii")

    def peak_mib(self, device: torch.device) -> float:
        """Most memory in use since `restart_peak`, in MiB: resident memory of the process."""
        return _resident_peak_kib() / 1024.0

    def random_state(self, device: torch.device) -> torch.Tensor | None:
        """Returns the state of the device's own generator; None where it has none."""
        return None

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Restores what `random_state` returned."""

    def keep_random_state(self, device: torch.device) -> AbstractContextManager[None]:
        """Around what draws random numbers: generators are afterwards as they were."""
        return torch.random.fork_rng([])

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns a host tensor on the device; the host does not wait for the copy."""
        return tensor

    def host_memory(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Returns host memory for a copy of a tensor of the device; what it holds is undefined."""
        return torch.empty(shape, dtype=dtype)

    def moment(self, device: torch.device) -> Any:
        """Returns the moment at which the device has done what it was given so far, for `seconds`."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the time between two moments; waits for the later one."""
        return float(end - begin)

    def wait(self, moment: Any) -> None:
        """Waits until a moment that `moment` returned."""

    def recorder(self, device: torch.device) -> Recorder:
        """Returns what records this process' work on the device.

        Raises:
            BadSpecError: nothing can be recorded there.
        """
        raise BadSpecError(f"model.cuda_graphs needs a GPU, not {device.type}; set model.cuda_graphs: false")

    def pinning(self, device: torch.device) -> AbstractContextManager[object] | None:
        """Around pinning memory that the device copies from by itself; None where nothing is copied."""
        return None

    def profiler_activities(self) -> list[ProfilerActivity]:
        """Returns what `torch.profiler` records."""
        return [ProfilerActivity.CPU]


def _resident_peak_kib() -> float:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1])
    except OSError:
        pass
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
