"""Training without arithmetic: a step takes milliseconds and reports one point.

Each call of `train` has a number of its own in the values that it reports, so that a row tells who wrote it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from trainers.config import RunConfig
from trainers.reporting import Clock, Point, Sink, Stop, StopReason, TrainingOutcome

STEP_S = 0.012
WRITER = "writer"
"""Metric whose value at a step names the call of `train` that reported it."""
DIVERGING_SEED = 1000
"""Runs with this seed or a higher one report a loss that rises, for searches that stop such runs early."""
_FALLS_FOR = 12
_SPAN = 1000
_calls = itertools.count(1)


def value_of(writer: int, step: int) -> float:
    """The value that a call of `train` reports at a step."""
    return float(writer * _SPAN + step)


def writer_of(value: float) -> int:
    """The call of `train` that reported a value."""
    return int(value) // _SPAN


def make_ready(device: str) -> Mapping[str, float]:
    """A worker has nothing to import."""
    return {}


def train(config: RunConfig, sink: Sink, stop: Stop, *, clock: Clock | None = None) -> TrainingOutcome:
    """Count from the newest checkpoint to the run's length, or until stopped."""
    total = config.length.steps
    assert total is not None
    every = config.checkpoint.every_steps
    assert every is not None
    folder = Path(config.workspace.checkpoints)
    began_ns = time.time_ns()
    writer = os.getpid() * _SPAN + next(_calls)
    step = _newest(folder)
    path: Path | None = None
    sink.started(total_steps=total, resumed_from_step=step, facts={"writer": writer})
    reason: StopReason | None = None
    while step < total and (reason := stop.requested()) is None:
        time.sleep(STEP_S)
        step += 1
        diverged = config.seed >= DIVERGING_SEED and step > _FALLS_FOR
        sink.points(
            [Point("loss", step, 100.0 if diverged else 1.0), Point(WRITER, step, value_of(writer, step))]
        )
        sink.progress(step=step, total_steps=total, phase="training")
        if step % every == 0 or step == total:
            path = _save(folder, began_ns, step, total, sink, stop) or path
    if reason is not None and reason is not StopReason.preempted:
        path = _save(folder, began_ns, step, total, sink, stop) or path
    return TrainingOutcome(
        "completed" if step >= total else "stopped",
        None if step >= total else reason,
        step,
        total,
        {"accuracy": 0.5, "total_time_s": 1.0, "train_time_s": 1.0},
        None if path is None else str(path),
    )


def _newest(folder: Path) -> int:
    """The last step of the newest call of `train` that has saved any."""
    if not folder.exists():
        return 0
    saved = [path.stem.split("-") for path in folder.glob("*.json")]
    return max(((int(began), int(step)) for began, step in saved), default=(0, 0))[1]


def _save(folder: Path, began_ns: int, step: int, total: int, sink: Sink, stop: Stop) -> Path | None:
    sink.progress(step=step, total_steps=total, phase="saving")
    if stop.requested() is StopReason.preempted:
        return None  # Another attempt is current.
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{began_ns}-{step}.json"
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"step": step}))
    draft.replace(path)
    sink.checkpoint(step=step, path=str(path), verified=True)
    return path
