"""The model of a run with distillation, optimizer and micro-batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from trainers import distillation
from trainers.config import RunConfig
from trainers.data.cache import preparing
from trainers.data.segments import up_to_multiple
from trainers.distillation import Distilled
from trainers.dry_runs import micro_batch
from trainers.dry_runs.micro_batch import DryRun, StageDryRun
from trainers.errors import BadSpecError
from trainers.loop import run_encoder
from trainers.loop.run_worker import RunWorker
from trainers.loop.snapshot import ModelState
from trainers.models import origin, student
from trainers.models.fit import student_misfits
from trainers.models.origin import Origin
from trainers.models.parity import EncoderParity
from trainers.models.student import Student
from trainers.optimizers.info import Built
from trainers.parallel import partition_stages
from trainers.parallel.pipeline.layers import StagePartition
from trainers.tasks.base import Prepared, Task
from trainers.update import build as build_optimizer
from trainers.update import idle


@dataclass(frozen=True, slots=True)
class RunModel:
    """A model with its training setup.

    Attributes:
        student: On its device, with this worker's layers only.
        partition: None = all layers.
        parameters: Number of trained parameters of the whole student.
        parity: Record of an encoder that packs, on rank 0; None = not compared.
    """

    student: Student
    partition: StagePartition | None
    distilled: Distilled
    built: Built
    parameters: int
    parity: EncoderParity | None

    @property
    def state(self) -> ModelState:
        built = self.built
        return ModelState(self.student, self.distilled.projections, built.optimizer, built.names)


def require_fit(config: RunConfig, model: Origin) -> None:
    if isinstance(model, origin.Folder):
        misfits = student_misfits(config, str(model), model.family, model.config())
    else:
        misfits = student_misfits(config, str(model), model.family, model.config(origin.VOCABULARY_SIZE))
    for misfit in misfits:
        raise BadSpecError(misfit.reason)


def build(worker: RunWorker, task: Task, prepared: Prepared, model_origin: Origin) -> RunModel:
    config = worker.config
    model = student.build(
        model_origin,
        head=prepared.head,
        vocabulary_size=prepared.vocabulary_size,
        dropout=config.model.dropout,
        max_length=config.task.max_length,
        pad_id=prepared.pad_id,
        layers=config.model.layers,
        attention_dropout=config.model.attention_dropout,
        binary=config.model.binary if worker.encoder.quantises else None,
    )
    compared = run_encoder.install(worker, task, prepared, model)
    parameters = model.parameter_count
    # From here on the model has this worker's layers alone, and so has its optimizer.
    with preparing():  # layers may be timed
        partition = partition_stages(config, model, worker.workers, worker.device, worker.arithmetic)
    distilled = distillation.set_up(
        config,
        task,
        prepared,
        model,
        device=worker.device,
        arithmetic=worker.arithmetic,
        multiple=worker.multiple,
        computes_loss=partition is None or partition.computes_loss,
        report=worker.log,
        warn=worker.warn,
    )
    with preparing():  # its kernels may be built, and are checked
        built = (
            build_optimizer(config.optimizer, distilled.module) if config.trains else idle(distilled.module)
        )
    if built.fallback is not None:
        worker.warn(f"optimizer.implementation: {built.implementation} runs, because {built.fallback}")
    return RunModel(model, partition, distilled, built, parameters, compared)


def choose_micro_batch(
    worker: RunWorker, prepared: Prepared, model: RunModel
) -> tuple[RunConfig, Callable[[], None]]:
    """Returns the run with its micro-batch size, warmed up, and a function that forgets it."""
    config, device = worker.config, worker.device
    if not config.trains:
        return micro_batch.with_size(config, config.micro_size), lambda: None
    described = model.student.model.config.to_dict()
    kind: Callable[..., DryRun] = DryRun
    if model.partition is not None:
        kind = partial(
            StageDryRun,
            partition=model.partition,
            stage=worker.workers.stage,
            width=model.student.shape.hidden,
        )
    dry_run = kind(
        config,
        model.distilled.module,
        model.distilled.objective,
        worker.arithmetic,
        prepared.train,
        device=device,
        pad_id=prepared.pad_id,
        multiple=worker.multiple,
        transform=worker.laid_out(model.distilled.transform, prepared, config.micro_size),
    )
    tried = {**described, "longest example": dry_run.longest}
    size = micro_batch.choose(config, worker.workers, device, tried, dry_run.at_size)
    width = up_to_multiple(dry_run.longest, worker.multiple)
    sized = micro_batch.in_tokens(config, size, device, width)
    forget = partial(micro_batch.forget, config, device, tried)
    if config.model.compile:
        try:
            with preparing():
                dry_run.compile(size)
        except torch.OutOfMemoryError:
            forget()
            raise
    key = micro_batch.key_of(sized, device, {**tried, "micro size": size})
    micro_batch.warm_up_once(key, worker.workers, worker.timeline, lambda: dry_run.rehearse(size))
    return sized, forget
