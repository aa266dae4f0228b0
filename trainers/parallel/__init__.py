"""How a step is spread over workers: who they are, and what wraps the model."""

import torch

from trainers.config import RunConfig
from trainers.errors import BadSpecError
from trainers.models.precision import Arithmetic
from trainers.models.student import Student
from trainers.parallel.pipeline.layers import StagePartition, measure
from trainers.workers import GroupWorkers, Workers


def workers_of(config: RunConfig) -> Workers:
    """Returns this process's place in the run; raises BadSpecError if the group has another size."""
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
    """Returns this worker's layers, and removes the others from the whole student; None = it has all."""
    if workers.stages == 1:
        return None
    costs = None
    if config.parallel.partition == "time":
        # Clocks differ: rank 0's alone says where the layers are divided.
        seconds = measure(student, config, device, arithmetic) if workers.rank == 0 else None
        costs = workers.broadcast(seconds)
    return StagePartition.of(config.parallel, student, workers.stage, costs)
