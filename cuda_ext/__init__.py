"""Stillhouse's own kernels, fused, on CPU and CUDA: the Adan step and an encoder's elementwise work.

    from cuda_ext import Adan
    optimizer = Adan(model.parameters(), lr=1e-4, weight_decay=0.01, max_grad_norm=1.0)
    optimizer.implementation  # what really runs here: 'multi_fused'

Reading order: `csrc/adan_update.h` is the update of one element; `adan.py` the optimizer; `adan_steps.py` its
four implementations; `parity.py` the oracle they are judged by. `csrc/adan_cpu.cpp` and
`csrc/adan_cuda_kernel.cuh` walk all tensors in one go. `encoder.py` has the encoder's operators,
`csrc/encoder_rows.cpp` and `encoder_triton.py` their kernels.

Other names are imported when they are first used: `import cuda_ext` alone loads neither torch nor kernels.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cuda_ext.adan import Adan
    from cuda_ext.native import IMPLEMENTATIONS, Availability, availability, counters
    from cuda_ext.parity import ParityRecord, measure_parity

MASTERS: Mapping[str, tuple[str, ...]] = {"fp32": ("fp16", "bf16"), "split": ("bf16",)}
"""Kinds of fp32 masters, and the 16-bit parameter formats that each can complete."""

MOMENTS = ("fp32", "bf16")  # Formats of the moments m and v; n is always fp32

BYTES: Mapping[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2}  # Bytes of an element

MASTER_BYTES: Mapping[str, int] = {"fp32": 4, "split": 2}  # Bytes per parameter of each kind of masters

_HOMES = {
    "adan": ("Adan",),
    "native": ("IMPLEMENTATIONS", "Availability", "availability", "counters"),
    "parity": ("ParityRecord", "measure_parity"),
}


def __getattr__(name: str) -> object:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'cuda_ext' has no attribute {name!r}")
    return getattr(import_module(f"cuda_ext.{home}"), name)


class AdanError(Exception):
    """Base of everything that `cuda_ext` raises on purpose."""


class HyperParameterError(AdanError, ValueError):
    """A learning rate, beta, eps, weight decay or norm outside its range."""


class ConfigurationError(AdanError, ValueError):
    """Options that do not go together, or that this machine cannot serve."""


class TensorMismatchError(AdanError, TypeError):
    """A parameter or gradient of a dtype or device that the step cannot take."""


class LayoutError(AdanError, ValueError):
    """A parameter with gaps or overlaps in memory."""


class SparseGradientError(AdanError, TypeError):
    """A sparse gradient: Adan's g_prev, m, v and n are dense, a skipped row would silently keep old ones."""


class StateDictError(AdanError, ValueError):
    """A state dict that does not fit the parameters, or lacks part of Adan's state."""


class BuildError(AdanError, RuntimeError):
    """The compiler is missing or refused the sources; the message carries its last lines."""
