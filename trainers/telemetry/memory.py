"""Peak memory of one run, in a process that may have trained others before."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from trainers.process import trim_memory
from trainers.reporting import Provenance

MIB = 1024.0 * 1024.0
_CLEAR_PEAK = "5"


@dataclass(frozen=True, slots=True)
class Peak:
    """Most memory that a window held.

    Attributes:
        mib: in MiB; resident memory of the process on CPU, allocated device memory on CUDA.
        provenance: always a counter.
    """

    mib: float
    provenance: Provenance = Provenance.counter


class PeakMemory:
    """The peak of a window that begins when this is made, or restarted."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before_mib = 0.0
        self._begin()

    def peak(self) -> Peak:
        """The peak since the window began."""
        return Peak(max(self._before_mib, self._counted_mib()))

    def within(self) -> Callable[[], float]:
        """Begin a window inside of this one; returns what gives its peak, in MiB."""
        self._before_mib = self.peak().mib
        self._begin()
        return self._counted_mib

    def _counted_mib(self) -> float:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) / MIB
        return _resident_peak_kib() / 1024.0

    def restart(self) -> Peak:
        """End the window, and begin another with what is still in use.

        Returns:
            The peak of the one that ended.
        """
        ended = self.peak()
        self._before_mib = 0.0
        gc.collect()
        trim_memory()
        self._begin()
        return ended

    def _begin(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            # Not permitted in some sandboxes; the peak is then that of the process' life.
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK, encoding="ascii")


def weight_mib(model: nn.Module) -> float:
    """Memory that a model's weights hold, in MiB: parameters and floating-point buffers, by their storages.

    What several share counts once. Index buffers, such as BERT's position ids, are no weights.
    """
    held = {
        storage.data_ptr(): storage.nbytes()
        for tensor in chain(model.parameters(), model.buffers())
        if tensor.is_floating_point() and (storage := tensor.untyped_storage()).nbytes()
    }
    return sum(held.values()) / MIB


def _resident_peak_kib() -> float:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1])
    except OSError:
        pass
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
