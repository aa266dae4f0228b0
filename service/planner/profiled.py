"""What a profile measured, as input to the estimate of a step. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from service.planner.step_time import MIB, Exchange, Gradient, LayerCost, Link, Step
from trainers.config import Parallel
from trainers.profiling.profile import CompressionCost, ExchangeCost, LayerTime, StepTimes

FP32_BYTES = 4


def step_of(times: StepTimes, parallel: Parallel) -> Step:
    layers = tuple(
        LayerCost(
            layer.name, layer.forward_ms, layer.backward_ms, layer.gradient_bytes, gradients(layer, parallel)
        )
        for layer in times.layers
    )
    return Step(layers, times.rest_ms, times.micro_batches, times.examples)


def gradients(layer: LayerTime, parallel: Parallel) -> tuple[Gradient, ...]:
    """Returns the gradients of a layer's tensors, in the order of the backward pass."""
    elements = sum(math.prod(shape) for shape in layer.shapes)
    if not elements:
        return ()
    size = layer.gradient_bytes // elements
    sent = payload_of(parallel, size)
    return tuple(Gradient(math.prod(shape) * size, sent(shape)) for shape in layer.shapes)


def payload_of(parallel: Parallel, element_bytes: int = FP32_BYTES) -> Callable[[Sequence[int]], float]:
    """Returns bytes sent of a gradient, by its shape."""
    traits = parallel.compression_info
    return lambda shape: traits.payload(shape, element_bytes, parallel)


def link_of(cost: ExchangeCost) -> Link:
    return Link.measured(
        cost.workers, message_ms=cost.message_ms, ms_per_mib=cost.ms_per_mib, taken=cost.taken
    )


def exchange_of(parallel: Parallel, cost: CompressionCost | None) -> Exchange:
    """Returns how a run exchanges gradients; without a measured cost, compression takes no time."""
    traits = parallel.compression_info
    return Exchange(
        bucket_bytes=parallel.bucket_mib * MIB,
        messages=traits.messages,
        pack_ms_per_mib=cost.pack_ms_per_mib if cost else 0.0,
        unpack_ms_per_mib=cost.unpack_ms_per_mib if cost else 0.0,
        waits=traits.waits,
        answers_last=traits.answers_last,
    )


def assumed_compression(parallel: Parallel, *, bandwidth_gb_s: float) -> CompressionCost:
    """Returns the time of compression if it is bound by the worker's memory bandwidth."""
    ms_per_mib = MIB / (bandwidth_gb_s * 1e6)
    pack, unpack = parallel.compression_info.passes
    return CompressionCost(pack * ms_per_mib, unpack * ms_per_mib)
