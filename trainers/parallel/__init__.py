"""How a step is spread over workers: who they are, and what wraps the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainers.config import RunConfig
from trainers.errors import BadSpecError
from trainers.models.precision import Arithmetic
from trainers.models.student import Student
from trainers.parallel.pipeline.layers import StagePartition, measure
from trainers.parallel.replica import Replica, Setup
from trainers.telemetry.gradient_noise import NoiseSource
from trainers.workers import GroupWorkers, Workers


def workers_of(config: RunConfig) -> Workers:
    """Returns this process's place among the run's workers.

    Raises:
        BadSpecError: The process group is missing or of another size than the run asks for.
    """
    wanted = config.parallel.workers
    if wanted == 1:
        return Workers()
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    size = torch.distributed.get_world_size() if ready else 1
    if size != wanted:
        raise BadSpecError(
            f"parallel.workers is {wanted}, but the process group has {size}; "
            "start as many workers as the run needs"
        )
    return GroupWorkers(config.parallel.stage_count)


def partition_stages(
    config: RunConfig, student: Student, workers: Workers, device: torch.device, arithmetic: Arithmetic
) -> StagePartition | None:
    """Returns this worker's layers, and removes the others from the student; None = it has all.

    Args:
        student: The whole student, on its device.
    """
    if workers.stages == 1:
        return None
    costs = None
    if config.parallel.partition == "time":
        # Clocks differ: rank 0's alone says where the layers are divided.
        seconds = measure(student, config, device, arithmetic) if workers.rank == 0 else None
        costs = workers.broadcast(seconds)
    return StagePartition.of(config.parallel, student, workers.stage, costs)


def replicate(
    config: RunConfig,
    student: Student,
    module: nn.Module,
    partition: StagePartition | None,
    *,
    optimizer: torch.optim.Optimizer,
    noise: NoiseSource,
    total_steps: int,
    **place: Any,
) -> Replica:
    """Applies the strategy's wrappers to the model, which is on its device already.

    Args:
        config: With the resolved micro-batch size.
        module: Module being trained: the student, or a wrapper around it.
        noise: Sees gradients before they are averaged.
        place: Workers, device, arithmetic and timeline, see `Replica`.
    """
    setup = Setup(config, student, module, partition, optimizer, noise, total_steps, place)
    replica: Replica = config.parallel.strategy_info.replicate(setup)
    if not config.trains:
        replica.name = config.parallel.strategy
    return replica
