"""How data-parallel workers average their gradients. The base class sends them whole.

What a worker sends is counted where it is handed to a collective, as the bytes that leave the worker
in the algorithm that sends least, with W workers: an all-reduce of K bytes sends 2 (W - 1) / W x K
(ring), an all-to-all K x (W - 1) / W, and an all-gather its own part W - 1 times.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from trainers.config import RunConfig

Reduced = torch.futures.Future[torch.Tensor]
State = Mapping[str, torch.Tensor]


class GradientExchange:
    """The mean of gradients over workers in their own format, bucket by bucket."""

    keeps_buckets = False
    """Whether what is kept between steps belongs to places in buckets, whose layout must then not change."""
    faithful = True  # Whether the result of this step is the mean of what workers have, to rounding
    waits = False  # Whether `start` returns only when the bucket is reduced, so that nothing overlaps

    def __init__(self, *_run: object) -> None:
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.bytes_sent = 0.0  # By this worker, so far in this attempt

    def begin_step(self, step: int, loss_scale: float) -> None:
        """Called before the backward pass of a step (0-based) whose gradients carry the loss scale."""

    def start(self, bucket: Any) -> Reduced:
        """Begins to average a bucket (`torch.distributed.GradBucket`); all workers use the same order."""
        tensor = bucket.buffer()
        self._count_all_reduce(tensor.nbytes)
        # Divide first: a sum over workers could leave the range of half precision.
        work = distributed.all_reduce(tensor.mul_(1.0 / self.world), async_op=True)
        reduced: Reduced = work.get_future().then(lambda future: future.value()[0])
        return reduced

    def discard(self) -> None:
        """Called if the step was not applied, because of non-finite numbers on some worker."""

    def to_state(self) -> dict[str, torch.Tensor]:
        """Returns what this worker has to remember for the next step, by name."""
        return {}

    def restore(self, states: Sequence[State]) -> None:
        """Continues with the states of all workers, by rank; empty = start from scratch."""

    def _count_all_reduce(self, payload: int) -> None:
        self.bytes_sent += 2 * (self.world - 1) / self.world * payload


class HalfExchange(GradientExchange):
    """The mean of gradients rounded to half precision: half of fp32's bytes."""

    def __init__(self, config: RunConfig, *_run: object) -> None:
        super().__init__()
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        self._hook = hooks[config.parallel.compression]

    def start(self, bucket: Any) -> Reduced:
        self._count_all_reduce(2 * bucket.buffer().numel())
        group: Any = distributed.group.WORLD
        return self._hook(group, bucket)


def exchange_for(
    config: RunConfig, module: nn.Module, optimizer: torch.optim.Optimizer, total_steps: int
) -> GradientExchange:
    """Returns the exchange of several data-parallel workers; the warm-up is a share of `total_steps`."""
    parallel, exchange = config.parallel, config.parallel.compression_info.exchange
    made: GradientExchange = exchange(
        config, module, optimizer, math.ceil(parallel.compression_warmup * total_steps)
    )
    return made
