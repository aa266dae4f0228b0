"""What the loop calls for a step's gradients, and to ask the model. The base class is one worker's model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from trainers.data.batches import Batch, StepBatch
from trainers.models.student import Output, Student
from trainers.parallel.workers import Workers
from trainers.precision import Arithmetic
from trainers.telemetry.timeline import Phase, Timeline

LossOf = Callable[[Output, Batch], torch.Tensor]
"""Sum of the loss over a micro-batch's examples, a scalar in fp32."""


class Replica:
    """A copy of the model, or this worker's part of one. The base class is a model that nobody shares.

    Args:
        student: that is asked; its parameters, and those of `module`, are this worker's.
        module: that is trained: the student, or more around it.
        workers: of the run.
        device: of the model.
        arithmetic: of the forward pass.
        timeline: that phases are entered in.
    """

    name = "single"

    def __init__(
        self,
        student: Student,
        module: nn.Module,
        *,
        workers: Workers,
        device: torch.device,
        arithmetic: Arithmetic,
        timeline: Timeline,
    ) -> None:
        self.student, self.module = student, module
        self._workers, self._device, self._arithmetic, self._timeline = workers, device, arithmetic, timeline

    def gradients(self, batch: StepBatch, loss_of: LossOf, scale: float) -> torch.Tensor:
        """Run all micro-batches of a step; afterwards the gradients are those of the global batch.

        The loss is normalised over the global batch, so that gradients do not depend on how it is
        divided, and multiplied by `scale`, which they carry until the update.

        Args:
            batch: this replica's share of the step.
            loss_of: what is minimised.
            scale: loss scale.

        Returns:
            The loss summed over the share's examples, fp32, on the device; over all workers these
            add up to that of the global batch.
        """
        # Gradients are averaged over replicas: times their number makes it a sum.
        factor = scale * self._workers.replicas / batch.global_examples
        loss_sum = torch.zeros((), dtype=torch.float32, device=self._device)
        last = len(batch.micro_batches) - 1
        for i, micro_batch in enumerate(batch.micro_batches):
            with self._accumulating(i < last):
                loss_sum += self._forward_backward(micro_batch.to(self._device), loss_of, factor)
        return loss_sum

    def counted(self) -> list[nn.Parameter]:
        """Trained parameters that count in the gradient's norm: over a replica's workers, each once."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def infer(self, batch: Batch) -> Output | None:
        """What the model says of a batch; None on a worker that does not get to know.

        All workers of a replica call this alike, in evaluation mode and without gradients.
        """
        said: Output = self.student(batch)
        return said

    def gather(
        self, tensors: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """On rank 0 the whole model's tensors, of each worker's own; every worker takes part.

        Args:
            tensors: this worker's, by kind and name.
        """
        return tensors

    def watched(self) -> AbstractContextManager[None]:
        """Around a run's steps: says which worker is gone, where workers wait for each other by name."""
        return nullcontext()

    def _forward_backward(self, batch: Batch, loss_of: LossOf, factor: float) -> torch.Tensor:
        """Add the gradients of a micro-batch; returns its loss, summed over its examples."""
        self._timeline.enter(Phase.forward)
        with self._arithmetic.context():
            loss_sum = loss_of(self._forward(batch), batch)
        self._timeline.enter(Phase.backward)
        (loss_sum * factor).backward()  # type: ignore[no-untyped-call]
        return loss_sum.detach()

    def _forward(self, batch: Batch) -> Output:
        """What the trained module says of a micro-batch."""
        return self.module(batch)  # type: ignore[no-any-return]

    def _accumulating(self, more_follow: bool) -> AbstractContextManager[None]:
        """Around forward and backward: whether this step's gradients are complete after it."""
        return nullcontext()


class DistributedReplica(Replica):
    """Replicas that average their gradients while the backward pass runs.

    A hook on each gradient bucket starts its all-reduce. The last bucket is handed over when
    the backward pass has nothing left to compute: from there on time is communication.

    Args:
        student, module: see `Replica`; with the same weights on every worker.
        fixed_buckets: keep the first bucket layout. With three or more workers the order of
            a ring's sums depends on the layout, which a resumed run would go through anew.
        place: see `Replica`.
    """

    name = "ddp"

    def __init__(self, student: Student, module: nn.Module, *, fixed_buckets: bool, **place: Any) -> None:
        super().__init__(student, module, **place)
        self._parallel = DistributedDataParallel(
            module,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            broadcast_buffers=False,  # no buffer changes in training
            gradient_as_bucket_view=True,
            find_unused_parameters=fixed_buckets,
        )
        # torch compares a hook's annotations by identity, and ours are strings: give it a function without.
        self._parallel.register_comm_hook(None, lambda state, bucket: self._exchange(state, bucket))
        self._average = 1.0 / self._workers.replicas

    def _forward(self, batch: Batch) -> Output:
        """See `Replica._forward`."""
        with warnings.catch_warnings():
            # Every parameter is used; the search is asked for only because it keeps the buckets.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True")
            return self._parallel(batch)  # type: ignore[no-any-return]

    def _accumulating(self, more_follow: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged in the last backward pass of a step alone."""
        return self._parallel.no_sync() if more_follow else nullcontext()

    def _exchange(self, _state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if bucket.is_last():
            self._timeline.enter(Phase.communication)
        # Divide first: a sum over workers could leave the range of half precision.
        work = distributed.all_reduce(bucket.buffer().mul_(self._average), async_op=True)
        summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
        return summed
