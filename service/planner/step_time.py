"""The step of a data-parallel run, estimated for any number of workers. Pure.

A step is the forward passes of its micro-batches, the backward passes, and the rest (data, loss,
optimizer, points). The gradients are exchanged in the last backward pass, in buckets as DDP makes
them, beside the layers that are still to come: `service.planner.backpropagation` overlaps the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from service.planner.backpropagation import Layer, into_buckets, predict, ring_all_reduce_ms

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""Capacity of DDP's first bucket and of the others."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A part of the model, for one micro-batch.

    Attributes:
        name: for people.
        forward_ms, backward_ms: its computation.
        gradient_bytes: that are exchanged.
    """

    name: str
    forward_ms: float
    backward_ms: float
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step of one worker that exchanges nothing.

    Attributes:
        layers: in the order of the forward pass, for one micro-batch.
        rest_ms: what the step takes beside its layers, whatever the number of examples.
        micro_batches: of the step.
        examples: of the step.
    """

    layers: tuple[LayerCost, ...]
    rest_ms: float
    micro_batches: int
    examples: float

    def of(self, examples: float, micro_batches: int) -> Step:
        """The step with other examples: a layer's time is proportional to those of its micro-batch."""
        factor = (examples / micro_batches) / (self.examples / self.micro_batches)
        layers = tuple(
            replace(layer, forward_ms=layer.forward_ms * factor, backward_ms=layer.backward_ms * factor)
            for layer in self.layers
        )
        return Step(layers, self.rest_ms, micro_batches, examples)


@dataclass(frozen=True, slots=True)
class Link:
    """What an all-reduce goes through.

    Attributes:
        bandwidth_gb_s: of one worker.
        latency_ms: of one turn of the ring.
        taken: share of an exchange's time that it takes from a worker that computes meanwhile: the
            processor time that it needs, where no core is idle; 0 = exchanges cost computation nothing.
    """

    bandwidth_gb_s: float
    latency_ms: float = 0.0
    taken: float = 0.0

    @classmethod
    def measured(cls, workers: int, *, message_ms: float, ms_per_mib: float, taken: float) -> Link:
        """The link on which exchanges between so many workers take what was measured.

        Args:
            workers: that took part; at least 2.
            message_ms: of an exchange, whatever its size.
            ms_per_mib: of its size.
            taken: see `Link`.
        """
        turns = 2 * (workers - 1)
        return cls(turns / workers * _MIB / 1e6 / ms_per_mib, message_ms / turns, taken)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step on a number of workers.

    Attributes:
        workers: data-parallel.
        step_ms: the whole step.
        compute_ms: layers and rest.
        communication_ms: all exchanges of gradients.
        exposed_ms: what of it, and of the computation that it delays, lengthens the step.
        speed_up: of one worker's step with the same global batch by this one.
    """

    workers: int
    step_ms: float
    compute_ms: float
    communication_ms: float
    exposed_ms: float
    speed_up: float


def estimate(step: Step, link: Link, workers: int, *, global_size: int, micro_batches: int = 1) -> Estimate:
    """The step of a data-parallel run.

    Args:
        step: measured or assumed, of one worker with any number of examples.
        link: between the workers.
        workers: that divide the global batch.
        global_size: examples of all of them.
        micro_batches: of each worker's share.

    Raises:
        ValueError: fewer than one worker.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; give at least 1")
    # Not rounded: 8 workers of a batch of 12 are estimated as 8 shares of 1.5.
    mine = step.of(global_size / workers, micro_batches)
    forward = sum(layer.forward_ms for layer in mine.layers)
    backward = sum(layer.backward_ms for layer in mine.layers)
    compute_ms = mine.micro_batches * (forward + backward) + mine.rest_ms
    communication_ms = exposed_ms = 0.0
    if workers > 1:
        layers = [
            Layer(layer.name, layer.backward_ms, gradient_bytes=layer.gradient_bytes)
            for layer in reversed(mine.layers)
        ]
        buckets = _exchanged(into_buckets(layers, FIRST_BUCKET_BYTES, BUCKET_BYTES), link, workers)
        passed = predict(buckets, overhead_ms=0.0)
        communication_ms, exposed_ms = passed.communication_ms, passed.total_ms - backward
    alone = step.of(global_size, micro_batches)
    alone_ms = (
        alone.micro_batches * sum(layer.forward_ms + layer.backward_ms for layer in alone.layers)
        + alone.rest_ms
    )
    step_ms = compute_ms + exposed_ms
    return Estimate(workers, step_ms, compute_ms, communication_ms, exposed_ms, alone_ms / step_ms)


def _exchanged(buckets: Sequence[Layer], link: Link, workers: int) -> list[Layer]:
    """Buckets with their exchanges, each delaying the computation that goes on beside it."""
    found: list[Layer] = []
    before_ms = 0.0
    for bucket in buckets:
        exchange_ms = ring_all_reduce_ms(
            bucket.gradient_bytes, workers, bandwidth_gb_s=link.bandwidth_gb_s, latency_ms=link.latency_ms
        )
        compute_ms = bucket.compute_ms + link.taken * before_ms
        found.append(replace(bucket, compute_ms=compute_ms, communication_ms=exchange_ms))
        before_ms = exchange_ms
    return found


@dataclass(frozen=True, slots=True)
class Rates:
    """What a worker's device is assumed to achieve.

    Attributes:
        tflops: in matrix products.
        bandwidth_gb_s: of its memory.
    """

    tflops: float
    bandwidth_gb_s: float


ADAMW_PASSES = 7
"""Times that the optimizer moves the parameters' bytes: reads p, g, m and v, writes p, m and v."""


def assumed(
    *, layers: int, hidden: int, feed_forward: int, vocabulary: int, positions: int, tokens: int,
    examples: int, rates: Rates,
) -> Step:  # fmt: skip
    """A step of a BERT that nobody has measured: arithmetic by its rate, bytes by theirs.

    Forward of a layer on S tokens: 2S (4H^2 + 2HF) + 4 S^2 H operations, backward twice that. The
    embeddings look up their rows, and their gradient is dense: it is written and read once. The rest
    is an AdamW step, which moves the parameters' bytes seven times. Data, kernels that are not matrix
    products, and everything else that a step does are not in it: a step takes longer than that.

    Args:
        layers, hidden, feed_forward, vocabulary, positions: of the model.
        tokens: of each example.
        examples: of the step, in one micro-batch.
        rates: what the device achieves.

    Raises:
        ValueError: a rate is not above 0.
    """
    if min(rates.tflops, rates.bandwidth_gb_s) <= 0:
        raise ValueError(
            f"tflops is {rates.tflops} and bandwidth_gb_s {rates.bandwidth_gb_s}; give rates above 0"
        )
    h, s = hidden, tokens
    flops = examples * (2.0 * s * (4 * h * h + 2 * h * feed_forward) + 4.0 * s * s * h)
    layer_ms = flops / (rates.tflops * 1e9)
    layer_bytes = 4 * (4 * (h * h + h) + 2 * h * feed_forward + feed_forward + h + 4 * h)
    table_bytes = 4 * (h * (vocabulary + positions + 2) + 2 * h)
    head_bytes = 4 * (h * h + h + 2 * h + 2)
    moved_ms = 1.0 / (rates.bandwidth_gb_s * 1e6)
    looked_up_ms = 4.0 * examples * s * h * 4 * moved_ms
    head_ms = examples * 2.0 * (h * h + 2 * h) / (rates.tflops * 1e9)
    costs = (
        LayerCost("embeddings", looked_up_ms, looked_up_ms + 2 * table_bytes * moved_ms, table_bytes),
        *(LayerCost(f"layer {n}", layer_ms, 2 * layer_ms, layer_bytes) for n in range(layers)),
        LayerCost("head", head_ms, 2 * head_ms, head_bytes),
    )
    parameters = sum(cost.gradient_bytes for cost in costs)
    return Step(costs, ADAMW_PASSES * parameters * moved_ms, 1, examples)
