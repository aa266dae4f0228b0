"""A recorder on the CPU: it replays operators on the memory that they had, as a CUDA graph replays kernels.

What the host decides while it records is kept: numbers in arguments, and which operators run. What would end
the recording of a CUDA graph, or stay as it was in every replay, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from trainers.device_kinds.backend import PassRecorder, Result

aten = torch.ops.aten
_REFUSED = {
    aten._local_scalar_dense: "the host reads a number",
    aten.equal: "the host reads a number",
    aten.nonzero: "a shape depends on the data",
    aten.randint: "the host draws a number",
}


class Tape(PassRecorder):
    """Records operators; counts replays.

    Attributes:
        names: operators of each recording.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.names: list[list[str]] = []

    def rehearse(self, work: Callable[[], Result]) -> Result:
        return work()

    def record(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        drawn = torch.get_rng_state()
        with _Operators() as operators:
            result = work()
        operators.undo()
        torch.set_rng_state(drawn)
        self.recorded += 1
        self.names.append(operators.names())

        def replay() -> None:
            self.replayed += 1
            with _disable_current_modes():  # a launch, whatever it holds
                operators.again()

        return result, replay


class _Operators(TorchDispatchMode):
    """The operators that ran, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self._ran: list[tuple[Any, Any, Any, Any]] = []
        self._own: set[int] = set()
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (reason := _REFUSED.get(func.overloadpacket)) is not None:
            raise AssertionError(f"{func}: {reason}")
        self._keep_written(func, args, kwargs)
        results = func(*args, **kwargs)
        aliases = [one.alias_info for one in func._schema.returns]
        if aliases and all(alias is not None and not alias.is_write for alias in aliases):
            return results  # a view of what it was a view of
        if not any(aliases):
            self._own.update(_storage(leaf) for leaf in _tensors(results))
        self._ran.append((func, args, kwargs, results))
        return results

    def again(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, results in self._ran:
                for kept, fresh in zip(_tensors(results), _tensors(func(*args, **kwargs)), strict=True):
                    if kept is not fresh:
                        kept.copy_(fresh)

    def names(self) -> list[str]:
        return [func.overloadpacket.__name__ for func, *_ in self._ran]

    def undo(self) -> None:
        """Gives memory from outside what it held: a recording computes nothing."""
        with torch.no_grad():
            for tensor, before in self._before.values():
                tensor.copy_(before)

    def _keep_written(self, func: Any, args: Any, kwargs: Any) -> None:
        named = zip(func._schema.arguments, args, strict=False)
        written = [value for argument, value in named if argument.alias_info and argument.alias_info.is_write]
        written += [kwargs[one.name] for one in func._schema.arguments if one.kwarg_only and one.is_out]
        for tensor in _tensors(written):
            if _storage(tensor) not in self._own and id(tensor) not in self._before:
                self._before[id(tensor)] = tensor, tensor.clone()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
