"""The training loop: `train -> train_step -> forward_backward_step`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainers.checkpoints import random_state, snapshot
from trainers.checkpoints.store import CheckpointStore
from trainers.config import RunConfig
from trainers.data.batches import Batch, StepBatch, TrainingBatches
from trainers.data.prefetch import Prefetcher
from trainers.errors import CheckpointError, NotFiniteError
from trainers.evaluation import Evaluator
from trainers.models.student import Student
from trainers.objective import Objective
from trainers.optimizers.schedule import learning_rate
from trainers.parallel.replica import Replica
from trainers.parallel.workers import Workers
from trainers.precision import Arithmetic
from trainers.progress import Progress
from trainers.reporting import Outcome, Point, Sink, Stop, StopReason
from trainers.tasks.base import Task
from trainers.telemetry.run_figures import RunFigures
from trainers.telemetry.timeline import TRAINING, Phase, Timeline

_REASONS = tuple(StopReason)


@dataclass(slots=True)
class Parts:
    """What a run is made of, built by `trainers.assembly`."""

    config: RunConfig
    task: Task
    objective: Objective
    model: Student
    replica: Replica
    optimizer: torch.optim.Optimizer
    arithmetic: Arithmetic
    batches: TrainingBatches
    evaluator: Evaluator
    workers: Workers
    device: torch.device
    checkpoints: CheckpointStore
    progress: Progress
    timeline: Timeline
    figures: RunFigures
    data_identity: Mapping[str, str | int | float]
    tokenizer: Path
    total_steps: int
    resumed_from: Path | None


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all workers agree on in a step.

    Attributes:
        loss_sum: over the global batch.
        tokens, padded_tokens: of the global batch.
        finite: loss and gradients are finite on every worker.
        stop: why to stop after this step, or None.
    """

    loss_sum: float
    tokens: int
    padded_tokens: int
    finite: bool
    stop: StopReason | None


class Trainer:
    """One attempt at a run.

    Args:
        parts: of the run, restored from a checkpoint where there was one.
        sink: real on rank 0, null elsewhere.
        stop: asked at each step boundary.
    """

    def __init__(self, parts: Parts, sink: Sink, stop: Stop) -> None:
        self.parts, self.sink, self.stop = parts, sink, stop
        self.saved_step, self.saved_at_s = parts.progress.step, time.monotonic()
        self.time_to_save = False
        self.checkpoint: Path | None = parts.resumed_from
        per_epoch = parts.batches.steps_per_epoch
        self.evaluate_every = max(1, round(parts.config.evaluation.every_epochs * per_epoch))
        self.stopping: StopReason | None = None
        self.rates = _Throughput(parts)
        self.parameters = [p for p in parts.model.parameters() if p.requires_grad]

    def train(self) -> Outcome:
        """Train to the end or until stopped.

        Raises:
            NotFiniteError: loss or gradients; no checkpoint is written after it.
            CheckpointError: a checkpoint cannot be written.
        """
        parts, progress = self.parts, self.parts.progress
        self.stopping = self._agree(0.0, 0, 0, True).stop
        parts.model.train()
        self._say("training")
        batches = Prefetcher(parts.batches.__getitem__, progress.step, parts.total_steps)
        try:
            while True:
                # Rare work first. What is saved before an evaluation need not be trained again
                # when the evaluation is interrupted.
                if self._checkpoint_due():
                    self.save()
                if self._evaluation_due():
                    self.evaluate()
                if self.stopping or progress.step >= parts.total_steps:
                    break

                parts.timeline.enter(Phase.data_wait)
                self.train_step(batches.next())
        finally:
            batches.close()
        if progress.step > self.saved_step or (self.stopping and self.checkpoint is None):
            self.save()  # stopped while evaluating
        return self._outcome()

    def train_step(self, batch: StepBatch) -> None:
        """One optimizer update: gradients of the global batch, agreement, update, report."""
        parts, config = self.parts, self.parts.config
        parts.objective.begin_step(parts.progress.step, parts.total_steps)
        loss_sum = torch.zeros((), dtype=torch.float32, device=parts.device)
        last = len(batch.micro_batches) - 1
        for i, micro_batch in enumerate(batch.micro_batches):
            with parts.replica.accumulating(i < last):
                loss_sum += self.forward_backward_step(micro_batch.to(parts.device), batch.global_examples)

        parts.timeline.enter(Phase.optimizer)
        grad_norm = self._clip(config.optimizer.max_grad_norm)
        norm, loss = grad_norm.item(), loss_sum.item()

        parts.timeline.enter(Phase.communication)
        agreed = self._agree(
            loss,
            sum(micro.tokens for micro in batch.micro_batches),
            sum(micro.padded_tokens for micro in batch.micro_batches),
            math.isfinite(norm) and math.isfinite(loss),
        )
        if not agreed.finite:
            self._report_not_finite(agreed.loss_sum / batch.global_examples, norm)

        parts.timeline.enter(Phase.optimizer)
        rate = learning_rate(config.optimizer, parts.progress.step, parts.total_steps)
        for group in parts.optimizer.param_groups:
            group["lr"] = rate
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)

        parts.timeline.enter(Phase.communication)
        parts.progress.count(
            loss_sum=agreed.loss_sum,
            samples=batch.global_examples,
            tokens=agreed.tokens,
            padded_tokens=agreed.padded_tokens,
            new_epoch=parts.progress.step % parts.batches.steps_per_epoch == 0,
        )
        self.stopping = agreed.stop
        parts.timeline.settle()
        if parts.progress.step % config.log_every_steps == 0:
            self._report_step(agreed.loss_sum / batch.global_examples, norm, rate)

    def forward_backward_step(self, batch: Batch, global_examples: int) -> torch.Tensor:
        """Add the gradients of a micro-batch; returns its loss, summed over its examples.

        The loss is normalised over the global batch, so that gradients do not depend on how it
        is divided. Gradients are averaged over workers: times their number makes it a sum.
        """
        parts = self.parts
        parts.timeline.enter(Phase.forward)
        with parts.arithmetic.context():
            loss_sum = parts.objective.loss(parts.replica.forward(batch), batch)
        parts.replica.backward(loss_sum * (parts.workers.world / global_examples))
        return loss_sum.detach()

    def evaluate(self) -> None:
        """Score the validation part, unless a stop comes first."""
        parts = self.parts
        parts.timeline.enter(Phase.validation)
        self._say("validating")
        scores = parts.evaluator.evaluate(parts.model, self._stop_while_evaluating)
        if scores is None:
            return
        parts.progress.judge(scores, parts.task.headline, higher_is_better=parts.task.higher_is_better)
        step = parts.progress.step
        self.sink.points([Point(name, step, value) for name, value in scores.items()])
        self._say("training")

    def save(self) -> None:
        """Write a checkpoint; every worker takes part and learns of a failure.

        Raises:
            CheckpointError: on every worker.
        """
        parts, progress = self.parts, self.parts.progress
        parts.timeline.enter(Phase.checkpoint)
        self._say("saving")
        parts.figures.update(progress, parts.workers)
        states = parts.workers.collect(random_state.capture(parts.device))
        problem: str | None = None
        if parts.workers.rank == 0:
            try:
                self._write(states)
            except CheckpointError as error:
                problem = str(error)
        problem = parts.workers.share(problem)
        if problem is not None:
            raise CheckpointError(problem)
        self.checkpoint = parts.checkpoints.path(progress.step)
        self.saved_step, self.saved_at_s = progress.step, time.monotonic()
        self.sink.checkpoint(step=progress.step, path=str(self.checkpoint), verified=True)
        self._say("training")

    def _write(self, random_states: list[dict[str, object]]) -> None:
        parts = self.parts
        taken = snapshot.take(
            model=parts.model,
            optimizer=parts.optimizer,
            progress=parts.progress,
            random_states=random_states,
            data=parts.data_identity,
            spent_s=parts.timeline.spent_s(),
            steps_per_epoch=parts.batches.steps_per_epoch,
        )

        def describe(folder: Path) -> None:
            parts.model.write_config(folder)
            (folder / parts.tokenizer.name).write_bytes(parts.tokenizer.read_bytes())

        parts.checkpoints.save(parts.progress.step, taken, describe)

    def _checkpoint_due(self) -> bool:
        progress, every = self.parts.progress, self.parts.config.checkpoint
        if progress.step == self.saved_step:
            return self.stopping is not None and self.checkpoint is None
        if self.stopping or progress.step >= self.parts.total_steps:
            return True
        return self.time_to_save or (every.every_steps is not None and progress.step % every.every_steps == 0)

    def _evaluation_due(self) -> bool:
        progress = self.parts.progress
        if self.stopping or progress.step == 0 or progress.evaluated_step == progress.step:
            return False
        return progress.step >= self.parts.total_steps or progress.step % self.evaluate_every == 0

    def _stop_while_evaluating(self) -> bool:
        self.stopping = self._agree(0.0, 0, 0, True).stop
        return self.stopping is not None

    def _clip(self, limit: float) -> torch.Tensor:
        """Global L2 norm of the gradients, which are clipped to it; 0 = no clipping."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if limit > 0.0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, limit, norm)
        return norm

    def _agree(self, loss_sum: float, tokens: int, padded_tokens: int, finite: bool) -> Agreed:
        """One exchange per step: sums over workers of everything that all must know."""
        asked = self.stop.requested()
        every_s = self.parts.config.checkpoint.every_s
        # Clocks differ: rank 0's alone says when it is time for a checkpoint.
        late = self.parts.workers.rank == 0 and 0.0 < every_s <= time.monotonic() - self.saved_at_s
        loss, tokens_sum, padded_sum, broken, save, *stops = self.parts.workers.sum(
            [loss_sum, tokens, padded_tokens, not finite, late, *(reason is asked for reason in _REASONS)],
            self.parts.device,
        )
        self.time_to_save = save > 0
        stop = next((reason for reason, votes in zip(_REASONS, stops, strict=True) if votes), None)
        return Agreed(loss, int(tokens_sum), int(padded_sum), not broken, stop)

    def _report_step(self, loss: float, grad_norm: float, rate: float) -> None:
        parts, step = self.parts, self.parts.progress.step
        samples_per_s, tokens_per_s = self.rates.lap()
        at_s = time.time()
        values = (
            ("loss", loss),
            ("learning_rate", rate),
            ("grad_norm", grad_norm),
            ("samples_per_s", samples_per_s),
            ("tokens_per_s", tokens_per_s),
            ("epoch", step / parts.batches.steps_per_epoch),
            *parts.objective.parts().items(),
        )
        self.sink.points([Point(name, step, value, at_s) for name, value in values])
        self._say("training")

    def _report_not_finite(self, loss: float, grad_norm: float) -> None:
        step = self.parts.progress.step + 1
        self.sink.points([Point("loss", step, loss), Point("grad_norm", step, grad_norm)])
        raise NotFiniteError(
            f"step {step}: loss {loss} and gradient norm {grad_norm} are not both finite; "
            "lower optimizer.learning_rate, set optimizer.max_grad_norm, or use precision fp32"
        )

    def _say(self, phase: str) -> None:
        self.sink.progress(step=self.parts.progress.step, total_steps=self.parts.total_steps, phase=phase)

    def _outcome(self) -> Outcome:
        parts, progress = self.parts, self.parts.progress
        parts.timeline.enter(Phase.communication)
        parts.figures.update(progress, parts.workers)
        done = progress.step >= parts.total_steps and progress.evaluated_step == progress.step
        summary = parts.figures.summary(progress, parts.timeline.spent_s(), parts.model.parameter_count)
        for measurement in parts.figures.measurements(summary):
            self.sink.measurement(measurement)
        return Outcome(
            status="completed" if done else "stopped",
            stop_reason=None if done else self.stopping,
            step=progress.step,
            total_steps=parts.total_steps,
            summary=summary,
            checkpoint=str(self.checkpoint) if self.checkpoint else None,
        )


class _Throughput:
    """Samples and real tokens per second of training time, between two calls of `lap`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._last = self._now()

    def lap(self) -> tuple[float, float]:
        """Samples/s and tokens/s since the last call."""
        before, self._last = self._last, self._now()
        seconds = self._last[0] - before[0]
        if seconds <= 0.0:
            return 0.0, 0.0
        return (self._last[1] - before[1]) / seconds, (self._last[2] - before[2]) / seconds

    def _now(self) -> tuple[float, int, int]:
        spent, progress = self._parts.timeline.spent_s(), self._parts.progress
        return sum(spent[phase.value] for phase in TRAINING), progress.samples, progress.tokens
