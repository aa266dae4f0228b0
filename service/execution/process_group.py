"""Ray Train's process group, opened over the interface that leads to the head. Imports Ray and torch."""

from __future__ import annotations

from typing import Any

from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

from service.execution.network import choose_interface


class ProcessGroup(TorchConfig):  # type: ignore[misc, unused-ignore]
    """A process group of torch whose workers choose their interface first."""

    @property
    def backend_cls(self) -> Any:
        """What opens it."""
        return _Backend


class _Backend(_TorchBackend):  # type: ignore[misc, unused-ignore]
    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        worker_group.execute(choose_interface)
        super().on_start(worker_group, backend_config)
