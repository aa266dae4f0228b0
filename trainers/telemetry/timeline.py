"""Where a run's time goes: every moment belongs to exactly one phase; and what the backward pass hides."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from trainers.device_kinds import kind_of

if TYPE_CHECKING:
    import torch


class Phase(StrEnum):
    """The parts of a run's time: those of `total_time_s`, and those of `overhead_time_s`."""

    setup = "setup"  # Data, model and optimizer of a run's first attempt
    data_wait = "data_wait"  # Waiting for a batch that is not ready, and moving it to the device
    forward = "forward"  # Forward pass and loss
    backward = "backward"  # Backward pass; gradient exchange that it hides is not counted twice
    optimizer = "optimizer"  # Gradient norm, clipping, update, clearing gradients
    communication = "communication"  # Waiting for other workers, and handing points to the sink
    bubble = "bubble"
    """A stage of a pipeline waiting for its neighbours until the last pass is done on all of them, and
    passing hidden states and gradients on."""
    checkpoint = "checkpoint"  # Writing checkpoints
    validation = "validation"  # Evaluating
    test = "test"  # Scoring the test part, once, after the last step
    profiling = "profiling"
    """Steps of the profiled window, whole, and reading the profile: kept out of all rates."""
    preparation = "preparation"
    """Filling what runs share: caches of tokens, logits and hub files, the search for a micro-batch,
    compiled graphs; and waiting for another process that does so."""
    warm_up = "warm_up"
    """What a process pays the first time: imports, kernels, first allocations, first pass of each shape."""
    restart = "restart"  # Set-up of an attempt that resumes from a checkpoint
    lost_since_checkpoint = "lost_since_checkpoint"
    """Work of earlier attempts after the checkpoint that was resumed from; never entered."""


TRAINING = (
    Phase.data_wait,
    Phase.forward,
    Phase.backward,
    Phase.bubble,
    Phase.optimizer,
    Phase.communication,
)
"""Phases of a step; throughput is counted over these."""

OVERHEAD = (Phase.preparation, Phase.warm_up, Phase.restart, Phase.lost_since_checkpoint)
"""Phases that depend on what ran before, not on the configuration: no figure of a run includes them."""

OWN = tuple(phase for phase in Phase if phase not in OVERHEAD)  # Phases whose sum is `total_time_s`

Listener = Callable[[Phase, float], None]  # Told each phase that begins, and when by `time.perf_counter()`

Boundary = Callable[[Phase, float, float], None]
"""Called where overhead and a run's own time meet: the phase that ends, and the `time.perf_counter()` at
which its side of the boundary began and ended."""


def unheard(*_times: object) -> None: ...


class Timeline:
    """A clock that is always in one phase, so that the parts sum to the whole; first in `warm_up`."""

    def __init__(self, began_s: float) -> None:
        self._spent = dict.fromkeys(Phase, 0.0)
        self._phase = Phase.warm_up
        self._since_s = self._side_since_s = began_s
        self.profiling = False  # Phases of a step count as `profiling` while this is set
        self.entered = (Phase.warm_up, began_s)
        """The phase that the host is in, and since when by `time.perf_counter()`."""
        self.listener: Listener = unheard
        self.boundary: Boundary = unheard

    @property
    def until_s(self) -> float:
        """`time.perf_counter()` up to which the time is shared out."""
        return self._since_s

    def enter(self, phase: Phase) -> None:
        self.entered = (phase, time.perf_counter())
        if self.profiling and phase in TRAINING:
            phase = Phase.profiling
        self.listener(phase, self._begin(phase))

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        around = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(around)

    def resume(self) -> None:
        """Counts the set-up so far as `restart`: the attempt continues a run that has had its own."""
        self._begin(self._phase)
        self._spent[Phase.restart] += self._spent[Phase.setup]
        self._spent[Phase.setup] = 0.0
        self._phase = Phase.restart

    def _begin(self, phase: Phase) -> float:
        now = time.perf_counter()
        ended = self._phase
        self._spent[ended] += now - self._since_s
        self._phase, self._since_s = phase, now
        if phase is not ended and (phase in OVERHEAD or ended in OVERHEAD):
            self.boundary(ended, self._side_since_s, now)
            self._side_since_s = now
        return now

    def settle(self) -> None:
        """Shares out the time until now; waits for the device. Nothing to do where the host computes."""

    def settle_passed(self) -> None:
        """Shares out the time until now over what the device has finished; never waits for it."""

    def carry_over(self, spent_s: Mapping[str, float]) -> None:
        for phase, seconds in spent_s.items():
            self._spent[Phase(phase)] += seconds

    def spent_s(self) -> dict[str, float]:
        """Returns seconds by phase until now, over all attempts that led here."""
        self._begin(self._phase)
        return {phase.value: seconds for phase, seconds in self._spent.items()}

    def settled_s(self) -> dict[str, float]:
        """Returns the same until the device was last waited for: reading it never waits."""
        return self.spent_s()


class DeviceTimeline(Timeline):
    """A timeline for a device that runs behind the host.

    Phases of steps are marked on the device's stream by `mark`, which records an event and returns it.
    `settle` shares the host's time since the last settling out by the time between the marks. A step settles
    right after the transfer that its host waits for anyway: so no kernels are under way, and what is queued
    after it, the update, is settled by the next step or by whoever leaves the steps.
    """

    def __init__(self, began_s: float, mark: Callable[[], Any]) -> None:
        super().__init__(began_s)
        self._mark = mark
        # Of phases since the last settling. The first is that of `_phase`, at the host's `_since_s`.
        self._marks: list[tuple[Phase, Any]] = []

    def enter(self, phase: Phase) -> None:
        if phase in TRAINING and not self.profiling:
            self.entered = (phase, time.perf_counter())
            if not self._marks:
                self.listener(phase, self._begin(phase))
            self._marks.append((phase, self._mark()))
            return
        self.settle()
        self._marks.clear()
        super().enter(phase)

    def spent_s(self) -> dict[str, float]:
        self.settle()
        return super().spent_s()

    def settled_s(self) -> dict[str, float]:
        if not self._marks:
            return super().settled_s()
        return {phase.value: seconds for phase, seconds in self._spent.items()}

    def settle(self) -> None:
        if not self._marks:
            return
        end = self._mark()
        end.synchronize()
        phases = [phase for phase, _ in self._marks]
        self._share([*(event for _, event in self._marks), end], phases)
        self._marks = [(phases[-1], end)]

    def settle_passed(self) -> None:
        passed = [event.query() for _, event in self._marks]
        last = max((number for number, has in enumerate(passed) if has), default=0)
        if not last:
            return
        self._share([event for _, event in self._marks[: last + 1]], [p for p, _ in self._marks[:last]])
        del self._marks[:last]
        self._phase = self._marks[0][0]

    def _share(self, stamps: list[Any], phases: list[Phase]) -> None:
        """Shares the host's time since the last settling out by the device's time between passed events."""
        now = time.perf_counter()
        parts = [first.elapsed_time(second) for first, second in pairwise(stamps)]
        whole = sum(parts)
        if not whole:
            parts[-1] = whole = 1.0
        at_s, host_s = self._since_s, now - self._since_s
        for number, (phase, part) in enumerate(zip(phases, parts, strict=True)):
            if number:  # the first one was told when it began
                self.listener(phase, at_s)
            self._spent[phase] += host_s * part / whole
            at_s += host_s * part / whole
        self._phase, self._since_s = phases[-1], now


def timeline_for(device: torch.device, began_s: float) -> Timeline:
    kind = kind_of(device)
    if not kind.behind_host:
        return Timeline(began_s)
    return DeviceTimeline(began_s, partial(kind.backend.moment, device))


@dataclass(frozen=True, slots=True)
class Sent:
    """A worker's exchange of gradients in a step: bytes sent, and time hidden by the backward pass."""

    bytes: float = 0.0
    hidden_s: float = 0.0


class Overlap:
    """The time of a step in which buckets were under way during the backward pass.

    A bucket is under way from the start of its hook to its completion. What overlaps counts once; what
    follows the backward pass is exposed, and the timeline counts it as communication. On a device that runs
    behind the host, moments are events on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        backend = kind_of(device).backend
        self._mark, self._elapsed_s = partial(backend.moment, device), backend.seconds
        self._begins: dict[int, Any] = {}
        self._ends: dict[int, Any] = {}
        self._exposed: Any = None

    def begin(self) -> int:
        number = len(self._begins)
        self._begins[number] = self._mark()
        return number

    def end(self, number: int) -> None:
        """Called by any thread when a bucket is reduced."""
        self._ends[number] = self._mark()

    def expose(self) -> None:
        """Called when the backward pass has nothing left to compute: from now on all waiting is exposed."""
        self._exposed = self._mark()

    def hidden_s(self) -> float:
        """Returns the hidden time; the host has waited for the step, so that all buckets are reduced."""
        if not self._begins or self._exposed is None:
            return 0.0
        at_s = partial(self._elapsed_s, next(iter(self._begins.values())))
        spans = [(at_s(begin), at_s(self._ends.get(number, begin))) for number, begin in self._begins.items()]
        return hidden(spans, at_s(self._exposed))


def hidden(spans: list[tuple[float, float]], until: float) -> float:
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        begin, end = max(begin, reached), min(end, until)
        if end > begin:
            total += end - begin
            reached = end
    return total
