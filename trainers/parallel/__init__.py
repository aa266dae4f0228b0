"""How a step is spread over workers: who they are, and what wraps the model."""

from __future__ import annotations

import torch
from torch import nn

from trainers.config import RunConfig, Strategy
from trainers.errors import BadSpecError
from trainers.models.student import Student
from trainers.parallel.replica import DistributedReplica, Replica
from trainers.parallel.workers import GroupWorkers, Workers
from trainers.precision import Arithmetic
from trainers.telemetry.timeline import Timeline


def workers_of(config: RunConfig) -> Workers:
    """This process' place among the run's workers.

    Raises:
        BadSpecError: the process group is missing or of another size than the run asks for.
    """
    wanted = config.parallel.workers
    if wanted == 1:
        return Workers()
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    size = torch.distributed.get_world_size() if ready else 1
    if size != wanted:
        raise BadSpecError(
            f"parallel.workers is {wanted}, but the process group has {size}; "
            "start as many workers as the run has"
        )
    return GroupWorkers(config.parallel.stage_count)


def replicate(
    config: RunConfig,
    student: Student,
    module: nn.Module,
    *,
    workers: Workers,
    device: torch.device,
    arithmetic: Arithmetic,
    timeline: Timeline,
) -> Replica:
    """Apply the strategy's wrappers to the model, which is on its device already.

    Args:
        config: the run.
        student: the model.
        module: that is trained: the student, or more around it.
        workers, device, arithmetic, timeline: see `Replica`.
    """
    if config.parallel.strategy is Strategy.ddp and workers.world > 1:
        return DistributedReplica(
            student,
            module,
            workers=workers,
            device=device,
            arithmetic=arithmetic,
            timeline=timeline,
            fixed_buckets=config.deterministic and workers.world > 2,
        )
    return Replica(student, module, workers=workers, device=device, arithmetic=arithmetic, timeline=timeline)
