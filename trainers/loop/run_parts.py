"""The parts of a run: built by `trainers.loop.assembly`, used by `trainers.loop.trainer`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainers.checkpoints.store import CheckpointStore
from trainers.config import RunConfig
from trainers.data.batches import TrainingBatches
from trainers.data.storage import Place
from trainers.distillation.objective import Objective
from trainers.loop.evaluation import Evaluator, FinalTest
from trainers.loop.progress import Progress
from trainers.loop.run_figures import RunFigures
from trainers.loop.snapshot import ModelState
from trainers.models.latent import Latent
from trainers.parallel.replica import Replica
from trainers.tasks.base import Task
from trainers.telemetry.gradient_noise import GradientNoise
from trainers.telemetry.histograms import Histograms
from trainers.telemetry.profiling import StepProfiler
from trainers.telemetry.timeline import Timeline
from trainers.telemetry.tracing import StepTracer
from trainers.update import Update
from trainers.workers import Workers


@dataclass(frozen=True, slots=True)
class RunData:
    task: Task
    batches: TrainingBatches
    evaluator: Evaluator  # Scores the validation part
    final_test: FinalTest | None  # Scores the test part once; None = the data has no test part
    tokenizer: Path  # Tokenizer file, copied into checkpoints
    identity: Mapping[str, str | int | float]  # Hashes and sizes that must be unchanged when the run resumes


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model and what a step applies to it; `parameters` counts those trained in the whole student."""

    state: ModelState
    objective: Objective
    replica: Replica
    update: Update
    latent: Latent
    parameters: int


@dataclass(frozen=True, slots=True)
class RunTelemetry:
    timeline: Timeline
    noise: GradientNoise
    figures: RunFigures
    profiler: StepProfiler
    tracer: StepTracer
    histograms: Histograms


@dataclass(frozen=True, slots=True)
class RunParts:
    """All parts of a run on one worker; a step that runs out of memory calls `forget_micro_size`."""

    config: RunConfig  # With the resolved micro-batch size
    workers: Workers
    device: torch.device
    total_steps: int  # Optimizer updates of the whole run
    progress: Progress
    data: RunData
    model: TrainedModel
    telemetry: RunTelemetry
    store: CheckpointStore
    resumed_from: Place | None  # Checkpoint; None = the attempt starts the run
    keep_untrained: bool  # Whether a run that does not train writes the model that it evaluates
    forget_micro_size: Callable[[], None]
