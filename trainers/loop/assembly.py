"""Builds a run's parts in the order that they depend on each other: data, model, restore, facts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trainers import distillation
from trainers.checkpoints import store
from trainers.checkpoints.manifest import CheckpointId
from trainers.checkpoints.store import CheckpointStore, Snapshot
from trainers.config import RunConfig
from trainers.data.batches import TrainingBatches
from trainers.data.cache import counted_by
from trainers.distillation import Distilled
from trainers.errors import BadSpecError
from trainers.loop import run_model, snapshot
from trainers.loop.evaluation import Evaluator, FinalTest
from trainers.loop.progress import Progress
from trainers.loop.run_figures import RunFigures
from trainers.loop.run_model import RunModel
from trainers.loop.run_parts import RunCheckpoints, RunData, RunParts, RunTelemetry, TrainedModel
from trainers.loop.run_worker import RunWorker
from trainers.loop.snapshot import ModelState
from trainers.loop.stages import Ended
from trainers.loop.trainer import Trainer
from trainers.models import origin
from trainers.models.binary.course import latent_of
from trainers.models.origin import Origin
from trainers.models.student import Student
from trainers.parallel import replicate
from trainers.process import seed_all
from trainers.reporting import Clock, Fence, Sink, Stop
from trainers.tasks.base import Prepared, Task, build
from trainers.telemetry.facts import environment_facts
from trainers.telemetry.flops import flop_count_of
from trainers.telemetry.gradient_noise import GradientNoise, source_for
from trainers.telemetry.heartbeat import Heartbeat, HeartbeatFile
from trainers.telemetry.instruments import Instruments, OverheadMeter
from trainers.telemetry.profiling import profiler_for
from trainers.telemetry.timeline import Phase
from trainers.telemetry.tracing import tracer_for
from trainers.telemetry.usage import Usage
from trainers.update import Update, loss_scale_for
from trainers.workers import Workers


def assemble(
    config: RunConfig,
    sink: Sink,
    stop: Stop,
    *,
    clock: Clock,
    began_s: float,
    instruments: Instruments,
    fence: Fence | None = None,
    before: Ended | None = None,
    last: bool = True,
) -> Trainer:
    """Returns a trainer at the run's newest checkpoint, or at its beginning.

    Args:
        clock: When the attempt was opened and the run submitted.
        began_s: `time.perf_counter()` at the beginning of the worker's part.
        fence: None = there is only one attempt at a time.
        before: Result of the previous stage; None = the run has no stages, or this is the first.
        last: Whether the run ends with this training.
    """
    worker = RunWorker.of(config, sink, began_s, instruments)
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
        attempt = _Attempt(heartbeat, clock.submitted_s, checkpoints, newest, before, last)
        trainer = _build(worker, attempt, stop)
        with timeline.within(Phase.warm_up):
            worker.workers.all_gather(None)  # begin together
            instruments.prepared()
    return trainer


@dataclass(frozen=True, slots=True)
class _Attempt:
    heartbeat: Heartbeat
    submitted_s: float | None
    checkpoints: CheckpointStore
    newest: Path | None
    before: Ended | None = None
    last: bool = True


def _build(worker: RunWorker, attempt: _Attempt, stop: Stop) -> Trainer:
    config, workers, device, timeline = worker.config, worker.workers, worker.device, worker.timeline
    worker.warn_of_other_device()
    task = build(config.task.name, worker.encoder.cross_entropy)
    worker.sink.progress(step=0, total_steps=0, phase="preparing")

    model_origin = origin.locate(config.model.name, config.workspace)
    run_model.require_fit(config, model_origin)
    prepared = task.prepare(config, distillation.tokenizer_origin(config, model_origin), worker.log)
    if not attempt.last:
        prepared = replace(prepared, test_units=None)
    _require_room(config, prepared)
    model = run_model.build(worker, task, prepared, model_origin)
    sized, forget_micro_size = run_model.choose_micro_batch(worker, prepared, model)
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
            "resumed_from_s": _kept_until_s(attempt, taken),
            "micro_size": sized.batch.micro_size,
            "micro_tokens": sized.batch.micro_tokens,
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
    latent = latent_of(model.student)
    update = Update(
        model.distilled.module,
        model.built.optimizer,
        loss_scale_for(config),
        worker.arithmetic.half,
        config.optimizer.max_grad_norm,
        replica.counted(),
        latent,
    )
    trainer = Trainer(
        RunParts(
            config=sized,
            workers=workers,
            device=device,
            total_steps=total_steps,
            progress=progress,
            data=data,
            model=TrainedModel(
                model.state, model.distilled.objective, replica, update, latent, model.parameters
            ),
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
    limit, longest = config.batch.micro_tokens, int(prepared.train.lengths.max(initial=0))
    if limit is not None and config.trains and longest > limit:
        raise BadSpecError(
            f"batch.micro_tokens {limit} is below the longest training example of {longest} tokens; raise it "
            f"to at least {longest}, or lower task.max_length"
        )


def _run_data(
    worker: RunWorker,
    sized: RunConfig,
    task: Task,
    prepared: Prepared,
    distilled: Distilled,
    checkpoints: CheckpointStore,
) -> RunData:
    config, workers = worker.config, worker.workers
    identity = {**prepared.identity, **distilled.identity}
    evaluator_of = partial(
        Evaluator,
        task,
        replace(
            prepared, transform=worker.laid_out(prepared.transform, prepared, config.evaluation.batch_size)
        ),
        batch_size=config.evaluation.batch_size,
        workers=workers,
        device=worker.device,
        inference=worker.inference,
        multiple=worker.multiple,
        peak_within=worker.instruments.peak_within,
        warn=worker.warn,
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
        transform=worker.trained_as(distilled.transform, prepared, sized),
        micro_tokens=sized.batch.micro_tokens,
        packs=worker.encoder.packs,
    )
    return RunData(task, batches, evaluator_of(part="validation"), final_test, prepared.tokenizer, identity)


def _restore(
    worker: RunWorker, attempt: _Attempt, taken: Snapshot | None, state: ModelState, data: RunData
) -> Progress:
    progress = Progress()
    if taken is not None:
        progress = snapshot.restore(taken, state, data.identity)
        worker.timeline.carry_over(taken.state["spent_s"])
    elif attempt.before is not None:
        progress = replace(progress, **attempt.before.counters)
        progress.usage = Usage(**attempt.before.usage)
        worker.timeline.carry_over(attempt.before.spent_s)
    _restore_best(attempt.checkpoints, progress, data.task.info.headline, worker.workers)
    before = attempt.heartbeat.look_back(
        kept_until_s=_kept_until_s(attempt, taken), submitted_s=attempt.submitted_s
    )
    worker.timeline.carry_over({Phase.lost_since_checkpoint: before.lost_s})
    progress.usage.queue_s += before.queue_s
    return progress


def _kept_until_s(attempt: _Attempt, taken: Snapshot | None) -> float | None:
    if taken is not None:
        return float(taken.state["taken_s"])
    return None if attempt.before is None else attempt.before.ended_s


def _worker_facts(worker: RunWorker) -> dict[str, object]:
    config = worker.config
    return {
        **environment_facts(worker.device),
        **worker.instruments.facts(),
        "config": json.loads(config.model_dump_json()),
        "device_shared": config.rates.shared,
        "workers": worker.workers.world,
        "compression": config.parallel.compression,
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


def _model_facts(worker: RunWorker, model_origin: Origin, model: RunModel) -> dict[str, object]:
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
    worker: RunWorker,
    sized: RunConfig,
    prepared: Prepared,
    model: RunModel,
    noise: GradientNoise,
    steps: range,
) -> RunTelemetry:
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
        profiler=profiler_for(wanted, steps.stop, worker.device, timeline, alone=worker.workers.world == 1),
        tracer=tracer_for(
            wanted.trace_steps,
            profiled_steps=wanted.profile_steps,
            steps_left=steps.stop - steps.start,
            timeline=timeline,
        ),
    )


def _only_here(config: RunConfig, model: Student, data: Prepared) -> bool:
    """Returns whether a run that does not train needs a checkpoint of its model.

    It does where the source file is not the whole model, and where predictions of the test part refer to the
    hash of the weights.
    """
    return bool(model.fresh) or config.model.layers is not None or data.test_units is not None


def _noise_of(sized: RunConfig, worker: RunWorker, model: RunModel) -> GradientNoise:
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


def _newest(checkpoints: CheckpointStore, worker: RunWorker) -> Path | None:
    chosen = checkpoints.newest(worker.warn) if worker.workers.rank == 0 else None
    shared: Path | None = worker.workers.broadcast(chosen)
    return shared


def _restore_best(checkpoints: CheckpointStore, progress: Progress, headline: str, workers: Workers) -> None:
    kept = False
    if workers.rank == 0:
        if progress.best is not None:
            best = CheckpointId(progress.best_attempt, progress.best_step)
            kept = checkpoints.mark_best(best, headline, progress.best)
        if not kept:
            checkpoints.forget_best()
    if not workers.broadcast(kept):
        progress.best, progress.best_step, progress.best_attempt = None, -1, 0
