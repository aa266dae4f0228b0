"""The device that a worker computes on, as its own counters show it. Imports no torch.

`NvmlDevice`, the null form `Device` and the tests' replayed traces pass one conformance suite.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 1024.0 * 1024.0

_THROTTLING = {
    "nvmlClocksThrottleReasonSwPowerCap": "power_cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware_slowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "software_thermal",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "hardware_thermal",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power_brake",
}
"""NVML's reasons for lower clocks that tell of a limit; idling and set clocks do not."""


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """Readings of a device at one moment; None where it has none."""

    at_s: float  # `time.perf_counter()`
    power_w: float | None = None  # Draw of the whole board
    gpu_utilisation_pct: float | None = None  # Share of NVML's last interval in which a kernel ran
    memory_utilisation_pct: float | None = None  # Share of it in which device memory was read or written
    memory_used_mib: float | None = None  # Allocated by all processes
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttled: tuple[str, ...] = ()  # Reasons why the clocks are lowered


SAMPLED = (
    "power_w", "gpu_utilisation_pct", "memory_utilisation_pct", "memory_used_mib", "sm_clock_mhz",
    "memory_clock_mhz", "temperature_c",
)  # fmt: skip
"""The numbers of a `DeviceSample`."""


class Device:
    """A device without counters."""

    identity = ""  # The same for all workers that use the same device; empty for none
    exclusive = True  # The energy counter counts this device alone, not a GPU that MIG divides

    def energy_j(self) -> float | None:
        """Returns a counter of joules that only grows; None where there is none."""
        return None

    def power_limit_w(self) -> float | None:
        """Returns the most that the whole board may draw, in watts; None where it has no such limit."""
        return None

    def on_node(self) -> int | None:
        """Returns how many boards like it the node has; None = not known."""
        return None

    def sample(self) -> DeviceSample | None:
        return None

    def facts(self) -> dict[str, object]:
        """For the record: name, driver, what can be read, who else computes here."""
        return {}


class NvmlDevice(Device):
    """A GPU, or one MIG instance of it, through the initialised module `pynvml`.

    What the driver does not support is found out once and not read again. A MIG instance has
    memory of its own; power, clocks, temperature and energy are those of the whole GPU.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._mig = bool(self._try(lambda: nvml.nvmlDeviceIsMigDeviceHandle(handle)))
        self._board = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if self._mig else handle
        self.exclusive = not self._mig
        # Not the instance's own: the counters are the board's.
        self.identity = str(nvml.nvmlDeviceGetUUID(self._board))
        self._has_energy = self._milli("nvmlDeviceGetTotalEnergyConsumption") is not None
        self._readers: dict[str, Callable[[], float]] = {
            name: read for name, read in self._reads().items() if self._try(read) is not None
        }
        self._reason_bits = {
            getattr(nvml, constant): word
            for constant, word in _THROTTLING.items()
            if hasattr(nvml, constant) and self._try(self._reasons) is not None
        }

    def energy_j(self) -> float | None:
        return self._milli("nvmlDeviceGetTotalEnergyConsumption") if self._has_energy else None

    def power_limit_w(self) -> float | None:
        return self._milli("nvmlDeviceGetEnforcedPowerLimit")

    def on_node(self) -> int | None:
        count: int | None = None if self._mig else self._try(self._nvml.nvmlDeviceGetCount)
        return count

    def sample(self) -> DeviceSample | None:
        values = {name: self._try(read) for name, read in self._readers.items()}
        throttled: tuple[str, ...] = ()
        if self._reason_bits:
            bits = self._try(self._reasons) or 0
            throttled = tuple(word for bit, word in self._reason_bits.items() if bits & bit)
        return DeviceSample(time.perf_counter(), **values, throttled=throttled)

    def facts(self) -> dict[str, object]:
        nvml = self._nvml
        others = self._try(
            lambda: [
                process.pid
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
                if process.pid != os.getpid()
            ]
        )
        return {
            "gpu_uuid": str(nvml.nvmlDeviceGetUUID(self._handle)),
            "gpu_driver": self._try(nvml.nvmlSystemGetDriverVersion),
            "gpu_power_limit_w": self.power_limit_w(),
            "gpu_mig": self._mig,
            "gpu_counters": ["energy_j"] * self._has_energy + sorted(self._readers),
            # None: not permitted to look. What they use is in the counters too. In a container with
            # process numbers of its own this worker may count as another.
            "gpu_other_processes": None if others is None else len(others),
            "gpu_other_pids": others,
        }

    def _milli(self, function: str) -> float | None:
        thousandths = self._try(lambda: getattr(self._nvml, function)(self._board))
        return None if thousandths is None else thousandths / 1000.0

    def _reads(self) -> dict[str, Callable[[], float]]:
        nvml, board, handle = self._nvml, self._board, self._handle
        reads: dict[str, Callable[[], float]] = {
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(board) / 1000.0,
            "memory_used_mib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / MIB,
            "sm_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(board, nvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": lambda: float(nvml.nvmlDeviceGetClockInfo(board, nvml.NVML_CLOCK_MEM)),
            "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(board, nvml.NVML_TEMPERATURE_GPU)),
        }
        if not self._mig:  # the board's would count the other instances too
            reads["gpu_utilisation_pct"] = lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            reads["memory_utilisation_pct"] = lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).memory)
        return reads

    def _reasons(self) -> int:
        return int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._board))

    def _try(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except self._nvml.NVMLError:
            return None


def other_device(reported: str, expected: Sequence[str]) -> bool:
    """Whether a driver's name, to which MIG adds, is none of the expected ones; without any, it never is."""
    name = reported.removeprefix("NVIDIA ").removeprefix("Tesla ")
    return bool(expected) and not any(name == known or name.startswith(f"{known} ") for known in expected)


def nvml_device(*, index: int, uuid: str, bus_id: str | None) -> Device:
    """Returns the GPU that CUDA calls `index` in this process; the null form where NVML is unavailable.

    CUDA's and NVML's numbers differ: `CUDA_VISIBLE_DEVICES` chooses and reorders. So the device
    is found by its identity: the MIG instance that the variable names, the UUID (without prefix), the bus id.
    """
    try:
        import pynvml
    except ImportError:
        return Device()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Device()
    visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    named = visible[index] if index < len(visible) else ""
    candidates = [named] if named.startswith("MIG-") else []
    candidates += [f"MIG-{uuid}", f"GPU-{uuid}"]
    for candidate in candidates:
        with contextlib.suppress(pynvml.NVMLError):
            return NvmlDevice(pynvml, pynvml.nvmlDeviceGetHandleByUUID(candidate))
    if bus_id is not None:
        with contextlib.suppress(pynvml.NVMLError):
            return NvmlDevice(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(bus_id))
    return Device()
