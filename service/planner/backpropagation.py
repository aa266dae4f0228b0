"""The backward pass of data-parallel training, where layers communicate while others compute.

A layer's gradients are exchanged once it has been computed and the previous layer's exchange has ended:

    compute_end[i] = compute_end[i-1] + compute[i]
    exchange_end[i] = max(compute_end[i], exchange_end[i-1]) + communication[i]

The pass ends with the last exchange, plus a constant overhead (the iterative overlap model of the thesis that
this project follows, sections 3.5.2 and 4.5.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OVERHEAD_MS = 0.09
"""The one constant that fits both published measurements."""


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


def pass_ms(layers: Sequence[Layer], *, overhead_ms: float = OVERHEAD_MS) -> float:
    """Overlaps each layer's exchange with the computation of the following ones, from the output layer on."""
    if not layers:
        raise ValueError("there are no layers; give at least one")
    computed = exchanged = 0.0
    for layer in layers:
        computed += layer.compute_ms
        exchanged = max(computed, exchanged) + layer.communication_ms
    return max(computed, exchanged) + overhead_ms


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
    if workers < 1:
        raise ValueError(f"workers is {workers}; give at least 1")
    if bandwidth_gb_s <= 0:
        raise ValueError(f"bandwidth_gb_s is {bandwidth_gb_s}; give a bandwidth above 0")
    if workers == 1:
        return 0.0
    sent = 2 * (workers - 1) / workers * size_bytes
    return sent / (bandwidth_gb_s * 1e9) * 1e3 + 2 * (workers - 1) * latency_ms
