"""A step of a run, measured on this machine: its layers, its exchange, and a data-parallel run's step."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from trainers.checkpoints.manifest import TRACE
from trainers.config import Parallel, RunConfig, Strategy
from trainers.measuring.figures import ExchangeCost, LayerTime, Profile, StepTimes
from trainers.measuring.layer_times import layer_times
from trainers.measuring.local_group import LocalGroup
from trainers.reporting import NeverStop, NullSink

MIB = 1 << 20
SIZES_MIB = (0.25, 1.0, 4.0, 16.0)
"""Messages that the cost of an exchange is fitted to."""
_REPEATS = 7


def alone(config: RunConfig, examples: int) -> RunConfig:
    """The run as one worker with so many examples per step would train it."""
    micro = config.batch.micro_size
    if isinstance(micro, int) and examples % micro:
        micro = "auto"
    return _changed(
        config,
        parallel=Parallel(),
        batch=config.batch.model_copy(update={"global_size": examples, "micro_size": micro}),
    )


def data_parallel(config: RunConfig, workers: int) -> RunConfig:
    """The run, data-parallel."""
    return _changed(config, parallel=Parallel(strategy=Strategy.ddp, workers=workers))


def _changed(config: RunConfig, **sections: Any) -> RunConfig:
    return RunConfig.model_validate({**dict(config), **sections})


def measure_alone(config: RunConfig, *, steps: int, warm_up: int) -> Profile:
    """Layer times of one worker, with all examples of a step, in this process."""
    return Profile(
        layer_times(alone(config, config.batch.global_size), steps=steps, warm_up=warm_up), None, None
    )


def measure_group(group: LocalGroup, config: RunConfig, *, steps: int, warm_up: int, check: bool) -> Profile:
    """Layer times of workers that compute at once, and the cost of their exchange.

    Args:
        group: the workers; `config.batch.global_size` divides by their number.
        config: the run, whatever its strategy.
        steps: that count.
        warm_up: steps before these.
        check: train a data-parallel run too, and time its steps.
    """
    share = alone(config, config.batch.global_size // group.workers)
    times = mean_step(group.run(layer_times_together, share, steps, warm_up))
    exchange = fit(group.workers, group.run(exchange_times))
    measured_ms = None
    if check:
        run = data_parallel(config, group.workers)
        measured_ms = statistics.median(traced_steps_ms(group, run, steps=steps, warm_up=warm_up))
    return Profile(times, exchange, measured_ms)


def mean_step(workers: list[StepTimes]) -> StepTimes:
    """Workers that compute at once, as one: a step waits for all, so each part takes their mean."""
    layers = tuple(
        LayerTime(
            of[0].name,
            statistics.fmean(layer.forward_ms for layer in of),
            statistics.fmean(layer.backward_ms for layer in of),
            of[0].gradient_bytes,
        )
        for of in zip(*(worker.layers for worker in workers), strict=True)
    )
    step_ms = statistics.fmean(worker.step_ms for worker in workers)
    return StepTimes(layers, step_ms, workers[0].micro_batches, workers[0].examples)


def layer_times_together(config: RunConfig, steps: int, warm_up: int) -> StepTimes:
    """On a worker: `layer_times`, begun by all at once."""
    distributed.barrier()
    return layer_times(config, steps=steps, warm_up=warm_up)


def exchange_times() -> list[tuple[float, float, float]]:
    """(MiB, wall ms, CPU ms of this process) of a gradient bucket's exchange, by size."""
    found = []
    for size_mib in SIZES_MIB:
        bucket = torch.zeros(int(size_mib * MIB) // 4)
        taken = []
        for repeat in range(_REPEATS + 2):
            distributed.barrier()
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            distributed.all_reduce(bucket.mul_(0.5), async_op=True).wait()
            if repeat >= 2:
                taken.append((time.perf_counter() - wall_s, time.process_time() - cpu_s))
        found.append(
            (
                size_mib,
                1e3 * statistics.median(wall for wall, _ in taken),
                1e3 * statistics.median(cpu for _, cpu in taken),
            )
        )
    return found


def fit(workers: int, times: list[list[tuple[float, float, float]]]) -> ExchangeCost:
    """A line through the exchanges of all workers: least squares of the relative error.

    Args:
        workers: that took part.
        times: by worker, what `exchange_times` gives.
    """
    rows = [row for worker in times for row in worker]
    # Weighted by 1 / ms, or the largest message alone would decide.
    a = sum(1 / ms**2 for _, ms, _ in rows)
    b = sum(mib / ms**2 for mib, ms, _ in rows)
    c = sum(mib**2 / ms**2 for mib, ms, _ in rows)
    p, q = sum(1 / ms for _, ms, _ in rows), sum(mib / ms for mib, ms, _ in rows)
    slope = (a * q - b * p) / (a * c - b * b)
    message_ms = max(0.0, (p - b * slope) / a)
    idle = (os.cpu_count() or 1) > workers
    taken = 0.0 if idle else min(1.0, sum(cpu for _, _, cpu in rows) / sum(ms for _, ms, _ in rows))
    return ExchangeCost(workers, message_ms, max(slope, 1e-9), taken)


def traced_steps_ms(group: LocalGroup, config: RunConfig, *, steps: int, warm_up: int) -> list[float]:
    """Milliseconds of each step of a run, as its own trace has them: the first worker's."""
    with tempfile.TemporaryDirectory(prefix="stillhouse-steps-") as folder:
        config = _changed(
            config,
            workspace=config.workspace.model_copy(update={"checkpoints": folder}),
            length=config.length.model_copy(update={"steps": warm_up + steps, "epochs": None}),
            telemetry=config.telemetry.model_copy(update={"trace_steps": steps, "profile_steps": 0}),
            checkpoint=config.checkpoint.model_copy(update={"every_s": 0.0, "every_steps": None}),
        )
        group.run(_train, config)
        events = json.loads((Path(folder) / TRACE).read_text(encoding="utf-8"))["traceEvents"]
    return [event["dur"] / 1e3 for event in events if event.get("cat") == "step" and event["pid"] == 0]


def _train(config: RunConfig) -> None:
    from trainers.entrypoint import train

    train(config, NullSink(), NeverStop())
