"""The number format of forward and backward. Parameters and optimizer state stay fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from trainers.config import Precision
from trainers.errors import BadSpecError

_AUTOCAST = {Precision.bf16: torch.bfloat16}


class Autocast:
    """Makes the context of each forward pass.

    Raises:
        BadSpecError: the device cannot compute in the precision.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self._dtype = _AUTOCAST.get(precision)
        self._device = device.type
        if precision is not Precision.fp32 and self._dtype is None:
            raise BadSpecError(f"precision {precision.value} cannot be trained here; change precision")

    def context(self) -> AbstractContextManager[None]:
        """A fresh context: fp32 leaves everything as it is."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._device, dtype=self._dtype)
