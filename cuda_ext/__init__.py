"""Stillhouse's own kernels, fused, on CPU and CUDA: the Adan step and an encoder's elementwise work.

    from cuda_ext import Adan
    optimizer = Adan(model.parameters(), lr=1e-4, weight_decay=0.01, max_grad_norm=1.0)
    optimizer.implementation  # what really runs here: 'multi_fused'

Reading order: `csrc/adan_update.h` is the update of one element; `adan.py` the optimizer;
`fused.py` and `unfused.py` its four implementations; `reference.py` the oracle they are judged
by. `csrc/adan_cpu.cpp` and `csrc/adan_cuda_kernel.cuh` walk all tensors in one go. `encoder.py` has the
encoder's operators, `csrc/encoder_rows.cpp` and `encoder_triton.py` their kernels.

Names are imported when they are first used: `import cuda_ext` alone loads neither torch nor kernels.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cuda_ext.adan import Adan
    from cuda_ext.capabilities import IMPLEMENTATIONS, Availability, availability
    from cuda_ext.errors import (
        AdanError,
        BuildError,
        ConfigurationError,
        HyperParameterError,
        LayoutError,
        SparseGradientError,
        StateDictError,
        TensorMismatchError,
    )
    from cuda_ext.native import counters
    from cuda_ext.parity import ParityRecord, measure_parity

__all__ = [
    "IMPLEMENTATIONS",
    "Adan",
    "AdanError",
    "Availability",
    "BuildError",
    "ConfigurationError",
    "HyperParameterError",
    "LayoutError",
    "ParityRecord",
    "SparseGradientError",
    "StateDictError",
    "TensorMismatchError",
    "availability",
    "counters",
    "measure_parity",
]

_HOME = {
    "Adan": "adan",
    "IMPLEMENTATIONS": "capabilities",
    "Availability": "capabilities",
    "availability": "capabilities",
    "ParityRecord": "parity",
    "measure_parity": "parity",
    "counters": "native",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'cuda_ext' has no attribute {name!r}")
    return getattr(import_module(f"cuda_ext.{_HOME.get(name, 'errors')}"), name)
