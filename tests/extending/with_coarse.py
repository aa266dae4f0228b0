"""Registers the gradient compression `coarse`, and trains one of two workers with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from torch import distributed

from trainers.parallel.exchange import GradientExchange
from trainers.parallel_kinds import COMPRESSIONS, CompressionInfo

STEP = 2.0**-16


class CoarseExchange(GradientExchange):
    """Gradients rounded to whole multiples of a step."""

    def start(self, bucket: Any) -> Any:
        bucket.buffer().div_(STEP).round_().mul_(STEP)
        return super().start(bucket)


COARSE = CompressionInfo(
    name="coarse",
    summary="rounded to multiples",
    exchange=CoarseExchange,
    payload=lambda shape, element_bytes, fields: float(math.prod(shape)),
    passes=(2.0, 1.0),
    after_passes=False,
)


def train_rank(rank: int, folder: Path) -> None:
    """Trains this worker's part of the run in `folder / "run.json"`; rank 0 writes its last loss."""
    COMPRESSIONS[COARSE.name] = COARSE
    from trainers.config import RunConfig
    from trainers.entrypoint import train
    from trainers.reporting import NeverStop, NullSink

    config = RunConfig.model_validate_json((folder / "run.json").read_text())
    distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    outcome = train(config, NullSink(), NeverStop())
    if rank == 0:
        (folder / "loss").write_text(repr(outcome.summary["train_loss"]))
    distributed.destroy_process_group()
