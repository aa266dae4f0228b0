"""What each strategy of `trainers.parallel_kinds.STRATEGIES` makes of a model."""

from trainers.parallel.recorded import RecordedDistributedReplica, RecordedReplica
from trainers.parallel.replica import DistributedReplica, Replica, Setup


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
