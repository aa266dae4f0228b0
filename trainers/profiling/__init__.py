"""What a run's steps cost, measured on this machine for forecasts; here as figures, without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerTime:
    """A part of the model: embeddings, an encoder layer, or the head. Times are of one micro-batch."""

    name: str
    forward_ms: float
    backward_ms: float
    gradient_bytes: int  # Bytes of gradients exchanged between workers
    shapes: tuple[tuple[int, ...], ...] = ()  # Of trained tensors, in the order of the backward pass


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step of one worker that exchanges nothing; layers are in the order of the forward pass."""

    layers: tuple[LayerTime, ...]
    step_ms: float
    micro_batches: int
    examples: int

    @property
    def rest_ms(self) -> float:
        """Time of a step besides its layers: data, loss, optimizer, points."""
        layers = sum(layer.forward_ms + layer.backward_ms for layer in self.layers)
        return max(0.0, self.step_ms - self.micro_batches * layers)


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """An all-reduce between workers, as a line through measured ones.

    `taken` is the share of its time that a worker computing meanwhile loses: CPU time, where no core is idle.
    """

    workers: int
    message_ms: float  # Fixed time per message
    ms_per_mib: float
    taken: float


@dataclass(frozen=True, slots=True)
class CompressionCost:
    """Time for compressing gradients besides their exchange; the backward pass waits for packing."""

    pack_ms_per_mib: float
    unpack_ms_per_mib: float


@dataclass(frozen=True, slots=True)
class Profile:
    step: StepTimes  # Step times with `exchange.workers` processes at once, or with one
    exchange: ExchangeCost | None  # None = one process was measured
    measured_ms: float | None  # A step of a data-parallel run of `exchange.workers`; None = none was trained
    compression: CompressionCost | None = None  # None = uncompressed, or one process was measured
