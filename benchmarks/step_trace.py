"""What a training step requires of a GPU, counted from a run with tensors that have shapes and no values.

Tensors on the device `meta`, or fake ones (`FakeTensorMode`), stand for the GPU's: every operator is seen
once, in order, and computes nothing. An operator counts as the kernels that it launches, mostly one; what
only makes a view or reserves memory counts as none.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KERNELS: Mapping[str, int] = {
    "bias_gelu_backward": 2,
    "dropout_add_norm_backward": 2,
    "embed_norm_backward": 8,
    "_flash_attention_backward": 3,
    "embedding_dense_backward": 2,  # up to 3,072 tokens; more are sorted, in about 15
}
"""Kernels of operators that launch more than one."""

_FREE = (
    "view", "aten.reshape", "aten.transpose.", "aten.permute.", "aten.expand.", "aten.slice.", "aten.select.",
    "aten.split", "aten.detach", "aten.alias", "aten.unsqueeze", "aten.squeeze", "empty", "aten.as_strided.",
    "aten.t.", "aten.unbind", "aten.chunk", "sym_", "prim.", "aten.lift_fresh", "aten.narrow.",
)  # fmt: skip
"""Parts of the names of operators that move no memory."""
_DRAWN_ON_HOST = "aten.randint."
"""Seeds come from the host's generator, also where all tensors are fake."""
_HALVES = (torch.float16, torch.bfloat16)
_PLACEHOLDERS: Mapping[torch.dtype, object] = {torch.bool: True, torch.int64: 1, torch.int32: 1}


class StepTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts launches, bytes, host reads and widened activations while it is active.

    Attributes:
        launches: By operator.
        bytes: Of the tensors that operators read and write.
        host_reads: Operators whose result the host waits for, by name; each read brings 1 or True.
        widened: Elements of tensors copied from 16 bits to fp32, one entry per copy.
        peak_bytes: Most memory alive at once, of what was made meanwhile.
    """

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.launches: Counter[str] = Counter()
        self.bytes = 0
        self.host_reads: Counter[str] = Counter()
        self.widened: list[int] = []
        self.peak_bytes = 0
        self._alive: dict[int, int] = {}
        self._alive_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        given = [*self._on_device((args, kwargs))]
        if given and name == "aten._local_scalar_dense.default":
            self.host_reads[name] += 1
            return _PLACEHOLDERS.get(given[0].dtype, 1.0)
        if given and self.device_type != "cpu" and _destination(function, args, kwargs) == "cpu":
            self.host_reads[name] += 1
            source: torch.Tensor = given[0]
            result = torch.ones(source.shape, dtype=(kwargs or {}).get("dtype") or source.dtype)
            return result if function is torch.ops.aten._to_copy.default else args[0].copy_(result)
        result = function(*args, **(kwargs or {}))
        made = [*self._on_device(result)]
        known = {tensor.untyped_storage()._cdata for tensor in given}
        for tensor in made:
            self._keep(tensor.untyped_storage(), known)
        if name.startswith(_DRAWN_ON_HOST) or any(part in name for part in _FREE):
            return result
        if tensors := [*given, *made]:
            self.launches[name] += _kernels(function, args)
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        copied = function is torch.ops.aten._to_copy.default and given and made
        if copied and given[0].dtype in _HALVES and made[0].dtype is torch.float32:
            self.widened.append(made[0].numel())
        return result

    @property
    def launched(self) -> int:
        return sum(self.launches.values())

    def _keep(self, memory: torch.UntypedStorage, known: set[int]) -> None:
        """Counts memory that an operator has made, for as long as a tensor has it."""
        key, size = memory._cdata, memory.nbytes()
        if key in known or key in self._alive:
            return
        self._alive[key] = size
        self._alive_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._alive_bytes)
        weakref.finalize(memory, self._release, key)

    def _release(self, key: int) -> None:
        self._alive_bytes -= self._alive.pop(key)

    def _on_device(self, values: Any) -> Iterator[torch.Tensor]:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.device.type == self.device_type:
                yield value


def _kernels(function: Any, args: Any) -> int:
    """A product that adds a matrix, and not a bias, copies it to its result first."""
    if function is torch.ops.aten.addmm.default:
        return 2 if args[0].dim() == 2 else 1
    return KERNELS.get(function.__name__.partition(".")[0], 1)


def _destination(function: Any, args: Any, kwargs: Any) -> str | None:
    if function is torch.ops.aten._to_copy.default:
        device = (kwargs or {}).get("device")
        return None if device is None else torch.device(device).type
    if function is torch.ops.aten.copy_.default:
        return str(args[0].device.type)
    return None
