"""Training without arithmetic: a step takes milliseconds and reports one point; checkpoints are real."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from pathlib import Path

from tests.faults.campaign.group_stand_in import exchange
from tests.faults.campaign.values import DIVERGING_SEED, SLOW_SEED, WRITER, value_of
from trainers.checkpoints.manifest import CheckpointId
from trainers.checkpoints.store import CheckpointStore, Snapshot
from trainers.config import RunConfig
from trainers.reporting import Fence, Point, RunHistory, Sink, Stop, StopReason, TrainingOutcome

STEP_S = 0.012
SLOW_STEP_S = 0.08
_FALLS_FOR = 12
_calls = itertools.count(1)


def make_ready(device: str) -> Mapping[str, float]:
    """A worker has nothing to import."""
    return {}


def train(
    config: RunConfig,
    sink: Sink,
    stop: Stop,
    *,
    history: RunHistory | None = None,
    fence: Fence | None = None,
) -> TrainingOutcome:
    """Count from the newest checkpoint to the run's length, or until stopped; other ranks follow rank 0."""
    if exchange.rank:
        return _follow()
    total, every = config.length.steps, config.checkpoint.every_steps
    assert total is not None
    assert every is not None
    writer = os.getpid() * 1000 + next(_calls)
    checkpoints = CheckpointStore(Path(config.workspace.checkpoints), config.checkpoint.keep, fence)
    path = checkpoints.newest(lambda problem: sink.log("warning", problem))
    step = 0 if path is None else CheckpointId.of(path).step

    def save() -> Path:
        sink.progress(step=step, total_steps=total, phase="saving")
        saved = checkpoints.save(step, Snapshot({}, {"step": step}), lambda folder: None)
        sink.checkpoint(step=step, path=str(saved), verified=True)
        return saved

    sink.started(total_steps=total, resumed_from_step=step, facts={"writer": writer})
    reason: StopReason | None = None
    while step < total and (reason := stop.requested()) is None:
        time.sleep(SLOW_STEP_S if config.seed == SLOW_SEED else STEP_S)
        exchange.tell(None)
        step += 1
        diverged = config.seed >= DIVERGING_SEED and step > _FALLS_FOR
        sink.points(
            [Point("loss", step, 100.0 if diverged else 1.0), Point(WRITER, step, value_of(writer, step))]
        )
        sink.progress(step=step, total_steps=total, phase="training")
        if step % every == 0 or step == total:
            path = save()
    if reason is not None and step % every and step:
        path = save()
    outcome = TrainingOutcome(
        "completed" if step >= total else "stopped",
        None if step >= total else reason,
        step,
        total,
        {"accuracy": 0.5, "total_time_s": 1.0, "train_time_s": 1.0},
        None if path is None else str(path),
    )
    exchange.tell(outcome)
    return outcome


def _follow() -> TrainingOutcome:
    """Take part in each step of rank 0, until it says how the training ended."""
    while (outcome := exchange.hear()) is None:
        pass
    assert isinstance(outcome, TrainingOutcome)
    return outcome
