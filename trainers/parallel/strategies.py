"""What each strategy of `trainers.parallel_kinds.STRATEGIES` makes of a model."""

from __future__ import annotations

import math

import torch
from torch import nn

from trainers.config import RunConfig
from trainers.parallel.exchange import GradientExchange
from trainers.parallel.recorded import RecordedDistributedReplica, RecordedReplica
from trainers.parallel.replica import DistributedReplica, Replica, Setup


def single(setup: Setup) -> Replica:
    config = setup.config
    if config.model.cuda_graphs and config.trains:
        return RecordedReplica(
            setup.student, setup.module, noise=setup.noise, accumulates=setup.accumulates, **setup.place
        )
    return Replica(setup.student, setup.module, **setup.place)


def ddp(setup: Setup) -> Replica:
    config, student, module = setup.config, setup.student, setup.module
    if config.parallel.workers == 1:
        return single(setup)
    if not config.trains:
        # Whole models that exchange nothing: without buckets for gradients, which no one has.
        return Replica(student, module, **setup.place)
    if config.model.cuda_graphs:
        return RecordedDistributedReplica(
            student,
            module,
            exchange=exchange_for(config, module, setup.optimizer, setup.total_steps),
            noise=setup.noise,
            accumulates=setup.accumulates,
            **setup.place,
        )
    return DistributedReplica(
        student,
        module,
        exchange=exchange_for(config, module, setup.optimizer, setup.total_steps),
        noise=setup.noise,
        bucket_mib=config.parallel.bucket_mib,
        fixed_buckets=config.deterministic and config.parallel.workers > 2,
        # With a teacher the weights of losses, and with them what is used, may change from step to step;
        # with accumulation a step has backward passes that exchange nothing.
        static_graph=config.model.teacher is None and not setup.accumulates,
        **setup.place,
    )


def pipeline(setup: Setup) -> Replica:
    config, student, partition = setup.config, setup.student, setup.partition
    timeout_s = config.parallel.stage_timeout_s
    assert partition is not None
    # Imported here: no other strategy needs these libraries.
    if config.parallel.engine == "deepspeed" and config.trains:
        from trainers.parallel.pipeline.deepspeed_engine import DeepSpeedPipeline

        return DeepSpeedPipeline(student, partition, timeout_s=timeout_s, **setup.place)
    from trainers.parallel.pipeline.torch_engine import TorchPipeline

    return TorchPipeline(
        student,
        partition,
        timeout_s=timeout_s,
        schedule=config.parallel.schedule or "1f1b",
        micro_size=config.micro_size,
        max_length=config.task.max_length,
        **setup.place,
    )


def exchange_for(
    config: RunConfig, module: nn.Module, optimizer: torch.optim.Optimizer, total_steps: int
) -> GradientExchange:
    """Returns the exchange of several data-parallel workers; the warm-up is a share of `total_steps`."""
    warmup_steps = math.ceil(config.parallel.compression_warmup * total_steps)
    exchange: GradientExchange = config.parallel.compression_info.exchange(
        config, module, optimizer, warmup_steps
    )
    return exchange
