"""What a step hands to its process group: collectives in order, with format and size, sent nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NCCL_FORMATS = frozenset(
    {
        torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
        torch.float64,
    }
)  # fmt: skip
"""Formats that NCCL sends."""
_INTO = {"alltoall_base_": 0, "recv_": 0}
"""Argument that an operation receives into, of those that leave it as it is when nothing is sent."""
_PAYLOAD = {"alltoall_base_": 1, "allgather_": 1, "gather_": 1}
"""Argument that an operation sends, where it is not the first."""


@dataclass(frozen=True)
class Collective:
    """One operation of a process group.

    Attributes:
        name: in torch's c10d, such as `allreduce_`.
        dtypes: of what is sent, or received into.
        bytes: the same.
        contiguous: as NCCL wants all tensors to be.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    bytes: int
    contiguous: bool

    def sent_bytes(self, world: int) -> float:
        """Bytes that leave a worker in the algorithm that sends least."""
        shares = {"allreduce_": 2 * (world - 1) / world, "alltoall_base_": (world - 1) / world}
        return {**shares, "allgather_": world - 1.0}[self.name] * self.bytes


class Recorded(TorchDispatchMode):
    """Records operations of process groups; what nobody sends is received as ones."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = function._schema.name.partition("::")
        if space == "c10d":
            for tensor in _tensors(args[_INTO[name]]) if name in _INTO else ():
                tensor.fill_(1)
            sent = _tensors(args[_PAYLOAD.get(name, 0)])
            self.seen.append(
                Collective(
                    name,
                    tuple(tensor.dtype for tensor in sent),
                    sum(tensor.nbytes for tensor in sent),
                    all(tensor.is_contiguous() for tensor in _tensors(args)),
                )
            )
        return function(*args, **(kwargs or {}))


def _tensors(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


@contextmanager
def group_of_one(rank: int, world: int) -> Iterator[None]:
    """A process group of so many workers of which this process is the only one that is there."""
    distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with mock.patch.object(distributed, "all_reduce", _with_result(distributed.all_reduce)):
            yield
    finally:
        distributed.destroy_process_group()


def _with_result(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the futures of a fake group's all-reduces their tensor, which they lack."""

    def reduced(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = all_reduce(tensor, *args, async_op=async_op, **kwargs)
        if not async_op:
            return work
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(wait=work.wait, get_future=lambda: future)

    return reduced
