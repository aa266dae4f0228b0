"""Learning rates after the warm-up. Imports no torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainers.registry import Deferred, by_name

Options = Mapping[str, Any]  # Values of the fields in `ScheduleInfo.options`


@dataclass(frozen=True, slots=True)
class Position:
    """A step after the warm-up, of a run or a stage."""

    step: int  # 0-based, counted from the end of the warm-up
    steps: int  # Steps after the warm-up
    total_steps: int  # Steps with the warm-up
    steps_per_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInfo:
    name: str
    summary: str
    rate: Callable[[float, Position, Options], float]  # Learning rate, of the peak and the step
    options: tuple[str, ...] = ()  # Fields of the section `optimizer` that only schedules listing them have
    # Builds what has a factor of the rate, `trainers.update.RateFactor`; None = nothing has.
    state: Callable[[Options], Any] | None = None


def _constant(peak: float, at: Position, options: Options) -> float:
    return peak


def _polynomial(peak: float, at: Position, options: Options) -> float:
    share: float = (1.0 - at.step / at.steps) ** options["schedule_power"]
    return _above_floor(peak, share, options)


def _step(peak: float, at: Position, options: Options) -> float:
    every = max(1, round(options["schedule_step_epochs"] * at.steps_per_epoch))
    share: float = options["schedule_factor"] ** (at.step // every)
    return peak * share


def _warmup_stable_decay(peak: float, at: Position, options: Options) -> float:
    decay = min(at.steps, math.ceil(options["schedule_decay_fraction"] * at.total_steps))
    left = at.steps - at.step
    return peak if left >= decay else _above_floor(peak, left / decay, options)


def _above_floor(peak: float, share: float, options: Options) -> float:
    floor: float = options["schedule_floor"]
    return peak * (floor + (1.0 - floor) * share)


LINEAR = ScheduleInfo(
    name="linear",
    summary="linear decay to 0",
    rate=lambda peak, at, options: peak * (at.steps - at.step) / at.steps,
)
SCHEDULES: dict[str, ScheduleInfo] = by_name(  # All values of `optimizer.schedule`
    LINEAR,
    ScheduleInfo(name="constant", summary="the peak", rate=_constant),
    ScheduleInfo(
        name="cosine",
        summary="half a cosine, as torch's CosineAnnealingLR",
        rate=lambda peak, at, options: _above_floor(
            peak, 0.5 * (1.0 + math.cos(math.pi * at.step / at.steps)), options
        ),
        options=("schedule_floor",),
    ),
    ScheduleInfo(
        name="polynomial",
        summary="a power of the steps left, as torch's PolynomialLR",
        rate=_polynomial,
        options=("schedule_power", "schedule_floor"),
    ),
    ScheduleInfo(
        name="step",
        summary="a factor each time some epochs have passed since the warm-up, as torch's StepLR",
        rate=_step,
        options=("schedule_step_epochs", "schedule_factor"),
    ),
    ScheduleInfo(
        name="warmup_stable_decay",
        summary="the peak, then linear decay over the last steps (arXiv 2404.06395)",
        rate=_warmup_stable_decay,
        options=("schedule_decay_fraction", "schedule_floor"),
    ),
    ScheduleInfo(
        name="plateau",
        summary="a factor each time the validation loss stops falling, by torch's ReduceLROnPlateau",
        rate=_constant,
        options=("schedule_factor", "schedule_patience", "schedule_floor"),
        state=Deferred("trainers.update:Plateau"),
    ),
)
