"""Building a run's parts in the order that they depend on each other."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from trainers import tasks
from trainers.checkpoints import snapshot, store
from trainers.checkpoints.store import CheckpointStore
from trainers.config import RunConfig
from trainers.data.batches import TrainingBatches
from trainers.errors import BadSpecError
from trainers.evaluation import Evaluator
from trainers.models import origin, student
from trainers.objective import Objective
from trainers.optimizers import build as build_optimizer
from trainers.parallel import replicate, workers_of
from trainers.parallel.workers import Workers
from trainers.precision import arithmetic_for
from trainers.process import seed_all
from trainers.progress import Progress
from trainers.reporting import NullSink, Sink, Stop
from trainers.telemetry.energy import ConsumptionWindow
from trainers.telemetry.facts import environment_facts
from trainers.telemetry.run_figures import RunFigures
from trainers.telemetry.timeline import timeline_for
from trainers.trainer import Parts, Trainer


def assemble(
    config: RunConfig, sink: Sink, stop: Stop, *, began_s: float, consumption: ConsumptionWindow
) -> Trainer:
    """A trainer at the run's newest checkpoint, or at its beginning.

    Args:
        config: the run.
        sink: reported to on rank 0.
        stop: asked at each step boundary.
        began_s: `time.perf_counter()` at the start of the attempt.
        consumption: window that began then.

    Raises:
        TrainingError: whatever the run asks for that cannot be had.
    """
    workers = workers_of(config)
    sink = sink if workers.rank == 0 else NullSink()
    device = _device(config)
    timeline = timeline_for(device, began_s)
    figures = RunFigures(config, consumption, device)
    arithmetic = arithmetic_for(config.precision, device)

    task = tasks.build(config.task.name)
    sink.progress(step=0, total_steps=0, phase="preparing")
    model_origin = origin.locate(config.model.student, config.workspace)
    data = task.prepare(config, model_origin, lambda line: sink.log("info", line))

    model = student.build(
        model_origin,
        head=data.head,
        vocabulary_size=data.vocabulary_size,
        dropout=config.model.dropout,
        max_length=config.task.max_length,
        pad_id=data.pad_id,
        layers=config.model.layers,
    ).to(device)
    arithmetic.prepare(model)
    built = build_optimizer(config.optimizer, model)
    if built.fallback is not None:
        sink.log(
            "warning", f"optimizer.implementation: {built.implementation} runs, because {built.fallback}"
        )
    # A GPU's matrix units want widths of 8; on CPU every column of padding costs time.
    multiple = 8 if device.type == "cuda" else 1
    batches = TrainingBatches(
        data.train,
        seed=config.seed,
        global_size=config.batch.global_size,
        micro_size=config.micro_size,
        rank=workers.rank,
        world=workers.world,
        pad_id=data.pad_id,
        multiple=multiple,
        transform=data.transform,
    )
    evaluator = Evaluator(
        task,
        data,
        batch_size=config.evaluation.batch_size,
        workers=workers,
        device=device,
        arithmetic=arithmetic,
        multiple=multiple,
    )
    checkpoints = CheckpointStore(Path(config.workspace.checkpoints), config.checkpoint.keep)
    found = _newest(checkpoints, workers, sink)
    taken = store.load(found) if found else None
    progress = Progress()
    if taken is not None:
        progress = snapshot.restore(
            taken, model=model, optimizer=built.optimizer, data=data.identity, world=workers.world
        )
        timeline.carry_over(taken.state["spent_s"])
    # Wrapped after the weights are restored, so that replicas begin equal.
    replica = replicate(config, model, workers, device, timeline)
    total_steps = config.length.total_steps(len(data.train), config.batch.global_size)
    sink.started(
        total_steps=total_steps,
        resumed_from_step=progress.step,
        facts={
            **environment_facts(device),
            "data": dict(data.identity),
            "config": json.loads(config.model_dump_json()),
            "optimizer_implementation": built.implementation,
            "optimizer_library": built.library,
            "optimizer_parity": built.parity,
            "precision_implementation": arithmetic.name,
            "strategy": replica.name,
            "attention": student.ATTENTION,
            "workers": workers.world,
            "micro_size": config.micro_size,
            "accumulation": config.accumulation,
            "parameters": model.parameter_count,
            "train_examples": len(data.train),
            "validation_examples": len(data.validation),
            "vocabulary_size": data.vocabulary_size,
        },
    )
    # Last, because building draws random numbers too.
    if taken is not None:
        snapshot.restore_random(taken, rank=workers.rank, device=device)
    else:
        seed_all(config.seed, rank=workers.rank)
    return Trainer(
        Parts(
            config=config,
            task=task,
            objective=Objective(task),
            model=model,
            replica=replica,
            optimizer=built.optimizer,
            arithmetic=arithmetic,
            batches=batches,
            evaluator=evaluator,
            workers=workers,
            device=device,
            checkpoints=checkpoints,
            progress=progress,
            timeline=timeline,
            figures=figures,
            data_identity=data.identity,
            tokenizer=data.tokenizer,
            total_steps=total_steps,
            resumed_from=found,
        ),
        sink,
        stop,
    )


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
