"""How a step is spread over workers: who they are, and what each strategy makes of a model."""

import torch

from trainers.config import RunConfig
from trainers.errors import BadSpecError
from trainers.models.precision import Arithmetic
from trainers.models.student import Student
from trainers.parallel.pipeline.layers import StagePartition, measure
from trainers.parallel.recorded import RecordedDistributedReplica, RecordedReplica
from trainers.parallel.replica import DistributedReplica, Replica, Setup
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


def single(setup: Setup) -> Replica:
    records = setup.config.model.cuda_graphs and setup.config.trains
    return RecordedReplica(setup) if records else Replica(setup)


def ddp(setup: Setup) -> Replica:
    if setup.config.parallel.workers == 1 or not setup.config.trains:
        # Whole models that exchange nothing: without buckets for gradients, which no one has.
        return single(setup)
    if setup.config.model.cuda_graphs:
        return RecordedDistributedReplica(setup)
    return DistributedReplica(setup)


def pipeline(setup: Setup) -> Replica:
    # Imported here: no other strategy needs these libraries.
    if setup.config.parallel.engine == "deepspeed" and setup.config.trains:
        from trainers.parallel.pipeline.deepspeed_engine import DeepSpeedPipeline

        return DeepSpeedPipeline(setup)
    from trainers.parallel.pipeline.torch_engine import TorchPipeline

    return TorchPipeline(setup)
