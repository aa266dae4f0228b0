"""Where a run's time goes: every moment belongs to exactly one phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Phase(StrEnum):
    """The parts of `total_time_s`."""

    startup = "startup"
    """From the call to the first step: imports, data, model, restoring a checkpoint."""
    data_wait = "data_wait"
    """Waiting for a batch that is not ready, and moving it to the device."""
    forward = "forward"
    """Forward pass and loss."""
    backward = "backward"
    """Backward pass; gradient exchange that it hides is not counted twice."""
    optimizer = "optimizer"
    """Gradient norm, clipping, update, clearing gradients."""
    communication = "communication"
    """Waiting for other workers, and handing points to the sink."""
    bubble = "bubble"
    """A stage of a pipeline waiting for its neighbours until the last pass is done on all of them, and
    passing hidden states and gradients on."""
    checkpoint = "checkpoint"
    """Writing checkpoints."""
    validation = "validation"
    """Evaluating."""
    profiling = "profiling"
    """Steps of the profiled window, whole, and reading the profile: kept out of all rates."""
    lost_since_checkpoint = "lost_since_checkpoint"
    """What earlier attempts did after the checkpoint that was resumed from; never entered."""


TRAINING = (
    Phase.data_wait,
    Phase.forward,
    Phase.backward,
    Phase.bubble,
    Phase.optimizer,
    Phase.communication,
)
"""Phases of a step; throughput is counted over these."""


Listener = Callable[[Phase, float], None]
"""Told each phase that begins, and when by `time.perf_counter()`."""


def _unheard(phase: Phase, at_s: float) -> None:
    """Nobody listens."""


class Timeline:
    """A clock that is always in one phase, so that the parts sum to the whole.

    Args:
        began_s: `time.perf_counter()` at which the phase `startup` began.
    """

    def __init__(self, began_s: float) -> None:
        self._spent = dict.fromkeys(Phase, 0.0)
        self._phase = Phase.startup
        self._since_s = began_s
        self.profiling = False
        """Phases of a step count as `profiling` while this is set."""
        self.entered = (Phase.startup, began_s)
        """The phase that the host is in, and since when by `time.perf_counter()`."""
        self._listener: Listener = _unheard

    def enter(self, phase: Phase) -> None:
        """End the current phase now and begin another."""
        self.entered = (phase, time.perf_counter())
        if self.profiling and phase in TRAINING:
            phase = Phase.profiling
        self._listener(phase, self._begin(phase))

    def heard_by(self, listener: Listener | None) -> None:
        """Tell each phase from now on to a listener; None = to nobody."""
        self._listener = listener or _unheard

    def _begin(self, phase: Phase) -> float:
        """`enter` without telling it; returns when."""
        now = time.perf_counter()
        self._spent[self._phase] += now - self._since_s
        self._phase, self._since_s = phase, now
        return now

    def settle(self) -> None:
        """The device has finished all work of the step; nothing to do where the host computes."""

    def carry_over(self, spent_s: Mapping[str, float]) -> None:
        """Add what earlier attempts spent up to the checkpoint that this one resumes from."""
        for phase, seconds in spent_s.items():
            self._spent[Phase(phase)] += seconds

    def spent_s(self) -> dict[str, float]:
        """Seconds by phase until now, over all attempts that led here."""
        self._begin(self._phase)
        return {phase.value: seconds for phase, seconds in self._spent.items()}


class CudaTimeline(Timeline):
    """A timeline for a device that runs behind the host.

    Phases are marked on the device's stream; `settle`, called where the host waits for the
    device anyway, shares the step's time on the host out by the time between the marks.
    """

    def __init__(self, began_s: float) -> None:
        super().__init__(began_s)
        self._marks: list[tuple[Phase, torch.cuda.Event]] = []
        self._window_s: float | None = None

    def enter(self, phase: Phase) -> None:
        """See `Timeline.enter`; phases of a step are settled later."""
        self.entered = (phase, time.perf_counter())
        if phase in TRAINING and not self.profiling:
            if self._window_s is None:
                self._window_s = self._begin(phase)
            event = device_mark()
            self._marks.append((phase, event))
            return
        self.settle()
        super().enter(phase)

    def spent_s(self) -> dict[str, float]:
        """See `Timeline.spent_s`; waits for the device in the middle of a step."""
        self.settle()
        return super().spent_s()

    def settle(self) -> None:
        """Share out the time since the last settling; waits for the device."""
        if self._window_s is None:
            return
        end = device_mark()
        end.synchronize()
        now = time.perf_counter()
        host_s = now - self._window_s
        stamps = [event for _, event in self._marks] + [end]
        parts = [first.elapsed_time(second) for first, second in pairwise(stamps)]
        whole = sum(parts) or 1.0
        at_s = self._window_s
        for (phase, _), part in zip(self._marks, parts, strict=True):
            self._listener(phase, at_s)
            self._spent[phase] += host_s * part / whole
            at_s += host_s * part / whole
        self._phase, self._since_s = self._marks[-1][0], now
        self._marks.clear()
        self._window_s = None


def device_mark() -> torch.cuda.Event:
    """A time on the device's current stream."""
    import torch

    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def timeline_for(device: torch.device, began_s: float) -> Timeline:
    """The timeline that measures truly on a device."""
    return CudaTimeline(began_s) if device.type == "cuda" else Timeline(began_s)
