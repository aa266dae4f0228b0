from __future__ import annotations

import math

import torch
from torch import nn

import cuda_ext
from trainers.config import Compression, RunConfig
from trainers.parallel.compression.exchange import GradientExchange, HalfExchange
from trainers.parallel.compression.one_bit import OneBitExchange
from trainers.parallel.compression.power_sgd import PowerSgdExchange


def exchange_for(
    config: RunConfig, module: nn.Module, optimizer: torch.optim.Optimizer, total_steps: int
) -> GradientExchange:
    """Returns the gradient exchange of a run with several data-parallel workers.

    Args:
        total_steps: The warm-up is a share of these.
    """
    parallel = config.parallel
    warmup_steps = math.ceil(parallel.compression_warmup * total_steps)
    match parallel.compression:
        case Compression.fp16:
            return HalfExchange(torch.float16)
        case Compression.bf16:
            return HalfExchange(torch.bfloat16)
        case Compression.powersgd:
            return PowerSgdExchange(parallel.powersgd_rank, warmup_steps, config.seed)
        case Compression.onebit:
            assert isinstance(optimizer, cuda_ext.Adan)  # validated with the spec
            return OneBitExchange(optimizer, module, warmup_steps)
        case Compression.none:
            return GradientExchange()
