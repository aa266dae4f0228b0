"""Stands in for the module `pynvml`, and answers each call as a trace has it for the moment."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TRACES = Path(__file__).parent / "traces"
NAMES = tuple(sorted(path.stem for path in TRACES.glob("nvml-*.json")))


class NvmlError(Exception):
    """The error that NVML would return."""


class ReplayedNvml:
    """One GPU, perhaps divided by MIG, whose answers are those of a trace.

    A trace is a JSON object: `format` (1), `made` (how it came to be), name, `uuid`, `bus_id`, `driver`, the
    UUID of a `mig` instance or null, `every_s`, and `answers` by function, in NVML's units. An answer is one
    value for good, or a list with one per moment; a string is the error that is raised in its place. Clocks
    are by kind, and a MIG instance's memory is apart from the board's.

    Args:
        name: of the trace.
    """

    NVMLError = NvmlError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwThermalSlowdown = 64

    def __init__(self, name: str) -> None:
        self.trace: dict[str, Any] = json.loads((TRACES / f"{name}.json").read_text(encoding="utf-8"))
        if self.trace["format"] != 1:
            raise ValueError(f"{name}: not a trace of format 1")
        self.answers: dict[str, Any] = self.trace["answers"]
        self.moment = 0
        self.every_s: float = self.trace["every_s"]
        self.moments = len(self.answers["nvmlDeviceGetPowerUsage"])

    def lose(self, function: str, begin: int, end: int | None = None) -> None:
        """Lets a function fail from a moment on, as on a GPU that fell off the bus, or until another."""
        end = self.moments if end is None else end
        self.answers[function][begin:end] = ["NVML_ERROR_GPU_IS_LOST"] * (end - begin)

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 8

    def nvmlSystemGetDriverVersion(self) -> str:
        return str(self.trace["driver"])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in (self.trace["uuid"], self.trace["mig"]):
            raise NvmlError("NVML_ERROR_NOT_FOUND")
        return uuid

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> str:
        if bus_id != self.trace["bus_id"]:
            raise NvmlError("NVML_ERROR_NOT_FOUND")
        return str(self.trace["uuid"])

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> bool:
        return handle == self.trace["mig"]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return str(self.trace["uuid"])

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        raise NvmlError("NVML_ERROR_NO_PERMISSION")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return int(self._of_board("nvmlDeviceGetTotalEnergyConsumption", handle))

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return int(self._of_board("nvmlDeviceGetPowerUsage", handle))

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return int(self._of_board("nvmlDeviceGetEnforcedPowerLimit", handle))

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return int(self._of_board("nvmlDeviceGetTemperature", handle))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return int(self._of_board("nvmlDeviceGetCurrentClocksThrottleReasons", handle))

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        self._refuse_instance(handle)
        return int(
            self._now(self.answers["nvmlDeviceGetClockInfo"]["SM" if kind == self.NVML_CLOCK_SM else "MEM"])
        )

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        gpu, memory = self._of_board("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=gpu, memory=memory)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        known = self.answers["nvmlDeviceGetMemoryInfo"]
        if isinstance(known, dict):
            known = known["instance" if self.nvmlDeviceIsMigDeviceHandle(handle) else "board"]
        return SimpleNamespace(used=self._now(known))

    def _of_board(self, function: str, handle: str) -> Any:
        self._refuse_instance(handle)
        return self._now(self.answers[function])

    def _refuse_instance(self, handle: str) -> None:
        """An instance of MIG has memory of its own and nothing else."""
        if self.nvmlDeviceIsMigDeviceHandle(handle):
            raise NvmlError("NVML_ERROR_NOT_SUPPORTED")

    def _now(self, known: Any) -> Any:
        answer = known[self.moment] if isinstance(known, list) else known
        if isinstance(answer, str):
            raise NvmlError(answer)
        return answer
