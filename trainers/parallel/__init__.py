"""How a step is spread over workers: who they are, and what wraps the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainers.config import RunConfig, Strategy
from trainers.errors import BadSpecError
from trainers.models.precision import Arithmetic
from trainers.models.student import Student
from trainers.parallel.compression import exchange_for
from trainers.parallel.pipeline.layers import StagePartition
from trainers.parallel.pipeline.timing import measure
from trainers.parallel.recorded import RecordedDistributedReplica, RecordedReplica
from trainers.parallel.replica import DistributedReplica, Replica
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
    if partition is not None:
        # Imported here: no other strategy needs these libraries.
        if config.parallel.engine == "deepspeed" and config.trains:
            from trainers.parallel.pipeline.deepspeed_engine import DeepSpeedPipeline

            return DeepSpeedPipeline(student, partition, timeout_s=config.parallel.stage_timeout_s, **place)
        from trainers.parallel.pipeline.torch_engine import TorchPipeline

        return TorchPipeline(
            student,
            partition,
            timeout_s=config.parallel.stage_timeout_s,
            schedule=config.parallel.schedule or "1f1b",
            micro_size=config.micro_size,
            max_length=config.task.max_length,
            **place,
        )
    distributed = config.parallel.strategy is Strategy.ddp and config.parallel.workers > 1
    accumulates = config.accumulation > 1 or config.batch.micro_tokens is not None
    if config.model.cuda_graphs and config.trains:
        recorded = {"noise": noise, "accumulates": accumulates, **place}
        if not distributed:
            return RecordedReplica(student, module, **recorded)
        exchange = exchange_for(config, module, optimizer, total_steps)
        return RecordedDistributedReplica(student, module, exchange=exchange, **recorded)
    if distributed and config.trains:
        return DistributedReplica(
            student,
            module,
            exchange=exchange_for(config, module, optimizer, total_steps),
            noise=noise,
            bucket_mib=config.parallel.bucket_mib,
            fixed_buckets=config.deterministic and config.parallel.workers > 2,
            # With a teacher the weights of losses, and with them what is used, may change from step to step;
            # with accumulation a step has backward passes that exchange nothing.
            static_graph=config.model.teacher is None and not accumulates,
            **place,
        )
    replica = Replica(student, module, **place)
    if not config.trains:
        # Whole models that exchange nothing: without buckets for gradients, which no one has.
        replica.name = config.parallel.strategy.value
    return replica
