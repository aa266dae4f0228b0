"""Statistical efficiency and goodput from the noise of gradients. Pure.

Pollux (Qiao et al., OSDI 2021), in the notation of its code: `sqr` estimates the squared norm of the
true gradient, `var` the variance of a gradient over the base batch. A step's progress grows
with the batch, but less than the batch does; the efficiency is what is left of it.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

import cuda_ext
from trainers.config import RunConfig
from trainers.workers import Workers

DECAY = 0.999  # Of the averages, per base batch seen
LEAST_KEPT = 0.99  # Of the averages, per step: steps of many base batches would otherwise hardly be averaged
EVERY_STEPS = 16
"""Parts are compared in one step of so many: reading all gradients costs a short step of a small model some
percent, and an average over a hundred looks wants them spread over a run rather than close together."""


@dataclass(frozen=True, slots=True)
class GradientMoments:
    sqr: float  # The true gradient's squared norm; a single estimate may be negative
    var: float  # The gradient's variance (summed over elements) at the base batch


def from_squares(
    parts: int, mean_of_squares: float, square_of_mean: float, *, scale: float
) -> GradientMoments:
    """Returns the moments from the gradients of n >= 2 equal parts of a batch: workers or micro-batches.

    sqr = (n |g|^2 - mean_i |g_i|^2) / (n - 1)
    var = (mean_i |g_i|^2 - |g|^2) scale / (n - 1)
    """
    return GradientMoments(
        sqr=(parts * square_of_mean - mean_of_squares) / (parts - 1),
        var=(mean_of_squares - square_of_mean) * scale / (parts - 1),
    )


def from_consecutive(product: float, squared_difference: float, *, scale: float) -> GradientMoments:
    """Of two steps' gradients: sqr ~ g . g', var ~ |g - g'|^2 scale / 2, biased by the change in between."""
    return GradientMoments(sqr=product, var=squared_difference * scale / 2)


@dataclass(slots=True)
class NoiseScale:
    scale: float  # Batch of a step / base batch
    sqr_sum: float = 0.0
    var_sum: float = 0.0
    weight: float = 0.0  # Their total weight so far

    def __post_init__(self) -> None:
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale {self.scale} is not a ratio of batches; give one above 0")

    def add(self, moments: GradientMoments) -> None:
        if not (math.isfinite(moments.sqr) and math.isfinite(moments.var)):
            return
        keep = max(DECAY**self.scale, LEAST_KEPT)
        self.sqr_sum = keep * self.sqr_sum + (1 - keep) * moments.sqr
        self.var_sum = keep * self.var_sum + (1 - keep) * moments.var
        self.weight = keep * self.weight + (1 - keep)

    @property
    def sqr(self) -> float:
        return max(0.0, self.sqr_sum / self.weight) if self.weight else 0.0

    @property
    def var(self) -> float:
        return max(0.0, self.var_sum / self.weight) if self.weight else 0.0

    @property
    def noise_scale(self) -> float:
        """var / sqr, in base batches: the batch at which noise and gradient are equally strong."""
        return self.var / self.sqr if self.sqr else math.inf

    @property
    def efficiency(self) -> float | None:
        return efficiency(self.sqr, self.var, self.scale) if self.weight else None


def gain(sqr: float, var: float, k: float) -> float:
    """Returns the progress of a step with k base batches, relative to one with a single base batch.

    (var + sqr) / (var / k + sqr): 1 without noise, k when noise is all there is.
    """
    if not k > 0:
        raise ValueError(f"k is {k}; give a batch above 0")
    below = var / k + sqr
    return (var + sqr) / below if below > 0 else 1.0


def efficiency(sqr: float, var: float, k: float) -> float:
    """Returns the progress per example relative to the base batch: gain / k, in (0, 1] for k >= 1."""
    return gain(sqr, var, k) / k


def goodput(throughput: float, statistical_efficiency: float) -> float:
    return throughput * statistical_efficiency


@dataclass(frozen=True, slots=True)
class StepNorms:
    """What all workers have agreed on in a step of full size."""

    parts: float  # The sums of `NoiseSource.sum`, added over workers
    norm: float  # Norm of the step's gradient, without the loss scale
    loss_scale: float  # Loss scale of the parts
    divisor: float  # Divisor applied by clipping


class NoiseSource:
    """Where parts of a gradient are seen. The base class sees none."""

    name = "none"
    faithful = True
    """Whether the workers' mean is the step's gradient; after a lossy exchange it is another one."""
    looks = False  # Whether the step's norms are used, by this step or the next; else `moments` returns None

    def begin_step(self, step: int) -> None:
        """Called before the forward pass of a step (0-based)."""

    def see(self, gradients: torch.Tensor) -> None:
        """Takes in some of this worker's gradients before they are averaged; each once in a step."""

    def before_update(self) -> None:
        """Called when `.grad` holds the step's gradient."""

    def sum(self) -> torch.Tensor | None:
        """Returns this worker's sum of the step, on the device; None when there is none."""
        return None

    def moments(self, norms: StepNorms, scale: float) -> GradientMoments | None:
        """Returns the step's estimate of the noise, if any; `scale` is batch / base batch."""
        return None

    def remember(self, norms: StepNorms) -> None:
        """Called when the optimizer took the step; keeps what the next step needs."""

    def forget(self) -> None: ...


class WorkerShares(NoiseSource):
    """The parts are the gradients of data-parallel workers, seen before they are averaged."""

    name = "workers"

    def __init__(self, workers: int, device: torch.device) -> None:
        self._workers = workers
        self._sum = torch.zeros((), device=device)

    def begin_step(self, step: int) -> None:
        self.looks = step % EVERY_STEPS == 0
        self._sum.zero_()

    def see(self, gradients: torch.Tensor) -> None:
        if self.looks:
            self._sum += torch.linalg.vector_norm(gradients, dtype=torch.float32).square()

    def sum(self) -> torch.Tensor | None:
        return self._sum if self.looks else None

    def moments(self, norms: StepNorms, scale: float) -> GradientMoments | None:
        if not (self.looks and self.faithful):
            return None
        mean = norms.parts / self._workers / norms.loss_scale**2
        return from_squares(self._workers, mean, norms.norm**2, scale=scale)


class MicroBatches(NoiseSource):
    """The parts are the gradients of micro-batches, of all replicas, seen on their way into `.grad`."""

    name = "micro-batches"

    def __init__(
        self, parameters: Iterable[nn.Parameter], accumulation: int, replicas: int, device: torch.device
    ) -> None:
        self._accumulation, self._parts = accumulation, accumulation * replicas
        self._sum = torch.zeros((), device=device)
        self._norms: list[torch.Tensor] = []
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(self._see)  # type: ignore[no-untyped-call]

    def begin_step(self, step: int) -> None:
        self.looks = step % EVERY_STEPS == 0
        self._norms.clear()

    def sum(self) -> torch.Tensor | None:
        if not self._norms:
            return None
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack(self._norms)).square()
        self._norms.clear()
        return total

    def moments(self, norms: StepNorms, scale: float) -> GradientMoments | None:
        if not (self.looks and norms.parts):
            return None
        # Each micro-batch adds 1 / accumulation of its mean gradient.
        mean = norms.parts * self._accumulation**2 / self._parts / norms.loss_scale**2
        return from_squares(self._parts, mean, norms.norm**2, scale=scale)

    def _see(self, gradient: torch.Tensor) -> None:
        if self.looks:
            self._norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32))


class StepsInARow(NoiseSource):
    """The parts are the gradients of two steps, of one worker without accumulation.

    Adan holds the gradient of the step before. For other optimizers a copy is kept from the one step to
    the other: in bf16 on a GPU, whose memory is short, and as it is on a CPU, where converting it costs more
    than the rest.
    """

    name = "steps in a row"

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        self._adan = optimizer if isinstance(optimizer, cuda_ext.Adan) else None
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._phase, self.looks = 0, True
        self._copies: list[torch.Tensor | None] = []
        self._product: torch.Tensor | None = None
        self._before: tuple[float, float] | None = None
        """Norm of the gradient before, and what its copy has to be multiplied by to be that gradient."""

    def begin_step(self, step: int) -> None:
        self._phase, self._product = step % EVERY_STEPS, None
        self.looks = self._phase in (0, 1)
        if self._phase != 1:
            self.forget()

    def before_update(self) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        if self._phase == 0 and self._adan is None:
            self._copies = [
                None if g is None else g.to(torch.bfloat16 if g.is_cuda else g.dtype, copy=True)
                for g in gradients
            ]
        elif self._phase == 1 and self._before is not None:
            copies = self._copies
            if self._adan is not None:
                copies = [self._adan.state[p].get("g_prev") for p in self._parameters]
            products = [
                torch.dot(now.float().view(-1), then.float().view(-1))
                for now, then in zip(gradients, copies, strict=True)
                if now is not None and then is not None
            ]
            self._product = torch.stack(products).sum()
            self._copies = []

    def sum(self) -> torch.Tensor | None:
        return self._product

    def moments(self, norms: StepNorms, scale: float) -> GradientMoments | None:
        if self._product is None or self._before is None:
            return None
        norm, factor = self._before
        product = norms.parts / norms.loss_scale * factor
        return from_consecutive(product, norms.norm**2 + norm**2 - 2.0 * product, scale=scale)

    def remember(self, norms: StepNorms) -> None:
        if self._phase == 0:
            # Adan holds what it used, without the loss scale but clipped; a copy still has its loss scale.
            factor = norms.divisor if self._adan is not None else 1.0 / norms.loss_scale
            self._before = norms.norm, factor

    def forget(self) -> None:
        self._copies, self._before = [], None


class GradientNoise:
    def __init__(self, source: NoiseSource, scale: float) -> None:
        self.source = source
        self._scale = scale
        self._averages = NoiseScale(scale)

    def add(self, norms: StepNorms) -> None:
        """Takes in a step that was finite and whole on all workers."""
        moments = self.source.moments(norms, self._scale)
        if moments is not None:
            self._averages.add(moments)
        self.source.remember(norms)

    def figures(self, samples_per_s: float | None) -> dict[str, float]:
        efficiency = self._averages.efficiency
        if efficiency is None:
            return {}
        figures = {"statistical_efficiency": efficiency}
        if math.isfinite(self._averages.noise_scale):
            figures["noise_scale"] = self._averages.noise_scale
        if samples_per_s is not None:
            figures["goodput"] = goodput(samples_per_s, efficiency)
        return figures

    def to_state(self) -> dict[str, float]:
        """Returns the JSON-able state, after which the next step is compared with none before it.

        Gradients are not part of a checkpoint: so the run that continues forgets its own as well, and
        has the figures that a resumed one has.
        """
        self.source.forget()
        averages = self._averages
        return {"sqr_sum": averages.sqr_sum, "var_sum": averages.var_sum, "weight": averages.weight}

    def restore(self, state: Mapping[str, float]) -> None:
        self.source.forget()
        self._averages = NoiseScale(self._scale, **state)


def source_for(
    config: RunConfig,
    workers: Workers,
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    device: torch.device,
) -> NoiseSource:
    # Micro-batches of a number of tokens are no equal parts of a step.
    accumulation = config.accumulation if config.batch.micro_tokens is None else 1
    if config.telemetry.gradient_noise and config.trains:
        if workers.replicas > 1 and workers.stages == 1:
            return WorkerShares(workers.replicas, device)
        if accumulation > 1:
            return MicroBatches(module.parameters(), accumulation, workers.replicas, device)
        if workers.world == 1:
            return StepsInARow(optimizer, module.parameters())
    return NoiseSource()
