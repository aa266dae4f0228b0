"""Building a run's parts in the order that they depend on each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from trainers import distillation, micro_batch, tasks, warm_up
from trainers.checkpoints import snapshot, store
from trainers.checkpoints.store import CheckpointStore
from trainers.config import RunConfig
from trainers.data.batches import TrainingBatches
from trainers.distillation import Distilled
from trainers.evaluation import Evaluator
from trainers.final_test import FinalTest
from trainers.loss_scale import loss_scale_for
from trainers.models import dropout, origin, student
from trainers.models.encoders import ENCODERS
from trainers.models.origin import Origin
from trainers.models.student import Student
from trainers.optimizers.build import build as build_optimizer
from trainers.optimizers.build import idle
from trainers.parallel import partition_stages, replicate, workers_of
from trainers.parallel.pipeline.layers import StagePartition
from trainers.parallel.pipeline.stage_trial import StageTrial
from trainers.parallel.workers import Workers
from trainers.precision import Arithmetic, Inference, arithmetic_for, inference_for
from trainers.preparation import counted_by, preparing
from trainers.process import seed_all
from trainers.progress import Progress
from trainers.reporting import Clock, NullSink, Sink, Stop
from trainers.tasks.base import Prepared
from trainers.telemetry.devices import other_device
from trainers.telemetry.facts import environment_facts
from trainers.telemetry.flops import flop_count_of
from trainers.telemetry.gradient_noise import GradientNoise, source_for
from trainers.telemetry.heartbeat import Heartbeat, HeartbeatFile
from trainers.telemetry.instruments import Instruments
from trainers.telemetry.overhead import Overhead
from trainers.telemetry.profiling import profiler_for
from trainers.telemetry.run_figures import RunFigures
from trainers.telemetry.timeline import Phase, Timeline, timeline_for
from trainers.telemetry.tracing import tracer_for
from trainers.trainer import Parts, Trainer
from trainers.trial import Trial, compile_encoder
from trainers.update import Update


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a run is trained.

    Attributes:
        sink: null on all workers but rank 0.
        multiple: batch widths are rounded up to a multiple of this.
    """

    config: RunConfig
    sink: Sink
    workers: Workers
    device: torch.device
    timeline: Timeline
    arithmetic: Arithmetic
    inference: Inference
    multiple: int

    @classmethod
    def of(cls, config: RunConfig, sink: Sink, began_s: float) -> _Place:
        """This worker's."""
        workers, rates = workers_of(config), config.rates
        device = rates.kind.backend.device(rates.hardware)
        arithmetic = arithmetic_for(config.precision, device, config.numerics)
        return cls(
            config,
            sink if workers.rank == 0 else NullSink(),
            workers,
            device,
            timeline_for(device, began_s),
            arithmetic,
            inference_for(config.numerics, arithmetic, device),
            multiple=rates.kind.width_multiple,
        )

    def log(self, line: str) -> None:
        """Tell people what happens."""
        self.sink.log("info", line)

    def warn(self, line: str) -> None:
        """Tell people what they should know."""
        self.sink.log("warning", line)

    def warn_of_other_device(self) -> None:
        """Warn where the GPU is not the one whose power, bandwidth and peaks the run is given."""
        rates = self.config.rates
        reported = rates.kind.backend.name(self.device)
        if reported is not None and other_device(reported, rates.reported_as):
            self.warn(
                f"hardware {rates.hardware} is asked for, and this {rates.kind.noun} is {reported}: cost, "
                "MFU and modelled energy use figures of the former; name the variant that the nodes have "
                "(docs/hardware.md)"
            )


def assemble(
    config: RunConfig, sink: Sink, stop: Stop, *, clock: Clock, began_s: float, instruments: Instruments
) -> Trainer:
    """A trainer at the run's newest checkpoint, or at its beginning.

    Args:
        config: the run.
        sink: reported to on rank 0.
        stop: asked at each step boundary.
        clock: when the attempt was opened and the run submitted.
        began_s: `time.perf_counter()` at the beginning of the worker's part.
        instruments: that began to count then.

    Raises:
        TrainingError: whatever the run asks for that cannot be had.
    """
    place = _Place.of(config, sink, began_s)
    timeline = place.timeline
    heartbeat = Heartbeat()
    if place.workers.rank == 0:
        heartbeat = HeartbeatFile(Path(config.workspace.checkpoints), clock.opened_s)
    instruments.attach(place.device, alive=heartbeat.beat)
    timeline.bounded_by(Overhead(instruments, place.sink))
    timeline.enter(Phase.setup)
    checkpoints = CheckpointStore(Path(config.workspace.checkpoints), config.checkpoint.keep)
    newest = _newest(checkpoints, place)
    if newest is not None:
        timeline.resume()
    with counted_by(lambda: timeline.within(Phase.preparation)):
        attempt = _Attempt(instruments, heartbeat, clock.submitted_s, checkpoints, newest)
        trainer = _build(place, stop, attempt)
        with timeline.within(Phase.warm_up):
            place.workers.all_gather(None)  # begin together
            instruments.prepared()
    return trainer


@dataclass(frozen=True, slots=True)
class _Attempt:
    """What an attempt begins with.

    Attributes:
        submitted_s: when the run was submitted, Unix time; None = unknown.
        newest: checkpoint that it resumes from; None = it begins the run.
    """

    instruments: Instruments
    heartbeat: Heartbeat
    submitted_s: float | None
    checkpoints: CheckpointStore
    newest: Path | None


def _build(place: _Place, stop: Stop, attempt: _Attempt) -> Trainer:
    """The parts of a run, each after those that it depends on."""
    config, workers, device, timeline = place.config, place.workers, place.device, place.timeline
    instruments, checkpoints = attempt.instruments, attempt.checkpoints
    place.warn_of_other_device()
    task = tasks.build(config.task.name)
    place.sink.progress(step=0, total_steps=0, phase="preparing")
    model_origin = origin.locate(config.model.student, config.workspace)
    data = task.prepare(config, distillation.tokenizer_origin(config, model_origin), place.log)
    model = _build_model(place, model_origin, data)
    parameters = model.parameter_count
    # From here on the model has this worker's layers alone, and so has its optimizer.
    with preparing():  # layers may be timed
        partition = partition_stages(config, model, workers, device, place.arithmetic)
    distilled = distillation.set_up(
        config,
        task,
        data,
        model,
        device=device,
        arithmetic=place.arithmetic,
        multiple=place.multiple,
        computes_loss=partition is None or partition.computes_loss,
        report=place.log,
        warn=place.warn,
    )
    identity = {**data.identity, **distilled.identity}
    with preparing():  # its kernels may be built, and are checked
        built = (
            build_optimizer(config.optimizer, distilled.module) if config.trains else idle(distilled.module)
        )
    if built.fallback is not None:
        place.warn(f"optimizer.implementation: {built.implementation} runs, because {built.fallback}")
    sized, forget_micro_size = _choose_micro_batch(place, data, model, partition, distilled)
    batches = TrainingBatches(
        data.train,
        seed=config.seed,
        global_size=config.batch.global_size,
        micro_size=sized.micro_size,
        replica=workers.replica,
        replicas=workers.replicas,
        pad_id=data.pad_id,
        multiple=place.multiple,
        transform=distilled.transform,
    )
    total_steps = config.length.total_steps(len(data.train), config.batch.global_size)

    taken = store.load(attempt.newest) if attempt.newest else None
    progress = Progress()
    if taken is not None:
        progress = snapshot.restore(
            taken,
            model=model,
            projections=distilled.projections,
            optimizer=built.optimizer,
            names=built.names,
            data=identity,
        )
        timeline.carry_over(taken.state["spent_s"])
        _restore_best(checkpoints, progress, task.info.headline, workers)
    before = attempt.heartbeat.look_back(
        kept_until_s=taken.state["taken_s"] if taken else None, submitted_s=attempt.submitted_s
    )
    timeline.carry_over({Phase.lost_since_checkpoint: before.lost_s})
    progress.usage.queue_s += before.queue_s
    noise = _noise_of(sized, place, distilled.module, built.optimizer)
    # Wrapped after the weights are restored, so that replicas begin equal.
    replica = replicate(
        sized,
        model,
        distilled.module,
        partition,
        workers=workers,
        device=device,
        arithmetic=place.arithmetic,
        timeline=timeline,
        optimizer=built.optimizer,
        noise=noise.source,
        total_steps=total_steps,
    )
    place.sink.started(
        total_steps=total_steps,
        resumed_from_step=progress.step,
        facts={
            **environment_facts(device),
            **instruments.facts(),
            "data": identity,
            "device_shared": config.rates.shared,
            "resumed_from_s": taken.state["taken_s"] if taken else None,
            "student_sha256": (
                origin.digest(model_origin, config.workspace, tokenizer=True)
                if isinstance(model_origin, origin.Folder)
                else None
            ),
            "config": json.loads(config.model_dump_json()),
            "optimizer_implementation": built.implementation,
            "optimizer_library": built.library,
            "optimizer_masters": built.masters,
            "optimizer_moments": built.moments,
            "optimizer_parity": built.parity,
            "precision_implementation": place.arithmetic.name,
            "evaluation_precision": place.inference.name,
            "compiled": config.model.compile,
            **distilled.facts,
            **replica.facts(),
            "attention": model.attention,
            "workers": workers.world,
            "micro_size": sized.micro_size,
            "accumulation": sized.accumulation,
            "compression": config.parallel.compression.value,
            "gradient_noise": noise.source.name,
            "parameters": parameters,
            "train_examples": len(data.train),
            "validation_examples": len(data.validation),
            "test_examples": 0 if data.test is None else len(data.test),
            "vocabulary_size": data.vocabulary_size,
        },
    )
    # Last, because building draws random numbers too.
    if taken is not None:
        snapshot.restore_random(
            taken, rank=workers.rank, world=workers.world, seed=config.seed, device=device
        )
    else:
        seed_all(config.seed, rank=workers.rank)
    evaluator_of = partial(
        Evaluator,
        task,
        data,
        batch_size=config.evaluation.batch_size,
        workers=workers,
        device=device,
        inference=place.inference,
        multiple=place.multiple,
        peak_within=instruments.peak_within,
    )
    trainer = Trainer(
        Parts(
            config=sized,
            task=task,
            objective=distilled.objective,
            projections=distilled.projections,
            model=model,
            replica=replica,
            optimizer=built.optimizer,
            names=built.names,
            update=Update(
                distilled.module,
                built.optimizer,
                loss_scale_for(config),
                place.arithmetic.half,
                config.optimizer.max_grad_norm,
                replica.counted(),
            ),
            batches=batches,
            evaluator=evaluator_of(part="validation"),
            final_test=(
                None
                if data.test_units is None
                else FinalTest(
                    evaluator_of(part="test"),
                    data.test_units,
                    Path(config.workspace.checkpoints),
                    identity,
                    task.info.headline,
                    workers,
                )
            ),
            workers=workers,
            device=device,
            checkpoints=checkpoints,
            progress=progress,
            timeline=timeline,
            noise=noise,
            figures=RunFigures(
                sized,
                instruments,
                flop_count_of(model.bert.config, data.head),
                teacher_precision=distilled.teacher_precision,
                first=workers.first,
                timeline=timeline,
                truncated_pct=100.0 * float(data.train.cut.mean()),
            ),
            profiler=profiler_for(config.telemetry.profile_steps, total_steps, device, timeline),
            tracer=tracer_for(
                config.telemetry.trace_steps,
                profiled_steps=config.telemetry.profile_steps,
                steps_left=total_steps - progress.step,
                timeline=timeline,
            ),
            data_identity=identity,
            tokenizer=data.tokenizer,
            total_steps=total_steps,
            parameters=parameters,
            resumed_from=attempt.newest,
            forget_micro_size=forget_micro_size,
            keeps_model=_only_here(config, model, data),
        ),
        place.sink,
        stop,
    )
    if taken is not None:
        trainer.parts.go_on_from(taken)
    return trainer


def _build_model(place: _Place, model_origin: Origin, data: Prepared) -> Student:
    """The student on its device, as the run's arithmetic wants it."""
    config = place.config
    model = student.build(
        model_origin,
        head=data.head,
        vocabulary_size=data.vocabulary_size,
        dropout=config.model.dropout,
        max_length=config.task.max_length,
        pad_id=data.pad_id,
        layers=config.model.layers,
    )
    ENCODERS[config.model.encoder].install(model.bert)
    if not config.trains:
        # Before the model reaches the device, which never holds weights in another format.
        place.arithmetic.prepare(model)
        place.inference.keep(model)
    model.to(place.device)
    if config.parallel.activation_checkpointing:
        model.checkpoint_activations()
    if config.model.compile:
        compile_encoder(model)
    elif config.rates.kind.host_dropout:
        dropout.install(model)
    if config.trains:
        place.arithmetic.prepare(model)
    return model


def _only_here(config: RunConfig, model: Student, data: Prepared) -> bool:
    """Whether the model of a run that does not train needs a checkpoint.

    It does where the file that it came from is not all of it, and where the test part's predictions name
    the weights that they are of.
    """
    return bool(model.fresh) or config.model.layers is not None or data.test_units is not None


def _choose_micro_batch(
    place: _Place, data: Prepared, model: Student, partition: StagePartition | None, distilled: Distilled
) -> tuple[RunConfig, Callable[[], None]]:
    """The run with the micro-batch that it trains with, compiled for it, and how to unlearn that size."""
    config, device = place.config, place.device
    if not config.trains:
        return micro_batch.with_size(config, config.micro_size), lambda: None
    make_trial: Callable[..., Trial] = Trial
    if partition is not None:
        make_trial = partial(
            StageTrial, partition=partition, stage=place.workers.stage, width=model.bert.config.hidden_size
        )
    trial = make_trial(
        config,
        distilled.module,
        distilled.objective,
        place.arithmetic,
        data.train,
        device=device,
        pad_id=data.pad_id,
        multiple=place.multiple,
        transform=distilled.transform,
    )
    shape = {**model.bert.config.to_dict(), "longest example": trial.longest}
    sized = micro_batch.with_size(
        config, micro_batch.choose(config, place.workers, device, shape, trial.at_size)
    )
    forget = partial(micro_batch.forget, config, device, shape)
    if config.model.compile:
        try:
            with preparing():
                trial.compile(sized.micro_size)
        except torch.OutOfMemoryError:
            forget()
            raise
    key = micro_batch.key_of(sized, device, {**shape, "micro size": sized.micro_size})
    warm_up.once(key, place.workers, place.timeline, lambda: trial.rehearse(sized.micro_size))
    return sized, forget


def _noise_of(
    sized: RunConfig, place: _Place, module: nn.Module, optimizer: torch.optim.Optimizer
) -> GradientNoise:
    source = source_for(
        wanted=sized.telemetry.gradient_noise and sized.trains,
        optimizer=optimizer,
        module=module,
        replicas=place.workers.replicas,
        whole_model=place.workers.stages == 1,
        accumulation=sized.accumulation,
        device=place.device,
    )
    return GradientNoise(source, sized.batch.global_size / sized.batch.base_size)


def _newest(checkpoints: CheckpointStore, place: _Place) -> Path | None:
    """Rank 0 verifies and decides, so that all workers resume from the same checkpoint."""
    chosen = checkpoints.newest(place.warn) if place.workers.rank == 0 else None
    shared: Path | None = place.workers.broadcast(chosen)
    return shared


def _restore_best(checkpoints: CheckpointStore, progress: Progress, headline: str, workers: Workers) -> None:
    """Mark the best evaluation of the resumed run; one whose checkpoint is gone is forgotten by all."""
    kept = False
    if workers.rank == 0:
        if progress.best is not None:
            kept = checkpoints.mark_best(progress.best_step, headline, progress.best)
        if not kept:
            checkpoints.forget_best()
    if not workers.broadcast(kept):
        progress.best, progress.best_step = None, -1
