"""What training asks of an NVIDIA GPU through torch."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch.profiler import ProfilerActivity

from trainers.device_kinds.backend import Backend
from trainers.errors import BadSpecError
from trainers.telemetry.devices import MIB, Device, nvml_device

_AMPERE = (8, 0)


class CudaBackend(Backend):
    """Operations on GPUs, which compute behind the host."""

    def available(self) -> bool:
        """See `Backend.available`."""
        return torch.cuda.is_available()

    def device(self, hardware: str) -> torch.device:
        """See `Backend.device`: the one that Ray, or the environment, chose for this process."""
        if not self.available():
            raise BadSpecError(f"hardware {hardware} is a GPU, but this worker sees none; change hardware")
        return torch.device("cuda", torch.cuda.current_device())

    def name(self, device: torch.device) -> str | None:
        """See `Backend.name`."""
        return str(torch.cuda.get_device_properties(device).name)

    def memory_bytes(self, device: torch.device) -> int | None:
        """See `Backend.memory_bytes`."""
        return int(torch.cuda.get_device_properties(device).total_memory)

    def facts(self, device: torch.device) -> dict[str, object]:
        """See `Backend.facts`."""
        return {"gpu": self.name(device), "cuda": torch.version.cuda}

    def counters(self, device: torch.device) -> Device:
        """See `Backend.counters`: NVML's."""
        found = torch.cuda.get_device_properties(device)
        # Not all of torch's versions that this runs on tell the place.
        place = [getattr(found, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
        bus_id = None if -1 in place else "{:08x}:{:02x}:{:02x}.0".format(*place)
        return nvml_device(index=device.index, uuid=str(getattr(found, "uuid", "")), bus_id=bus_id)

    def has_instructions(self, precision: str, device: torch.device) -> bool:
        """See `Backend.has_instructions`."""
        return precision == "fp16" or torch.cuda.get_device_capability(device) >= _AMPERE

    def why_not(self, precision: str, device: torch.device) -> str | None:
        """See `Backend.why_not`."""
        if self.has_instructions(precision, device):
            return None
        return f"{self.name(device)} is older than Ampere and has no {precision}; use precision fp32 or fp16"

    def synchronize(self, device: torch.device) -> None:
        """See `Backend.synchronize`."""
        torch.cuda.synchronize(device)

    def free_cache(self) -> None:
        """See `Backend.free_cache`."""
        if self.available():
            torch.cuda.empty_cache()

    def restart_peak(self, device: torch.device) -> None:
        """See `Backend.restart_peak`."""
        torch.cuda.reset_peak_memory_stats(device)

    def peak_mib(self, device: torch.device) -> float:
        """See `Backend.peak_mib`: allocated device memory."""
        return torch.cuda.max_memory_allocated(device) / MIB

    def random_state(self, device: torch.device) -> torch.Tensor | None:
        """See `Backend.random_state`."""
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """See `Backend.set_random_state`."""
        torch.cuda.set_rng_state(state, device)

    def keep_random_state(self, device: torch.device) -> AbstractContextManager[None]:
        """See `Backend.keep_random_state`."""
        return torch.random.fork_rng([device])

    def pinning(self, device: torch.device) -> AbstractContextManager[object] | None:
        """See `Backend.pinning`."""
        # A thread's current device is the first one until it says otherwise.
        return torch.cuda.device(device)

    def profiler_activities(self) -> list[ProfilerActivity]:
        """See `Backend.profiler_activities`."""
        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]
