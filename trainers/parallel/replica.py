"""Computes a step's gradients and the model's outputs. The base class is one worker's model."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainers.config import RunConfig
from trainers.data.batches import Batch, StepBatch
from trainers.models.precision import Arithmetic
from trainers.models.student import Output, Student
from trainers.parallel.exchange import exchange_for
from trainers.parallel.pipeline.layers import StagePartition
from trainers.telemetry.gradient_noise import NoiseSource
from trainers.telemetry.timeline import Overlap, Phase, Sent, Timeline
from trainers.workers import Workers


@dataclass(frozen=True, slots=True)
class Setup:
    config: RunConfig  # With the resolved micro-batch size
    student: Student  # With the same weights on every worker
    module: nn.Module  # Module being trained: the student, or a wrapper around it
    partition: StagePartition | None  # This worker's layers; None = all
    optimizer: torch.optim.Optimizer
    noise: NoiseSource  # Sees gradients before they are averaged
    total_steps: int
    workers: Workers
    device: torch.device
    arithmetic: Arithmetic
    timeline: Timeline

    @property
    def accumulates(self) -> bool:
        """Whether some steps have several micro-batches."""
        return self.config.accumulation > 1 or self.config.batch.micro_tokens is not None


LossOf = Callable[[Output, Batch], torch.Tensor]
"""Sum of the loss over a micro-batch's examples, a scalar in fp32."""
_NO_SYNC_OF_BUFFERS: dict[str, Any] = {  # torch 2.13 has renamed it
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


class Replica:
    """A copy of the model, or this worker's part of one. The base class is a model on one worker.

    The student makes predictions; `module`, which is trained, is the student or a wrapper around it.
    """

    name = "single"
    concludes_late = True  # Whether the host may learn after the next step's passes if a step was applied

    def __init__(self, setup: Setup) -> None:
        self.student, self.module = setup.student, setup.module
        self._workers, self._device = setup.workers, setup.device
        self._arithmetic, self._timeline = setup.arithmetic, setup.timeline

    def prepare(self, steps: Iterable[StepBatch], loss_of: LossOf) -> None:
        """Does one-off work for the coming steps; changes none of their numbers."""

    def gradients(self, batch: StepBatch, loss_of: LossOf, scale: float | torch.Tensor) -> torch.Tensor:
        """Runs all micro-batches of a step; afterwards the gradients are those of the global batch.

        The loss is normalised over the global batch, so that gradients do not depend on how it is
        divided, and multiplied by `scale`, which they carry until the update; a tensor if the device changes
        it. Returns the loss summed over this replica's examples, fp32, on the device.
        """
        # Gradients are averaged over replicas: times their number makes it a sum.
        factor = scale * self._workers.replicas / batch.global_examples
        if isinstance(factor, torch.Tensor):
            factor = factor.float()  # as a number is rounded
        loss_sum = torch.zeros((), dtype=torch.float32, device=self._device)
        last = len(batch.micro_batches) - 1
        for i, micro_batch in enumerate(batch.micro_batches):
            with self._accumulating(i < last):
                loss_sum += self._forward_backward(micro_batch, loss_of, factor)
        return loss_sum

    def counted(self) -> list[nn.Parameter]:
        """Trained parameters that count in the gradient's norm: over a replica's workers, each once."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def infer(self, batch: Batch) -> Output | None:
        """Returns the output for a batch, None without the head; all workers of a replica call this alike."""
        said: Output = self.student(batch)
        return said

    def gather(
        self, tensors: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """Returns the whole model's tensors on rank 0, by kind and name; every worker takes part."""
        return tensors

    def facts(self) -> dict[str, object]:
        return {"strategy": self.name}

    def watched(self) -> AbstractContextManager[None]:
        """Around a run's steps: names the worker that is gone, if workers wait for each other by name."""
        return nullcontext()

    def begin_step(self, step: int, loss_scale: float) -> None:
        """Called before the forward pass of a step (0-based)."""

    def launched(self) -> Callable[[], Sent]:
        """Called after `gradients`; returns a function that gives the traffic, once the host has waited."""
        return Sent

    def discard(self) -> None:
        """Called if the optimizer did not take the step that was exchanged last."""

    def exchange_state(self) -> Mapping[str, torch.Tensor]:
        """Returns the state of all workers' gradient exchange on rank 0; every worker takes part."""
        return {}

    def restore_exchange(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restores `exchange_state`, of any number of workers; empty = start from scratch."""

    def _forward_backward(self, batch: Batch, loss_of: LossOf, factor: float | torch.Tensor) -> torch.Tensor:
        """Adds the gradients of a micro-batch; returns its loss, summed over its examples."""
        batch = batch.to(self._device)
        self._timeline.enter(Phase.forward)
        with self._arithmetic.context():
            loss_sum = loss_of(self._forward(batch), batch)
        self._timeline.enter(Phase.backward)
        (loss_sum * factor).backward()  # type: ignore[no-untyped-call]
        return loss_sum.detach()

    def _forward(self, batch: Batch) -> Output:
        return self.module(batch)  # type: ignore[no-any-return]

    def _accumulating(self, more_follow: bool) -> AbstractContextManager[None]:
        """Around forward and backward: whether this step's gradients are complete after it."""
        return nullcontext()


class DistributedReplica(Replica):
    """Replicas that average their gradients while the backward pass runs.

    A hook on each gradient bucket starts its exchange. The last bucket is handed over when
    the backward pass has nothing left to compute: from there on time is communication.
    """

    name = "ddp"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        config = setup.config
        exchange = exchange_for(config, setup.module, setup.optimizer, setup.total_steps)
        # With three or more workers the order of a ring's sums depends on the layout of buckets: a resumed
        # run would otherwise go through the first one again.
        fixed_buckets = (config.deterministic and config.parallel.workers > 2) or exchange.keeps_buckets
        # With a teacher the weights of losses, and with them what is used, may change from step to step;
        # with accumulation a step has backward passes that exchange nothing.
        self._static_graph = not (fixed_buckets or config.model.teacher is not None or setup.accumulates)
        self._parallel = DistributedDataParallel(
            _Logits(setup.module) if self._static_graph else setup.module,
            device_ids=None if self._device.index is None else [self._device.index],
            gradient_as_bucket_view=True,
            bucket_cap_mb=config.parallel.bucket_mib,
            find_unused_parameters=fixed_buckets,
            static_graph=self._static_graph,
            **_NO_SYNC_OF_BUFFERS,  # none changes in training
        )
        # torch compares a hook's annotations by identity, and ours are strings: give it a function without.
        self._parallel.register_comm_hook(None, lambda state, bucket: self._exchange_bucket(state, bucket))
        self._exchange, self._noise = exchange, setup.noise
        # What an exchange keeps between steps has to be put right before the next one.
        self.concludes_late = not exchange.keeps_buckets
        self._overlap = Overlap(self._device)
        self._bytes_before = exchange.bytes_sent

    def _forward(self, batch: Batch) -> Output:
        if self._static_graph:
            return Output(self._parallel(batch))
        with warnings.catch_warnings():
            # Every parameter is used; the search is asked for only because it keeps the buckets.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True")
            return self._parallel(batch)  # type: ignore[no-any-return]

    def _accumulating(self, more_follow: bool) -> AbstractContextManager[None]:
        return self._parallel.no_sync() if more_follow else nullcontext()

    def begin_step(self, step: int, loss_scale: float) -> None:
        self._exchange.begin_step(step, loss_scale)
        self._noise.faithful = self._exchange.faithful

    def launched(self) -> Callable[[], Sent]:
        overlap, self._overlap = self._overlap, Overlap(self._device)
        before, self._bytes_before = self._bytes_before, self._exchange.bytes_sent
        sent = self._bytes_before - before
        return lambda: Sent(sent, overlap.hidden_s())

    def discard(self) -> None:
        self._exchange.discard()

    def exchange_state(self) -> Mapping[str, torch.Tensor]:
        gathered = self._workers.gather(self._exchange.to_state(), self._device)
        return {f"{rank}.{name}": tensor for rank, own in enumerate(gathered) for name, tensor in own.items()}

    def restore_exchange(self, state: Mapping[str, torch.Tensor]) -> None:
        by_rank: dict[int, dict[str, torch.Tensor]] = {}
        for key, tensor in state.items():
            rank, _, name = key.partition(".")
            by_rank.setdefault(int(rank), {})[name] = tensor
        self._exchange.restore([by_rank[rank] for rank in sorted(by_rank)])

    def _exchange_bucket(self, _state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self._noise.see(bucket.buffer())
        if bucket.is_last():
            self._overlap.expose()
        waits = self._exchange.waits and not self._exchange.faithful
        if waits or bucket.is_last():
            self._timeline.enter(Phase.communication)
        if waits:
            reduced = self._exchange.start(bucket)
            if not bucket.is_last():
                self._timeline.enter(Phase.backward)
            return reduced
        overlap = self._overlap
        number = overlap.begin()

        def arrived(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            overlap.end(number)
            return future.value()

        return self._exchange.start(bucket).then(arrived)


class _Logits(nn.Module):
    """The trained module with a tensor as its output.

    With a static graph the first exchange hangs on the output's tensors, and torch finds none in
    a dataclass: gradients would then silently never be exchanged.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Batch) -> torch.Tensor:
        output: Output = self.module(batch)
        return output.logits
