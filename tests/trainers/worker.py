"""One worker of a test's run, in its own process: trains configurations in turn, writes what came out.

Run by path with the global `JOB`; prints nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from tests.trainers.tape import Tape
from trainers import parallel
from trainers.checkpoints import store
from trainers.config import RunConfig
from trainers.data.batches import TrainingBatches
from trainers.device_kinds import CPU, DEVICE_KINDS
from trainers.device_kinds.backend import Backend
from trainers.entrypoint import classify, train
from trainers.loop import assembly, run_worker, trainer
from trainers.loop.steps import Transfer
from trainers.models.precision import Rounded
from trainers.parallel.replica import DistributedReplica
from trainers.reporting import NullSink, StopReason
from trainers.tasks.classification.task import Imdb


class Script(NullSink):
    """Records the losses; stops or kills itself at a step."""

    def __init__(
        self, stop_after: int | None, kill_at: int | None, kill_once: threading.Event | None
    ) -> None:
        self.stop_after, self.kill_at, self.kill_once = stop_after, kill_at, kill_once
        self.by_name: dict[str, dict[int, float]] = {"loss": {}}
        self.losses = self.by_name["loss"]
        self.all_points: dict[str, dict[int, float]] = {}
        self.calls = -1
        self.resumed_from = 0

    def started(self, *, total_steps: int, resumed_from_step: int, facts: Any) -> None:
        self.resumed_from = resumed_from_step

    def points(self, points: Any) -> None:
        for point in points:
            self.all_points.setdefault(point.name, {})[point.step] = point.value
            if point.name.endswith("loss") and point.name != "validation_loss":
                self.by_name.setdefault(point.name, {})[point.step] = point.value

    def requested(self) -> StopReason | None:
        self.calls += 1
        if self.kill_at is not None and self.calls >= self.kill_at:
            if self.kill_once is not None:
                self.kill_once.wait(60.0)
            os.kill(os.getpid(), signal.SIGKILL)
        late = self.stop_after is not None and self.calls >= self.stop_after
        return StopReason.preempted if late else None


def weights_digest(checkpoint: str | None) -> str | None:
    if checkpoint is None:
        return None
    files = (Path(checkpoint) / f"{name}.safetensors" for name in ("model", "projections", "optimizer"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists())).hexdigest()


def poison_loss(step: int, until: int) -> None:
    """Make this worker's loss NaN from one step to before another."""
    clean, calls = Imdb.loss, iter(range(10**9))

    def loss(self: Imdb, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        return clean(self, logits, batch) * (float("nan") if step <= next(calls) < until else 1.0)

    Imdb.loss = loss  # type: ignore[method-assign]


def hang_write(step: int) -> threading.Event:
    """Let this worker's disk never take the checkpoint of a step; the event is set once it hangs."""
    write, hangs = store.save_file, threading.Event()

    def hanging(tensors: Any, path: Path, **options: Any) -> None:
        write(tensors, path, **options)
        while path.parent.name.startswith(f"step-{step:08d}"):
            hangs.set()
            time.sleep(1.0)

    store.save_file = hanging  # type: ignore[assignment]
    return hangs


def stall(step: int) -> None:
    """Let this worker's data never come, from a step on."""
    prepare = TrainingBatches.__getitem__

    def stalled(self: TrainingBatches, wanted: int) -> Any:
        while wanted >= step:
            time.sleep(1.0)
        return prepare(self, wanted)

    TrainingBatches.__getitem__ = stalled  # type: ignore[method-assign]


def on_tape(*, replays: bool) -> Tape:
    """Let the device kind `taped` record passes, and replicas replay them or not."""
    tape = Tape()
    DEVICE_KINDS["taped"] = replace(CPU, name="taped", host_dropout=False, load=cache(Backend))
    Backend.recorder = lambda self, device: tape  # type: ignore[method-assign]

    if not replays:
        parallel.RecordedDistributedReplica = DistributedReplica  # type: ignore[misc, assignment]
    return tape


def main(job: dict[str, Any]) -> None:
    rank, folder = job["rank"], Path(job["folder"])
    tape = on_tape(replays=job["taped"] == "replayed") if job["taped"] else None
    configs = [RunConfig.model_validate(config) for config in job["configs"]]
    workers = configs[0].parallel.workers
    torch.set_num_threads(1)
    if job["behind_host"]:
        trainer.kind_of = lambda device: SimpleNamespace(behind_host=True)
    if job["emulate_fp16"]:
        run_worker.arithmetic_for = lambda precision, device, numerics: Rounded(torch.float16)
    if workers > 1:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=workers,
            timeout=timedelta(seconds=60),
        )
    runs = []
    reads = [0]
    read = Transfer.read

    def counted(self: Transfer) -> list[float]:
        reads[0] += 1
        return read(self)

    Transfer.read = counted  # type: ignore[method-assign]
    for config in configs:
        reads[0] = 0
        # Any one worker's word stops all: the last one's here.
        mine = rank == workers - 1
        if job["poison_step"] is not None:
            assembly.micro_batch.warm_up_once = lambda *_: None  # so that a call of the loss is a step's
        if mine and job["poison_step"] is not None:
            poison_loss(job["poison_step"], job["poison_until"])
        hangs = None if job["hang_write_at"] is None else hang_write(job["hang_write_at"])
        if mine and job["stall_at"] is not None:
            stall(job["stall_at"])
        script = Script(job["stop_after"] if mine else None, job["kill_at"] if mine else None, hangs)
        try:
            outcome = train(config, script, script)
        except Exception as error:
            failure, message = classify(error)
            runs.append({"failure": failure.value, "message": message, "losses": script.losses})
            continue
        runs.append(
            {
                "status": outcome.status,
                "step": outcome.step,
                "summary": dict(outcome.summary),
                "losses": script.losses,
                "reads": reads[0],
                "replayed": tape.replayed if tape else 0,
                "losses_by_name": script.by_name,
                "points": script.all_points,
                "resumed_from": script.resumed_from,
                "weights": weights_digest(outcome.checkpoint),
            }
        )
    (folder / f"{rank}.json").write_text(json.dumps({"runs": runs}))
    if any("failure" in run for run in runs) and configs[0].parallel.stage_count > 1:
        os._exit(1)  # a stage is gone: nobody comes to a barrier
    if workers > 1:
        distributed.barrier()
        distributed.destroy_process_group()


main(JOB)  # type: ignore[name-defined]  # noqa: F821
