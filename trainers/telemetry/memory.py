"""Peak memory of one run, in a process that may have trained others before."""

import gc
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import nn

from trainers.device_kinds import kind_of
from trainers.process import trim_memory

MIB = 1024.0 * 1024.0


class PeakMemory:
    """Peak since this was made or restarted, in MiB: resident on CPU, allocated on the device on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend = device, kind_of(device).backend
        self._before_mib = 0.0
        self._backend.restart_peak(device)

    def peak(self) -> float:
        return max(self._before_mib, self._counted_mib())

    def within(self) -> Callable[[], float]:
        """Begins a window inside of this one; returns a function that reads its peak, in MiB."""
        self._before_mib = self.peak()
        self._backend.restart_peak(self._device)
        return self._counted_mib

    def _counted_mib(self) -> float:
        return self._backend.peak_mib(self._device)

    def restart(self) -> float:
        ended = self.peak()
        self._before_mib = 0.0
        gc.collect()
        trim_memory()
        self._backend.restart_peak(self._device)
        return ended


def weight_mib(model: nn.Module) -> float:
    """Returns the memory of a model's weights: parameters and floating-point buffers, by their storages.

    What several share counts once. Index buffers, such as BERT's position ids, are not weights; integers that
    are, such as packed bits, are named by their module in `weights_in`.
    """
    packed: Iterator[torch.Tensor] = (
        tensor
        for module in model.modules()
        for name in getattr(module, "weights_in", ())
        if (tensor := getattr(module, name)) is not None
    )
    floating = (tensor for tensor in chain(model.parameters(), model.buffers()) if tensor.is_floating_point())
    held = {
        storage.data_ptr(): storage.nbytes()
        for tensor in chain(floating, packed)
        if (storage := tensor.untyped_storage()).nbytes()
    }
    return sum(held.values()) / MIB
