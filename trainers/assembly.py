"""Builds a run's parts in the order that they depend on each other: data, model, restore, facts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from trainers import distillation
from trainers.checkpoints import snapshot, store
from trainers.checkpoints.manifest import CheckpointId
from trainers.checkpoints.snapshot import ModelState
from trainers.checkpoints.store import CheckpointStore, Snapshot
from trainers.config import RunConfig
from trainers.data.batches import TrainingBatches, Transform, collate, epoch_order
from trainers.data.segments import Packing
from trainers.distillation import Distilled
from trainers.dry_runs import micro_batch, warm_up
from trainers.dry_runs.dry_run import DryRun
from trainers.dry_runs.stage_dry_run import StageDryRun
from trainers.errors import BadSpecError
from trainers.evaluation import Evaluator
from trainers.final_test import FinalTest
from trainers.loss_scale import loss_scale_for
from trainers.models import dropout, origin, parity, student
from trainers.models.encoders import ENCODERS, EncoderInfo
from trainers.models.families import Attention
from trainers.models.fit import student_misfits
from trainers.models.origin import Origin
from trainers.models.parity import EncoderParity
from trainers.models.student import Student
from trainers.optimizers.build import build as build_optimizer
from trainers.optimizers.build import idle
from trainers.optimizers.info import Built
from trainers.parallel import partition_stages, replicate, workers_of
from trainers.parallel.pipeline.layers import StagePartition
from trainers.parallel.workers import Workers
from trainers.precision import Arithmetic, Inference, arithmetic_for, inference_for
from trainers.preparation import counted_by, preparing
from trainers.process import seed_all
from trainers.progress import Progress
from trainers.reporting import Clock, Fence, NullSink, Sink, Stop
from trainers.run_parts import RunCheckpoints, RunData, RunParts, RunTelemetry, TrainedModel
from trainers.tasks.base import Prepared, Task, build
from trainers.telemetry.devices import other_device
from trainers.telemetry.facts import environment_facts
from trainers.telemetry.flops import flop_count_of
from trainers.telemetry.gradient_noise import GradientNoise, source_for
from trainers.telemetry.heartbeat import Heartbeat, HeartbeatFile
from trainers.telemetry.instruments import Instruments
from trainers.telemetry.overhead import OverheadMeter
from trainers.telemetry.profiling import profiler_for
from trainers.telemetry.run_figures import RunFigures
from trainers.telemetry.timeline import Phase, Timeline, timeline_for
from trainers.telemetry.tracing import tracer_for
from trainers.trainer import Trainer
from trainers.update import Update

_COMPARED_TOKENS = 512
"""Tokens of the first batch that an encoder's parity is measured on, or two examples: float64 is slow."""


@dataclass(frozen=True, slots=True)
class _Worker:
    """This worker: where it computes and what it measures with.

    Attributes:
        sink: The null sink on all workers but rank 0.
        multiple: Batch widths are rounded up to a multiple of this.
    """

    config: RunConfig
    sink: Sink
    workers: Workers
    device: torch.device
    timeline: Timeline
    instruments: Instruments
    arithmetic: Arithmetic
    inference: Inference
    multiple: int

    @classmethod
    def of(cls, config: RunConfig, sink: Sink, began_s: float, instruments: Instruments) -> _Worker:
        """Returns this process' place in the run."""
        workers, rates = workers_of(config), config.rates
        device = rates.kind.backend.device(rates.hardware)
        arithmetic = arithmetic_for(config.precision, device, config.numerics)
        return cls(
            config,
            sink if workers.rank == 0 else NullSink(),
            workers,
            device,
            timeline_for(device, began_s),
            instruments,
            arithmetic,
            inference_for(config.numerics, arithmetic, device),
            multiple=rates.kind.width_multiple,
        )

    @property
    def encoder(self) -> EncoderInfo:
        """Implementation of the encoder layers."""
        return ENCODERS[self.config.model.encoder]

    def laid_out(self, transform: Transform | None, prepared: Prepared) -> Transform | None:
        """Returns what is done to each batch, with the layout that the encoder reads as the last of it."""
        return Packing(transform, prepared.pad_id, self.multiple) if self.encoder.packs else transform

    def log(self, line: str) -> None:
        """Logs a line for people."""
        self.sink.log("info", line)

    def warn(self, line: str) -> None:
        """Logs a warning for people."""
        self.sink.log("warning", line)

    def warn_of_other_device(self) -> None:
        """Warns where the GPU is not the one whose power, bandwidth and peaks the run is given."""
        rates = self.config.rates
        reported = rates.kind.backend.name(self.device)
        if reported is not None and other_device(reported, rates.reported_as):
            self.warn(
                f"hardware {rates.hardware} is requested, but this {rates.kind.noun} is {reported}: cost, "
                "MFU and modelled energy use the figures of the former; use the variant that the nodes have "
                "(docs/hardware.md)"
            )


def assemble(
    config: RunConfig,
    sink: Sink,
    stop: Stop,
    *,
    clock: Clock,
    began_s: float,
    instruments: Instruments,
    fence: Fence | None = None,
) -> Trainer:
    """Returns a trainer at the run's newest checkpoint, or at its beginning.

    Args:
        config: the run.
        sink: reported to on rank 0.
        stop: asked at each step boundary.
        clock: when the attempt was opened and the run submitted.
        began_s: `time.perf_counter()` at the beginning of the worker's part.
        instruments: Instruments started at that moment.
        fence: Fence of the attempt; None = there is only one at a time.

    Raises:
        TrainingError: whatever the run asks for that cannot be had.
    """
    worker = _Worker.of(config, sink, began_s, instruments)
    timeline = worker.timeline
    heartbeat = Heartbeat()
    if worker.workers.rank == 0:
        heartbeat = HeartbeatFile(Path(config.workspace.checkpoints), clock.opened_s)
    instruments.attach(worker.device, alive=heartbeat.beat)
    timeline.bounded_by(OverheadMeter(instruments, worker.sink))
    timeline.enter(Phase.setup)
    checkpoints = CheckpointStore(Path(config.workspace.checkpoints), config.checkpoint.keep, fence)
    newest = _newest(checkpoints, worker)
    if newest is not None:
        timeline.resume()
    with counted_by(lambda: timeline.within(Phase.preparation)):
        attempt = _Attempt(heartbeat, clock.submitted_s, checkpoints, newest)
        trainer = _build(worker, attempt, stop)
        with timeline.within(Phase.warm_up):
            worker.workers.all_gather(None)  # begin together
            instruments.prepared()
    return trainer


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What an attempt begins with.

    Attributes:
        submitted_s: Unix time at which the run was submitted; None = unknown.
        newest: Checkpoint to resume from; None = the attempt starts the run.
    """

    heartbeat: Heartbeat
    submitted_s: float | None
    checkpoints: CheckpointStore
    newest: Path | None


def _build(worker: _Worker, attempt: _Attempt, stop: Stop) -> Trainer:
    """Returns the trainer; each part is built after those that it depends on."""
    config, workers, device, timeline = worker.config, worker.workers, worker.device, worker.timeline
    worker.warn_of_other_device()
    task = build(config.task.name)
    worker.sink.progress(step=0, total_steps=0, phase="preparing")

    model_origin = origin.locate(config.model.student, config.workspace)
    _require_fit(config, model_origin)
    prepared = task.prepare(config, distillation.tokenizer_origin(config, model_origin), worker.log)
    _require_room(config, prepared)
    model = _build_model(worker, task, prepared, model_origin)
    sized, forget_micro_size = _choose_micro_batch(worker, prepared, model)
    data = _run_data(worker, sized, task, prepared, model.distilled, attempt.checkpoints)
    total_steps = config.length.total_steps(len(prepared.train), config.batch.global_size)

    taken = store.load(attempt.newest) if attempt.newest else None
    progress = _restore(worker, attempt, taken, model.state, data)
    noise = _noise_of(sized, worker, model)
    # Wrapped after the weights are restored, so that replicas begin equal.
    replica = replicate(
        sized,
        model.student,
        model.distilled.module,
        model.partition,
        workers=workers,
        device=device,
        arithmetic=worker.arithmetic,
        timeline=timeline,
        optimizer=model.built.optimizer,
        noise=noise.source,
        total_steps=total_steps,
    )
    worker.sink.started(
        total_steps=total_steps,
        resumed_from_step=progress.step,
        facts={
            **_worker_facts(worker),
            **_data_facts(prepared, data.identity),
            **_model_facts(worker, model_origin, model),
            **model.built.facts(),
            **replica.facts(),
            "resumed_from_s": taken.state["taken_s"] if taken else None,
            "micro_size": sized.micro_size,
            "accumulation": sized.accumulation,
            "gradient_noise": noise.source.name,
        },
    )
    # Last, because building draws random numbers too.
    if taken is not None:
        snapshot.restore_random(
            taken, rank=workers.rank, world=workers.world, seed=config.seed, device=device
        )
    else:
        seed_all(config.seed, rank=workers.rank)
    update = Update(
        model.distilled.module,
        model.built.optimizer,
        loss_scale_for(config),
        worker.arithmetic.half,
        config.optimizer.max_grad_norm,
        replica.counted(),
    )
    trainer = Trainer(
        RunParts(
            config=sized,
            workers=workers,
            device=device,
            total_steps=total_steps,
            progress=progress,
            data=data,
            model=TrainedModel(model.state, model.distilled.objective, replica, update, model.parameters),
            telemetry=_telemetry(worker, sized, prepared, model, noise, range(progress.step, total_steps)),
            checkpoints=RunCheckpoints(
                attempt.checkpoints, attempt.newest, _only_here(config, model.student, prepared)
            ),
            forget_micro_size=forget_micro_size,
        ),
        worker.sink,
        stop,
    )
    if taken is not None:
        trainer.continue_from(taken)
    return trainer


def _require_room(config: RunConfig, prepared: Prepared) -> None:
    """Refuses a budget of tokens that an example exceeds.

    Raises:
        BadSpecError: with the field to change.
    """
    limit, longest = config.batch.micro_tokens, int(prepared.train.lengths.max(initial=0))
    if limit is not None and config.trains and longest > limit:
        raise BadSpecError(
            f"batch.micro_tokens {limit} is below the longest training example of {longest} tokens; raise it "
            f"to at least {longest}, or lower task.max_length"
        )


def _require_fit(config: RunConfig, model: Origin) -> None:
    """Refuses a student that cannot do what the run asks of it.

    Raises:
        BadSpecError: with the first reason.
    """
    if isinstance(model, origin.Folder):
        misfits = student_misfits(config, str(model), model.family, model.config())
    else:
        misfits = student_misfits(config, str(model), model.family, model.config(origin.VOCABULARY_SIZE))
    for misfit in misfits:
        raise BadSpecError(misfit.reason)


@dataclass(frozen=True, slots=True)
class _Model:
    """A model with what trains it.

    Attributes:
        student: On its device, with this worker's layers only.
        partition: Which layers these are; None = all.
        distilled: What distillation adds; the null form without a teacher.
        built: The optimizer, and the implementation that really runs.
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
        """What checkpoints hold."""
        built = self.built
        return ModelState(self.student, self.distilled.projections, built.optimizer, built.names)


def _build_model(worker: _Worker, task: Task, prepared: Prepared, model_origin: Origin) -> _Model:
    """Returns the model, what distillation adds to it, and its optimizer."""
    config = worker.config
    model, compared = _build_student(worker, task, prepared, model_origin)
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
    distilled = replace(distilled, transform=worker.laid_out(distilled.transform, prepared))
    with preparing():  # its kernels may be built, and are checked
        built = (
            build_optimizer(config.optimizer, distilled.module) if config.trains else idle(distilled.module)
        )
    if built.fallback is not None:
        worker.warn(f"optimizer.implementation: {built.implementation} runs, because {built.fallback}")
    return _Model(model, partition, distilled, built, parameters, compared)


def _build_student(
    worker: _Worker, task: Task, prepared: Prepared, model_origin: Origin
) -> tuple[Student, EncoderParity | None]:
    """Returns the student on its device, as the run's arithmetic wants it, and its encoder's parity."""
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
    )
    compared = _encoder_parity(worker, task, prepared, model)
    worker.encoder.install(model.model)
    if not config.trains:
        # Before the model reaches the device, which never holds weights in another format.
        worker.arithmetic.prepare(model)
        worker.inference.keep(model)
    model.to(worker.device)
    if config.parallel.activation_checkpointing:
        model.checkpoint_activations()
    if config.model.compile:
        model.compile_encoder()
    elif config.rates.kind.host_dropout and worker.encoder.host_dropout:
        attends_to_all = model.architecture.family.attention is Attention.full
        dropout.install(model, attention=attends_to_all)
    if config.trains:
        worker.arithmetic.prepare(model)
    return model, compared


def _encoder_parity(worker: _Worker, task: Task, prepared: Prepared, model: Student) -> EncoderParity | None:
    """Returns how an encoder that packs compares with the default one on the run's first examples.

    Args:
        worker: this worker; only rank 0 compares.
        task: Task being learned.
        prepared: Prepared data of the task.
        model: as it was built, before the encoder is installed.
    """
    config = worker.config
    if not (worker.encoder.packs and config.trains and worker.workers.rank == 0):
        return None
    lengths = prepared.train.lengths
    rows = epoch_order(lengths, config.seed, 0, config.batch.global_size)[: config.batch.global_size]
    within = np.searchsorted(np.cumsum(lengths[rows]), _COMPARED_TOKENS, side="right")
    batch = collate(prepared.train, rows[: max(2, int(within))], prepared.pad_id, worker.multiple)
    transform = worker.laid_out(prepared.transform, prepared)
    assert transform is not None
    with preparing():
        record = parity.measure(
            model,
            lambda student: worker.encoder.install(student.model),
            transform(batch, seed=config.seed, epoch=0).to(worker.device),
            task.loss,
            encoder=worker.encoder.name,
            arithmetic=worker.arithmetic,
        )
    if not record.passed:
        worker.warn(
            f"model.encoder {record.encoder} differs from the default by more than rounding explains: hidden "
            f"states {record.hidden_max_abs:.1e} ({record.hidden_rounding:.1e}), gradients "
            f"{record.gradient_max_rel:.1e} ({record.gradient_rounding:.1e}); use another model.encoder"
        )
    return record


def _run_data(
    worker: _Worker,
    sized: RunConfig,
    task: Task,
    prepared: Prepared,
    distilled: Distilled,
    checkpoints: CheckpointStore,
) -> RunData:
    """Returns the batches of the training part, and what scores the other parts."""
    config, workers = worker.config, worker.workers
    identity = {**prepared.identity, **distilled.identity}
    evaluator_of = partial(
        Evaluator,
        task,
        replace(prepared, transform=worker.laid_out(prepared.transform, prepared)),
        batch_size=config.evaluation.batch_size,
        workers=workers,
        device=worker.device,
        inference=worker.inference,
        multiple=worker.multiple,
        peak_within=worker.instruments.peak_within,
    )
    final_test = None
    if prepared.test_units is not None:
        final_test = FinalTest(
            evaluator_of(part="test"),
            prepared.test_units,
            Path(config.workspace.checkpoints),
            checkpoints.own_folder,
            identity,
            task.info.headline,
            workers,
        )
    batches = TrainingBatches(
        prepared.train,
        seed=config.seed,
        global_size=config.batch.global_size,
        micro_size=sized.micro_size,
        replica=workers.replica,
        replicas=workers.replicas,
        pad_id=prepared.pad_id,
        multiple=worker.multiple,
        transform=distilled.transform,
        micro_tokens=config.batch.micro_tokens,
        packs=worker.encoder.packs,
    )
    return RunData(task, batches, evaluator_of(part="validation"), final_test, prepared.tokenizer, identity)


def _restore(
    worker: _Worker, attempt: _Attempt, taken: Snapshot | None, state: ModelState, data: RunData
) -> Progress:
    """Restores model, optimizer and clock from a snapshot; returns the counters, new ones without it."""
    progress = Progress()
    if taken is not None:
        progress = snapshot.restore(taken, state, data.identity)
        worker.timeline.carry_over(taken.state["spent_s"])
    _restore_best(attempt.checkpoints, progress, data.task.info.headline, worker.workers)
    before = attempt.heartbeat.look_back(
        kept_until_s=taken.state["taken_s"] if taken else None, submitted_s=attempt.submitted_s
    )
    worker.timeline.carry_over({Phase.lost_since_checkpoint: before.lost_s})
    progress.usage.queue_s += before.queue_s
    return progress


def _worker_facts(worker: _Worker) -> dict[str, object]:
    config = worker.config
    return {
        **environment_facts(worker.device),
        **worker.instruments.facts(),
        "config": json.loads(config.model_dump_json()),
        "device_shared": config.rates.shared,
        "workers": worker.workers.world,
        "compression": config.parallel.compression.value,
        "precision_implementation": worker.arithmetic.name,
        "evaluation_precision": worker.inference.name,
    }


def _data_facts(prepared: Prepared, identity: Mapping[str, object]) -> dict[str, object]:
    return {
        "data": identity,
        "train_examples": len(prepared.train),
        "validation_examples": len(prepared.validation),
        "test_examples": 0 if prepared.test is None else len(prepared.test),
        "vocabulary_size": prepared.vocabulary_size,
    }


def _model_facts(worker: _Worker, model_origin: Origin, model: _Model) -> dict[str, object]:
    workspace = worker.config.workspace
    return {
        "student_sha256": (
            origin.digest(model_origin, workspace, tokenizer=True)
            if isinstance(model_origin, origin.Folder)
            else None
        ),
        "compiled": worker.config.model.compile,
        "attention": model.student.attention,
        **({} if model.parity is None else {"encoder_parity": model.parity.as_dict()}),
        "parameters": model.parameters,
        **model.distilled.facts,
    }


def _telemetry(
    worker: _Worker, sized: RunConfig, prepared: Prepared, model: _Model, noise: GradientNoise, steps: range
) -> RunTelemetry:
    """Returns what measures the run over the `steps` that are left."""
    timeline, wanted = worker.timeline, sized.telemetry
    return RunTelemetry(
        timeline=timeline,
        noise=noise,
        figures=RunFigures(
            sized,
            worker.instruments,
            flop_count_of(model.student.model.config, prepared.head),
            teacher_precision=model.distilled.teacher_precision,
            first=worker.workers.first,
            timeline=timeline,
            truncated_pct=100.0 * float(prepared.train.cut.mean()),
        ),
        profiler=profiler_for(wanted.profile_steps, steps.stop, worker.device, timeline),
        tracer=tracer_for(
            wanted.trace_steps,
            profiled_steps=wanted.profile_steps,
            steps_left=steps.stop - steps.start,
            timeline=timeline,
        ),
    )


def _only_here(config: RunConfig, model: Student, data: Prepared) -> bool:
    """Returns whether the model of a run that does not train needs a checkpoint.

    It does where the file that it came from is not all of it, and where the test part's predictions name
    the weights that they are of.
    """
    return bool(model.fresh) or config.model.layers is not None or data.test_units is not None


def _choose_micro_batch(
    worker: _Worker, prepared: Prepared, model: _Model
) -> tuple[RunConfig, Callable[[], None]]:
    """Returns the run with its micro-batch, compiled and warmed up for it, and what forgets that size."""
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
        transform=model.distilled.transform,
    )
    tried = {**described, "longest example": dry_run.longest}
    size = micro_batch.choose(config, worker.workers, device, tried, dry_run.at_size)
    sized = micro_batch.with_size(config, size)
    forget = partial(micro_batch.forget, config, device, tried)
    if config.model.compile:
        try:
            with preparing():
                dry_run.compile(size)
        except torch.OutOfMemoryError:
            forget()
            raise
    key = micro_batch.key_of(sized, device, {**tried, "micro size": size})
    warm_up.once(key, worker.workers, worker.timeline, lambda: dry_run.rehearse(size))
    return sized, forget


def _noise_of(sized: RunConfig, worker: _Worker, model: _Model) -> GradientNoise:
    source = source_for(
        wanted=sized.telemetry.gradient_noise and sized.trains,
        optimizer=model.built.optimizer,
        module=model.distilled.module,
        replicas=worker.workers.replicas,
        whole_model=worker.workers.stages == 1,
        # Micro-batches of a number of tokens are no equal parts of a step.
        accumulation=sized.accumulation if sized.batch.micro_tokens is None else 1,
        device=worker.device,
    )
    return GradientNoise(source, sized.batch.global_size / sized.batch.base_size)


def _newest(checkpoints: CheckpointStore, worker: _Worker) -> Path | None:
    """Rank 0 verifies and decides, so that all workers resume from the same checkpoint."""
    chosen = checkpoints.newest(worker.warn) if worker.workers.rank == 0 else None
    shared: Path | None = worker.workers.broadcast(chosen)
    return shared


def _restore_best(checkpoints: CheckpointStore, progress: Progress, headline: str, workers: Workers) -> None:
    """Marks the best evaluation of the resumed run; one whose checkpoint is gone is forgotten by all."""
    kept = False
    if workers.rank == 0:
        if progress.best is not None:
            best = CheckpointId(progress.best_attempt, progress.best_step)
            kept = checkpoints.mark_best(best, headline, progress.best)
        if not kept:
            checkpoints.forget_best()
    if not workers.broadcast(kept):
        progress.best, progress.best_step, progress.best_attempt = None, -1, 0
