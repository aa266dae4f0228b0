"""Kinds of devices that runs are placed on. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainers.device_kinds.cpu import CPU
from trainers.device_kinds.cuda import CUDA
from trainers.device_kinds.kind import DeviceKind
from trainers.device_kinds.tpu import TPU
from trainers.registry import by_name

if TYPE_CHECKING:
    import torch

DEVICE_KINDS: dict[str, DeviceKind] = by_name(CPU, CUDA, TPU)
"""All values of `device` in the hardware catalogue."""


def kind_of(device: torch.device) -> DeviceKind:
    """The kind of a torch device: the first one of its type."""
    return next(kind for kind in DEVICE_KINDS.values() if kind.torch_type == device.type)


def trained_on() -> list[DeviceKind]:
    """Returns the kinds that torch knows in this installation."""
    return [kind for kind in DEVICE_KINDS.values() if kind.installed]


def free_caches() -> None:
    for kind in trained_on():
        kind.backend.free_cache()


__all__ = ["CPU", "CUDA", "DEVICE_KINDS", "TPU", "DeviceKind", "free_caches", "kind_of", "trained_on"]
