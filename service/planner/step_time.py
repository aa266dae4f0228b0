"""The step of a data-parallel run, estimated for any number of workers. Pure.

A step is the forward passes of its micro-batches, the backward passes, and the rest (data, loss, optimizer,
points). Gradients are exchanged in the last backward pass, in buckets as DDP makes them. With compression, a
bucket is packed before it is sent and unpacked afterwards.

In the last backward pass layers communicate while others compute. A layer's gradients are exchanged once it
has been computed and the previous layer's exchange has ended:

    compute_end[i] = compute_end[i-1] + compute[i]
    exchange_end[i] = max(compute_end[i], exchange_end[i-1]) + communication[i]

The pass ends with the last exchange (the iterative overlap model of the thesis that this project follows,
sections 3.5.2 and 4.5.3, which adds a constant overhead).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainers.config import Parallel
from trainers.profiling import CompressionCost, ExchangeCost, LayerTime, StepTimes
from trainers.telemetry.flops import ModelShape, Tally

MIB = 1 << 20
BUCKET_BYTES = 25 * MIB  # Default of `parallel.bucket_mib`; without a size, DDP's first bucket is smaller
FP32_BYTES = 4

Payload = Callable[[Sequence[int]], float]  # Bytes sent of a gradient, by its shape


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer, or a bucket of layers that is exchanged at once."""

    name: str
    compute_ms: float
    communication_ms: float = 0.0  # Exchange of its gradients; 0 = none
    gradient_bytes: int = 0  # Before compression; only `into_buckets` uses these two
    sent_bytes: float = 0.0  # After it

    def __post_init__(self) -> None:
        for field in ("compute_ms", "communication_ms", "gradient_bytes", "sent_bytes"):
            value = getattr(self, field)
            if not 0 <= value < float("inf"):
                raise ValueError(
                    f"layer {self.name}: {field} {value} is not a finite time or size; give one >= 0"
                )


def pass_ms(layers: Sequence[Layer]) -> float:
    """Overlaps each layer's exchange with the computation of the following ones, from the output layer on."""
    computed = exchanged = 0.0
    for layer in layers:
        computed += layer.compute_ms
        exchanged = max(computed, exchanged) + layer.communication_ms
    return max(computed, exchanged)


def into_buckets(layers: Sequence[Layer], first_bytes: int, bucket_bytes: int) -> list[Layer]:
    """Gathers layers, or their tensors, into buckets as DDP does; `communication_ms` is still 0."""
    buckets: list[Layer] = []
    gathered: list[Layer] = []

    def close() -> None:
        names = dict.fromkeys(layer.name for layer in gathered)
        buckets.append(
            Layer(
                "+".join(names),
                sum(layer.compute_ms for layer in gathered),
                gradient_bytes=sum(layer.gradient_bytes for layer in gathered),
                sent_bytes=sum(layer.sent_bytes for layer in gathered),
            )
        )
        gathered.clear()

    for layer in layers:
        gathered.append(layer)
        if sum(one.gradient_bytes for one in gathered) >= (bucket_bytes if buckets else first_bytes):
            close()
    if gathered:
        close()
    return buckets


def ring_all_reduce_ms(
    size_bytes: float, workers: int, *, bandwidth_gb_s: float, latency_ms: float = 0.0
) -> float:
    """Returns the time of a ring all-reduce: each worker sends 2(N-1)/N of the bytes, in 2(N-1) turns."""
    if workers == 1:
        return 0.0
    sent = 2 * (workers - 1) / workers * size_bytes
    return sent / (bandwidth_gb_s * 1e9) * 1e3 + 2 * (workers - 1) * latency_ms


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a tensor; `sent_bytes`: of an all-reduce that sends as much as its exchange."""

    size_bytes: int
    sent_bytes: float


@dataclass(frozen=True, slots=True)
class LayerCost:
    """A part of the model, for one micro-batch."""

    name: str
    forward_ms: float
    backward_ms: float
    gradients: tuple[Gradient, ...]  # In the order of the backward pass

    @property
    def gradient_bytes(self) -> int:
        return sum(gradient.size_bytes for gradient in self.gradients)

    def tensors(self) -> list[Layer]:
        """Returns its gradients as they become ready: the backward time is divided by their sizes."""
        gradients, whole = self.gradients or (Gradient(0, 0.0),), self.gradient_bytes
        return [
            Layer(
                self.name,
                self.backward_ms * (gradient.size_bytes / whole if whole else 1 / len(gradients)),
                gradient_bytes=gradient.size_bytes,
                sent_bytes=gradient.sent_bytes,
            )
            for gradient in gradients
        ]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of one worker that exchanges nothing."""

    layers: tuple[LayerCost, ...]  # In the order of the forward pass, for one micro-batch
    rest_ms: float  # Time outside the layers, independent of the number of examples
    micro_batches: int
    examples: float

    @property
    def compute_ms(self) -> float:
        of_micro_batch = sum(layer.forward_ms + layer.backward_ms for layer in self.layers)
        return self.micro_batches * of_micro_batch + self.rest_ms

    def of(self, examples: float, micro_batches: int) -> Step:
        """Returns the step with other examples; a layer's time is proportional to its micro-batch."""
        factor = (examples / micro_batches) / (self.examples / self.micro_batches)
        layers = tuple(
            replace(layer, forward_ms=layer.forward_ms * factor, backward_ms=layer.backward_ms * factor)
            for layer in self.layers
        )
        return Step(layers, self.rest_ms, micro_batches, examples)


@dataclass(frozen=True, slots=True)
class Link:
    bandwidth_gb_s: float  # Of one worker
    latency_ms: float = 0.0  # Of one turn of the ring
    taken: float = 0.0
    """Share of an exchange's time that it takes from a worker that computes meanwhile (processor time, where
    no core is idle); 0 = exchanges cost computation nothing."""


@dataclass(frozen=True, slots=True)
class Exchange:
    bucket_bytes: int = BUCKET_BYTES  # Gradients that are sent together
    messages: int = 1  # Collectives of a bucket; each takes the link's latency
    pack_ms_per_mib: float = 0.0  # Compression of a bucket's gradients; the backward pass waits for it
    unpack_ms_per_mib: float = 0.0  # Decompression, after the exchange
    waits: bool = False  # The backward pass waits for each bucket's exchange too
    answers_last: bool = False  # The second half of all exchanges begins after the last bucket's first half


@dataclass(frozen=True, slots=True)
class Estimate:
    workers: int
    step_ms: float
    compute_ms: float  # Layers and rest
    communication_ms: float
    compression_ms: float  # Packing and unpacking
    exposed_ms: float  # Part of these, and of the computation that they delay, that lengthens the step
    sent_bytes: float  # Gradients of a step after compression
    buckets: int
    speed_up: float  # Over one worker's step with the same global batch


def estimate(
    step: Step,
    link: Link,
    workers: int,
    *,
    global_size: int,  # Examples of all workers together
    micro_batches: int = 1,  # Of each worker's share
    exchange: Exchange | None = None,  # None = uncompressed buckets of 25 MiB
) -> Estimate:
    """Returns the step of a data-parallel run, given one of one worker with any number of examples."""
    # Not rounded: 8 workers of a batch of 12 are estimated as 8 shares of 1.5.
    mine = step.of(global_size / workers, micro_batches)
    passed, exposed_ms = _Pass(), 0.0
    if workers > 1:
        exchange = exchange or Exchange()
        tensors = [tensor for layer in reversed(mine.layers) for tensor in layer.tensors()]
        buckets = into_buckets(tensors, exchange.bucket_bytes, exchange.bucket_bytes)
        passed = _exchanged(buckets, exchange, link, workers)
        exposed_ms = passed.total_ms - sum(layer.backward_ms for layer in mine.layers)
    step_ms = mine.compute_ms + exposed_ms
    return Estimate(
        workers,
        step_ms,
        mine.compute_ms,
        passed.communication_ms,
        passed.compression_ms,
        exposed_ms,
        passed.sent_bytes,
        passed.buckets,
        step.of(global_size, micro_batches).compute_ms / step_ms,
    )


@dataclass(frozen=True, slots=True)
class _Pass:
    total_ms: float = 0.0
    communication_ms: float = 0.0
    compression_ms: float = 0.0
    sent_bytes: float = 0.0
    buckets: int = 0


def _exchanged(buckets: Sequence[Layer], exchange: Exchange, link: Link, workers: int) -> _Pass:
    """Returns buckets with their exchanges, each delaying the computation that continues meanwhile."""
    found: list[Layer] = []
    beside_ms = answers_ms = communication_ms = compression_ms = 0.0
    for bucket in buckets:
        sent_ms = ring_all_reduce_ms(
            bucket.sent_bytes,
            workers,
            bandwidth_gb_s=link.bandwidth_gb_s,
            latency_ms=link.latency_ms * exchange.messages,
        )
        size_mib = bucket.gradient_bytes / MIB
        pack_ms, unpack_ms = exchange.pack_ms_per_mib * size_mib, exchange.unpack_ms_per_mib * size_mib
        communication_ms += sent_ms
        compression_ms += pack_ms + unpack_ms
        computed_ms = bucket.compute_ms + pack_ms + beside_ms
        if exchange.waits:
            found.append(replace(bucket, compute_ms=computed_ms + sent_ms + unpack_ms))
            continue
        if exchange.answers_last:
            answers_ms += sent_ms / 2 + unpack_ms
            sent_ms, unpack_ms = sent_ms / 2, 0.0
        found.append(replace(bucket, compute_ms=computed_ms, communication_ms=sent_ms + unpack_ms))
        # Where no core is idle, unpacking takes its whole time from what computes next to it.
        beside_ms = link.taken * sent_ms + (unpack_ms if link.taken else 0.0)
    total_ms = pass_ms(found) + answers_ms
    sent_bytes = sum(bucket.sent_bytes for bucket in buckets)
    return _Pass(total_ms, communication_ms, compression_ms, sent_bytes, len(buckets))


@dataclass(frozen=True, slots=True)
class Rates:
    """What a worker's device is assumed to achieve in matrix products, and the bandwidth of its memory."""

    tflops: float
    bandwidth_gb_s: float


def assumed(
    shape: ModelShape,
    *,
    tokens: int,
    examples: int,
    optimizer_passes: int,
    rates: Rates,
    payload: Payload,
) -> Step:
    """Returns a step of a model that no one has measured: arithmetic and bytes by their rates.

    Matrix products are those of the model's family (`FlopCount`), backward twice the forward pass, the same
    in every layer. Embeddings look up rows, and their gradient is dense: written and read once. The rest is
    an optimizer step, which moves the parameters' bytes `optimizer_passes` times. Data, kernels that are not
    matrix products and all else are left out, so a real step takes longer.
    """
    embeddings, head = _gradients(shape.embeddings, payload), _gradients(shape.head, payload)
    flops, batch = shape.flop_count, Tally.full(examples, tokens)
    layer_ms = flops.encoder(batch) / len(shape.layers) / (rates.tflops * 1e9)
    head_ms = flops.ending(batch) / (rates.tflops * 1e9)
    moved_ms = 1.0 / (rates.bandwidth_gb_s * 1e6)
    looked_up_ms = 4.0 * batch.tokens * flops.hidden * 4 * moved_ms
    written_ms = 2 * sum(gradient.size_bytes for gradient in embeddings) * moved_ms
    costs = (
        LayerCost("embeddings", looked_up_ms, looked_up_ms + written_ms, embeddings),
        *(
            LayerCost(f"layer {number}", layer_ms, 2 * layer_ms, _gradients(layer, payload))
            for number, layer in enumerate(shape.layers)
        ),
        LayerCost("head", head_ms, 2 * head_ms, head),
    )
    parameters = sum(cost.gradient_bytes for cost in costs)
    return Step(costs, optimizer_passes * parameters * moved_ms, 1, examples)


def _gradients(shapes: Sequence[tuple[int, ...]], payload: Payload) -> tuple[Gradient, ...]:
    return tuple(Gradient(FP32_BYTES * math.prod(shape), payload(shape)) for shape in shapes)


def step_of(times: StepTimes, parallel: Parallel) -> Step:
    layers = tuple(
        LayerCost(layer.name, layer.forward_ms, layer.backward_ms, gradients(layer, parallel))
        for layer in times.layers
    )
    return Step(layers, times.rest_ms, times.micro_batches, times.examples)


def gradients(layer: LayerTime, parallel: Parallel) -> tuple[Gradient, ...]:
    """Returns gradients of tensors in the order of the backward pass; one, sent whole, if not known."""
    elements = sum(math.prod(shape) for shape in layer.shapes)
    if not elements:
        return (Gradient(layer.gradient_bytes, layer.gradient_bytes),)
    size = layer.gradient_bytes // elements
    sent = payload_of(parallel, size)
    return tuple(Gradient(math.prod(shape) * size, sent(shape)) for shape in layer.shapes)


def payload_of(parallel: Parallel, element_bytes: int = FP32_BYTES) -> Payload:
    traits = parallel.compression_info
    return lambda shape: traits.payload(shape, element_bytes, parallel)


def link_of(cost: ExchangeCost) -> Link:
    """Returns the link on which exchanges between at least 2 workers take what was measured."""
    turns = 2 * (cost.workers - 1)
    return Link(turns / cost.workers * MIB / 1e6 / cost.ms_per_mib, cost.message_ms / turns, cost.taken)


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
