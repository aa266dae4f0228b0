"""Peak memory of one run, in a process that may have trained others before."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass
from pathlib import Path

import torch

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
        self._begin()

    def peak(self) -> Peak:
        """The peak since the window began."""
        if self._device.type == "cuda":
            return Peak(torch.cuda.max_memory_allocated(self._device) / MIB)
        return Peak(_resident_peak_kib() / 1024.0)

    def restart(self) -> Peak:
        """End the window, and begin another with what is still in use.

        Returns:
            The peak of the one that ended.
        """
        ended = self.peak()
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


def _resident_peak_kib() -> float:
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return float(line.split()[1])
    except OSError:
        pass
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
