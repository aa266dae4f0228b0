"""A step's numbers on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainers.device_kinds import kind_of


class Transfer:
    """Begins to copy numbers and device scalars to the host without waiting."""

    def __init__(self, values: Sequence[float | torch.Tensor], device: torch.device) -> None:
        backend = kind_of(device).backend
        self._values, self._backend = values, backend
        there = torch.stack([value.double() for value in values if isinstance(value, torch.Tensor)])
        self._here = backend.host_memory(there.shape, there.dtype)
        self._here.copy_(there, non_blocking=True)
        self._arrival = backend.moment(device)

    def read(self) -> list[float]:
        """Returns the numbers in order; waits until those of the device have arrived."""
        self._backend.wait(self._arrival)
        found = iter(self._here.tolist())
        return [next(found) if isinstance(value, torch.Tensor) else value for value in self._values]
