import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import attention
from torch.profiler import ProfilerActivity

from trainers.device_kinds.backend import Backend, PassRecorder, Result
from trainers.device_kinds.counters import MIB, Device, nvml_device
from trainers.errors import BadSpecError

_AMPERE = (8, 0)
_HOPPER = 9  # Major compute capability that FlashAttention 3 is written for; torch refuses it on any other
_FLASH_3 = "flash_attn_interface"  # Module that the package flash-attn-3 installs


class CudaGraphs(PassRecorder):
    """CUDA graphs of one process, on one stream and with one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def rehearse(self, work: Callable[[], Result]) -> Result:
        """Runs on the stream of recordings, where libraries allocate their workspaces."""
        outside = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            result = work()
        outside.wait_stream(self._stream)
        return result

    def record(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # Other threads pin memory meanwhile, which may not happen in a recording thread.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = work()
        return result, graph.replay


class CudaBackend(Backend):
    counts_kernels = True
    _records = False

    def available(self) -> bool:
        return torch.cuda.is_available()

    def device(self, hardware: str) -> torch.device:
        if not self.available():
            raise BadSpecError(f"hardware {hardware} is a GPU, but this worker sees none; change hardware")
        return torch.device("cuda", torch.cuda.current_device())

    def name(self, device: torch.device) -> str | None:
        return str(torch.cuda.get_device_properties(device).name)

    def memory_bytes(self, device: torch.device) -> int | None:
        return int(torch.cuda.get_device_properties(device).total_memory)

    def facts(self, device: torch.device) -> dict[str, object]:
        return {"gpu": self.name(device), "cuda": torch.version.cuda}

    def counters(self, device: torch.device) -> Device:
        properties = torch.cuda.get_device_properties(device)
        # Not all of torch's versions that this runs on tell the place.
        place = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
        bus_id = None if -1 in place else "{:08x}:{:02x}:{:02x}.0".format(*place)
        return nvml_device(index=device.index, uuid=str(getattr(properties, "uuid", "")), bus_id=bus_id)

    def has_instructions(self, precision: str, device: torch.device) -> bool:
        return precision == "fp16" or torch.cuda.get_device_capability(device) >= _AMPERE

    def why_not(self, precision: str, device: torch.device) -> str | None:
        if self.has_instructions(precision, device):
            return None
        return f"{self.name(device)} is older than Ampere and has no {precision}; use precision fp32 or fp16"

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def begin_run(self) -> None:
        """Disables cuDNN's attention, which plans for each batch width: seconds in every process."""
        self._records = False
        torch.backends.cuda.enable_cudnn_sdp(False)
        attention.restore_flash_attention_impl(_raise_warn=False)

    def attend_without_dropout(self, device: torch.device) -> None:
        """Activates FlashAttention 3 where available, for the whole process until the next run."""
        hopper = torch.cuda.get_device_capability(device)[0] == _HOPPER
        if hopper and importlib.util.find_spec(_FLASH_3) is not None:
            attention.activate_flash_attention_impl("FA3")

    def free_cache(self) -> None:
        if self.available():
            torch.cuda.empty_cache()

    def restart_peak(self, device: torch.device) -> None:
        torch.cuda.reset_peak_memory_stats(device)

    def peak_mib(self, device: torch.device) -> float:
        """Of a run that records passes, of reserved memory: their pool counts as free, but is not."""
        peak = torch.cuda.max_memory_reserved if self._records else torch.cuda.max_memory_allocated
        return peak(device) / MIB

    def random_state(self, device: torch.device) -> torch.Tensor | None:
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, device)

    def keep_random_state(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.random.fork_rng([device])

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        with torch.cuda.device(device):
            return tensor.pin_memory().to(device, non_blocking=True)

    def host_memory(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def moment(self, device: torch.device) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def wait(self, moment: Any) -> None:
        moment.synchronize()

    def recorder(self, device: torch.device) -> PassRecorder:
        self._records = True
        return CudaGraphs(device)

    def pinning(self, device: torch.device) -> AbstractContextManager[object] | None:
        # A thread's current device is the first one until it says otherwise.
        return torch.cuda.device(device)

    def profiler_activities(self) -> list[ProfilerActivity]:
        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]
