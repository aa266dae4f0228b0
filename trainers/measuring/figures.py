"""What measuring a step gives, as plain figures. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerTime:
    """A part of the model: embeddings, an encoder layer, or the head.

    Attributes:
        name: for people.
        forward_ms, backward_ms: of one micro-batch.
        gradient_bytes: that workers exchange.
    """

    name: str
    forward_ms: float
    backward_ms: float
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step of one worker that exchanges nothing.

    Attributes:
        layers: in the order of the forward pass.
        step_ms: the whole step.
        micro_batches: of the step.
        examples: of the step.
    """

    layers: tuple[LayerTime, ...]
    step_ms: float
    micro_batches: int
    examples: int

    @property
    def rest_ms(self) -> float:
        """What a step takes beside its layers: data, loss, optimizer, points."""
        layers = sum(layer.forward_ms + layer.backward_ms for layer in self.layers)
        return max(0.0, self.step_ms - self.micro_batches * layers)


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """An all-reduce between workers, as a line through measured ones.

    Attributes:
        workers: that took part.
        message_ms: of each, whatever its size.
        ms_per_mib: of its size.
        taken: share of its time that it takes from a worker that computes meanwhile, 0 to 1: the CPU
            time that it needs, where no core is idle.
    """

    workers: int
    message_ms: float
    ms_per_mib: float
    taken: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured for an estimate.

    Attributes:
        step: of each of `exchange.workers` processes at once, or of one.
        exchange: None = one process was measured.
        measured_ms: a step of a data-parallel run of `exchange.workers`; None = none was trained.
    """

    step: StepTimes
    exchange: ExchangeCost | None
    measured_ms: float | None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's arithmetic and size depend on.

    Attributes:
        layers, hidden, feed_forward, vocabulary, positions: of its configuration.
    """

    layers: int
    hidden: int
    feed_forward: int
    vocabulary: int
    positions: int
