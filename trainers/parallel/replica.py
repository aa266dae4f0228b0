"""What the loop calls to run forward and backward. The base class is one worker's model."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from trainers.data.batches import Batch
from trainers.models.student import Output
from trainers.telemetry.timeline import Phase, Timeline


class Replica:
    """A model that nobody shares."""

    name = "single"

    def __init__(self, model: nn.Module, timeline: Timeline) -> None:
        self.model = model
        self._timeline = timeline

    def forward(self, batch: Batch) -> Output:
        """What the model says of a micro-batch."""
        return self.model(batch)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor) -> None:
        """Add the loss' gradients to the parameters'."""
        self._timeline.enter(Phase.backward)
        loss.backward()  # type: ignore[no-untyped-call]

    def accumulating(self, more_follow: bool) -> AbstractContextManager[None]:
        """Around forward and backward: whether this step's gradients are complete after it."""
        return nullcontext()


class DistributedReplica(Replica):
    """Replicas that average their gradients while the backward pass runs.

    A hook on each gradient bucket starts its all-reduce. The last bucket is handed over when
    the backward pass has nothing left to compute: from there on time is communication.

    Args:
        model: on its device, with the same weights on every worker.
        device: of the model.
        timeline: that phases are entered in.
        fixed_buckets: keep the first bucket layout. With three or more workers the order of
            a ring's sums depends on the layout, which a resumed run would go through anew.
    """

    name = "ddp"

    def __init__(
        self, model: nn.Module, device: torch.device, timeline: Timeline, *, fixed_buckets: bool
    ) -> None:
        super().__init__(model, timeline)
        self._parallel = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            broadcast_buffers=False,  # no buffer changes in training
            gradient_as_bucket_view=True,
            find_unused_parameters=fixed_buckets,
        )
        # torch compares a hook's annotations by identity, and ours are strings: give it a function without.
        self._parallel.register_comm_hook(None, lambda state, bucket: self._exchange(state, bucket))
        self._average = 1.0 / distributed.get_world_size()

    def forward(self, batch: Batch) -> Output:
        """See `Replica.forward`."""
        with warnings.catch_warnings():
            # Every parameter is used; the search is asked for only because it keeps the buckets.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True")
            return self._parallel(batch)  # type: ignore[no-any-return]

    def accumulating(self, more_follow: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged in the last backward pass of a step alone."""
        return self._parallel.no_sync() if more_follow else nullcontext()

    def _exchange(self, _state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            self._timeline.enter(Phase.communication)
        # Divide first: a sum over workers could leave the range of half precision.
        work = distributed.all_reduce(bucket.buffer().mul_(self._average), async_op=True)
        summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
        return summed
