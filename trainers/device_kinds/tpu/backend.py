"""Operations on a TPU through torch-tpu, as version 0.2.0 offers them under `torch.tpu`."""

from contextlib import AbstractContextManager
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from trainers.device_kinds.backend import Backend
from trainers.errors import BadSpecError

PACKAGE = "torch_tpu"


class TpuBackend(Backend):
    """TPUs have no counters of energy or peak memory; `peak_mib` is that of the host's process."""

    @property
    def _tpu(self) -> Any:
        return torch.tpu  # type: ignore[attr-defined]

    def available(self) -> bool:
        return find_spec(PACKAGE) is not None and bool(self._tpu.is_available())

    def device(self, hardware: str) -> torch.device:
        if find_spec(PACKAGE) is None:
            raise BadSpecError(
                f"hardware {hardware} is a TPU, which needs {PACKAGE}, but this worker's environment lacks "
                "it; install stillhouse[tpu] on the nodes"
            )
        if not self.available():
            raise BadSpecError(f"hardware {hardware} is a TPU, but this worker sees none; change hardware")
        return torch.device("tpu", self._tpu.current_device())

    def name(self, device: torch.device) -> str | None:
        return str(self._tpu.get_device_name(device))

    def memory_bytes(self, device: torch.device) -> int | None:
        return int(self._tpu.get_device_properties(device).total_memory)

    def facts(self, device: torch.device) -> dict[str, object]:
        return {"tpu": self.name(device), "torch_tpu": version(PACKAGE), "libtpu": version("libtpu")}

    def has_instructions(self, precision: str, device: torch.device) -> bool:
        return precision == "bf16"

    def why_not(self, precision: str, device: torch.device) -> str | None:
        if self.has_instructions(precision, device):
            return None
        return "a TPU multiplies in bf16 and fp32; use one of them"

    def synchronize(self, device: torch.device) -> None:
        self._tpu.synchronize()

    def random_state(self, device: torch.device) -> torch.Tensor | None:
        state: torch.Tensor = self._tpu.get_rng_state(device)
        return state

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        self._tpu.set_rng_state(state, device)

    def keep_random_state(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.random.fork_rng([device], device_type="tpu")

    def send(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    def moment(self, device: torch.device) -> Any:
        event = self._tpu.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
