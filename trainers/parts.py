"""What a run is made of: built by `trainers.assembly`, used by `trainers.trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainers.checkpoints.snapshot import ModelState
from trainers.checkpoints.store import CheckpointStore
from trainers.config import RunConfig
from trainers.data.batches import TrainingBatches
from trainers.evaluation import Evaluator
from trainers.final_test import FinalTest
from trainers.objective import Objective
from trainers.parallel.replica import Replica
from trainers.parallel.workers import Workers
from trainers.progress import Progress
from trainers.tasks.base import Task
from trainers.telemetry.gradient_noise import GradientNoise
from trainers.telemetry.profiling import StepProfiler
from trainers.telemetry.run_figures import RunFigures
from trainers.telemetry.timeline import Timeline
from trainers.telemetry.tracing import StepTracer
from trainers.update import Update


@dataclass(frozen=True, slots=True)
class RunData:
    """What a run trains on and is evaluated on.

    Attributes:
        task: that is learned.
        batches: of the training part.
        evaluator: of the validation part.
        final_test: of the test part; None = there is none.
        tokenizer: file that goes into checkpoints.
        identity: what a resumed run must find the same.
    """

    task: Task
    batches: TrainingBatches
    evaluator: Evaluator
    final_test: FinalTest | None
    tokenizer: Path
    identity: Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model and what a step does to it.

    Attributes:
        state: that checkpoints hold.
        objective: what is minimised.
        replica: gives gradients, spread over workers.
        update: takes them to an optimizer step.
        parameters: trained ones of the whole student.
    """

    state: ModelState
    objective: Objective
    replica: Replica
    update: Update
    parameters: int


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What is measured of a run besides its scores."""

    timeline: Timeline
    noise: GradientNoise
    figures: RunFigures
    profiler: StepProfiler
    tracer: StepTracer


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where a run's state is kept.

    Attributes:
        store: of this run.
        resumed_from: checkpoint that the attempt continues from; None = it begins the run.
        keep_untrained: whether a run that does not train writes the model that it evaluates.
    """

    store: CheckpointStore
    resumed_from: Path | None
    keep_untrained: bool


@dataclass(frozen=True, slots=True)
class Parts:
    """All parts of a run on one worker.

    Attributes:
        config: the run, with the micro-batch that was chosen.
        workers, device: where it is trained.
        total_steps: optimizer updates of the whole run.
        progress: counters, restored where the run resumes.
        forget_micro_size: called when a step runs out of memory, so that no later run uses the
            micro-batch that was found.
    """

    config: RunConfig
    workers: Workers
    device: torch.device
    total_steps: int
    progress: Progress
    data: RunData
    model: TrainedModel
    telemetry: Telemetry
    checkpoints: Checkpoints
    forget_micro_size: Callable[[], None]
