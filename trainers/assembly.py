"""Building a run's parts in the order that they depend on each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from trainers import distillation, micro_batch, tasks
from trainers.checkpoints import snapshot, store
from trainers.checkpoints.store import CheckpointStore
from trainers.config import RunConfig
from trainers.data.batches import TrainingBatches
from trainers.errors import BadSpecError
from trainers.evaluation import Evaluator
from trainers.loss_scale import loss_scale_for
from trainers.models import dropout, origin, student
from trainers.optimizers import build as build_optimizer
from trainers.parallel import divide, replicate, workers_of
from trainers.parallel.pipeline.stage_trial import StageTrial
from trainers.parallel.workers import Workers
from trainers.precision import arithmetic_for, inference_for
from trainers.process import seed_all
from trainers.progress import Progress
from trainers.reporting import Clock, NullSink, Sink, Stop
from trainers.telemetry.energy import cost_usd
from trainers.telemetry.facts import environment_facts
from trainers.telemetry.flops import flop_count_of
from trainers.telemetry.gradient_noise import GradientNoise, source_for
from trainers.telemetry.instruments import Instruments
from trainers.telemetry.life import LifeFile, SignsOfLife
from trainers.telemetry.profiling import profiler_for
from trainers.telemetry.run_figures import RunFigures
from trainers.telemetry.timeline import Phase, timeline_for
from trainers.telemetry.tracing import tracer_for
from trainers.trainer import Parts, Trainer
from trainers.trial import Trial, compile_encoder
from trainers.update import Update


def assemble(
    config: RunConfig, sink: Sink, stop: Stop, *, clock: Clock, began_s: float, instruments: Instruments
) -> Trainer:
    """A trainer at the run's newest checkpoint, or at its beginning.

    Args:
        config: the run.
        sink: reported to on rank 0.
        stop: asked at each step boundary.
        clock: when the attempt began, in Unix time.
        began_s: the same as `time.perf_counter()`.
        instruments: that began to count then.

    Raises:
        TrainingError: whatever the run asks for that cannot be had.
    """
    workers = workers_of(config)
    sink = sink if workers.rank == 0 else NullSink()
    device = _device(config)
    timeline = timeline_for(device, began_s)
    life = SignsOfLife()
    if workers.rank == 0:
        life = LifeFile(Path(config.workspace.checkpoints), clock.opened_s, workers.world)
    instruments.attach(device, alive=life.beat)
    arithmetic = arithmetic_for(config.precision, device, config.numerics)
    inference = inference_for(config.numerics, arithmetic, device)

    task = tasks.build(config.task.name)
    sink.progress(step=0, total_steps=0, phase="preparing")
    model_origin = origin.locate(config.model.student, config.workspace)
    tokenizer_origin = distillation.tokenizer_origin(config, model_origin)
    data = task.prepare(config, tokenizer_origin, lambda line: sink.log("info", line))

    model = student.build(
        model_origin,
        head=data.head,
        vocabulary_size=data.vocabulary_size,
        dropout=config.model.dropout,
        max_length=config.task.max_length,
        pad_id=data.pad_id,
        layers=config.model.layers,
    ).to(device)
    if config.parallel.activation_checkpointing:
        model.checkpoint_activations()
    if config.model.compile:
        compile_encoder(model)
    elif device.type == "cpu":
        dropout.install(model)
    arithmetic.prepare(model)
    parameters = model.parameter_count
    # From here on the model has this worker's layers alone, and so has its optimizer.
    division = divide(config, model, workers, device, arithmetic)
    # A GPU's matrix units want widths of 8; on CPU every column of padding costs time.
    multiple = 8 if device.type == "cuda" else 1
    distilled = distillation.set_up(
        config,
        task,
        data,
        model,
        device=device,
        arithmetic=arithmetic,
        multiple=multiple,
        judges=division is None or division.judges,
        report=lambda line: sink.log("info", line),
        warn=lambda line: sink.log("warning", line),
    )
    identity = {**data.identity, **distilled.identity}
    built = build_optimizer(config.optimizer, distilled.module)
    if built.fallback is not None:
        sink.log(
            "warning", f"optimizer.implementation: {built.implementation} runs, because {built.fallback}"
        )
    make_trial: Callable[..., Trial] = Trial
    if division is not None:
        make_trial = partial(
            StageTrial, division=division, stage=workers.stage, width=model.bert.config.hidden_size
        )
    trial = make_trial(
        config,
        distilled.module,
        distilled.objective,
        arithmetic,
        data.train,
        device=device,
        pad_id=data.pad_id,
        multiple=multiple,
        transform=distilled.transform,
    )
    micro_size = micro_batch.choose(config, workers, device, model.bert.config.to_dict(), trial.at_size)
    if config.model.compile:
        trial.compile(micro_size)
    batches = TrainingBatches(
        data.train,
        seed=config.seed,
        global_size=config.batch.global_size,
        micro_size=micro_size,
        replica=workers.replica,
        replicas=workers.replicas,
        pad_id=data.pad_id,
        multiple=multiple,
        transform=distilled.transform,
    )
    evaluator = Evaluator(
        task,
        data,
        batch_size=config.evaluation.batch_size,
        workers=workers,
        device=device,
        inference=inference,
        multiple=multiple,
    )
    checkpoints = CheckpointStore(Path(config.workspace.checkpoints), config.checkpoint.keep)
    found = _newest(checkpoints, workers, sink)
    taken = store.load(found) if found else None
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
        _restore_best(checkpoints, progress, task.headline, workers)
    before = life.look_back(
        kept_until_s=taken.state["taken_s"] if taken else None, submitted_s=clock.submitted_s
    )
    timeline.carry_over({Phase.lost_since_checkpoint: before.lost_s})
    progress.usage.queue_s += before.queue_s
    progress.usage.cost_usd += cost_usd(config.rates, before.lost_worker_s)
    total_steps = config.length.total_steps(len(data.train), config.batch.global_size)
    accumulation = config.share // micro_size
    noise = GradientNoise(
        source_for(
            wanted=config.telemetry.gradient_noise,
            optimizer=built.optimizer,
            module=distilled.module,
            replicas=workers.replicas,
            whole_model=workers.stages == 1,
            accumulation=accumulation,
            device=device,
        ),
        config.batch.global_size / config.batch.base_size,
    )
    # Wrapped after the weights are restored, so that replicas begin equal.
    replica = replicate(
        config,
        model,
        distilled.module,
        division,
        workers=workers,
        device=device,
        arithmetic=arithmetic,
        timeline=timeline,
        optimizer=built.optimizer,
        noise=noise.source,
        total_steps=total_steps,
        accumulation=accumulation,
    )
    sink.started(
        total_steps=total_steps,
        resumed_from_step=progress.step,
        facts={
            **environment_facts(device),
            **instruments.device.facts(),
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
            "optimizer_parity": built.parity,
            "precision_implementation": arithmetic.name,
            "evaluation_precision": inference.name,
            "compiled": config.model.compile,
            **distilled.facts,
            **replica.facts(),
            "attention": model.attention,
            "workers": workers.world,
            "micro_size": micro_size,
            "accumulation": accumulation,
            "compression": config.parallel.compression.value,
            "gradient_noise": noise.source.name,
            "parameters": parameters,
            "train_examples": len(data.train),
            "validation_examples": len(data.validation),
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
    trainer = Trainer(
        Parts(
            config=config,
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
                arithmetic.half,
                config.optimizer.max_grad_norm,
                replica.counted(),
            ),
            batches=batches,
            evaluator=evaluator,
            workers=workers,
            device=device,
            checkpoints=checkpoints,
            progress=progress,
            timeline=timeline,
            noise=noise,
            figures=RunFigures(
                config,
                instruments,
                flop_count_of(model.bert.config, data.head),
                teacher_precision=distilled.teacher_precision,
                first=workers.first,
                timeline=timeline,
                truncated_pct=100.0 * float(data.train.cut.mean()),
            ),
            profiler=profiler_for(
                config.telemetry.profile_steps, total_steps, device, timeline, records=workers.rank == 0
            ),
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
            resumed_from=found,
        ),
        sink,
        stop,
    )
    if taken is not None:
        trainer.parts.go_on_from(taken)
    return trainer


def _device(config: RunConfig) -> torch.device:
    if config.rates.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadSpecError(
            f"hardware {config.rates.hardware} is a GPU, but this worker sees none; change hardware"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _newest(checkpoints: CheckpointStore, workers: Workers, sink: Sink) -> Path | None:
    """Rank 0 verifies and decides, so that all workers resume from the same checkpoint."""
    chosen = None
    if workers.rank == 0:
        chosen = checkpoints.newest(lambda line: sink.log("warning", line))
    shared: Path | None = workers.share(chosen)
    return shared


def _restore_best(checkpoints: CheckpointStore, progress: Progress, headline: str, workers: Workers) -> None:
    """Mark the best evaluation of the resumed run; one whose checkpoint is gone is forgotten by all."""
    kept = False
    if workers.rank == 0:
        if progress.best is not None:
            kept = checkpoints.mark_best(progress.best_step, headline, progress.best)
        if not kept:
            checkpoints.forget_best()
    if not workers.share(kept):
        progress.best, progress.best_step = None, -1
