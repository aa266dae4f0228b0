"""Where a step goes, as a timeline: the phases of a window of steps, of every worker.

A run's own steps are traced as they are: the spans between the phases of the worker's `Timeline` are kept.
At the end of the window they are gathered into one file in Chrome's trace-event format, which Perfetto and
chrome://tracing open: a process row per worker, a slice per step, the phases inside it.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from trainers.checkpoints.manifest import TRACE, kernel_trace
from trainers.data.storage import Place, put
from trainers.reporting import Measurement, Provenance
from trainers.telemetry.profiling import WARM_STEPS
from trainers.telemetry.timeline import Phase, Timeline, unheard
from trainers.workers import Workers

_CLOCK_ROUNDS = 9  # Exchanges by which clocks are compared; the bounds of all of them hold at once
_NUMBERED = (Phase.forward, Phase.backward)  # Phases that a step has one of per micro-batch


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A phase of a step, by the worker's `time.perf_counter()`; passes are numbered in the step's order."""

    phase: str
    step: int  # 1-based, as in points
    micro_batch: int | None  # 0-based
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class WorkerTrace:
    """The window of one worker; no worker leaves an exchange before all have come."""

    name: str
    spans: tuple[TraceSpan, ...]  # Spans in order; those of a step leave no gap between them
    epoch_s: float  # Unix time at 0 of the worker's `time.perf_counter()`
    exchanges: tuple[tuple[float, float], ...]


class StepTracer:
    """Traces the steps between the first ones of an attempt, which warm up, and the window's end."""

    def __init__(self, skipped: int, steps: int, timeline: Timeline) -> None:
        self._skipped, self._left, self._timeline = skipped, steps, timeline
        self._spans: list[TraceSpan] = []
        self._step = 0
        self._open: tuple[Phase, float] | None = None
        self._counts = dict.fromkeys(_NUMBERED, 0)

    @property
    def covers_next(self) -> bool:
        return not self._skipped and self._left > 0

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        if not self.covers_next:
            yield
            self._skipped = max(0, self._skipped - 1)
            return
        self._step, self._open, self._counts = step + 1, None, dict.fromkeys(_NUMBERED, 0)
        self._timeline.settle()  # what belongs to the steps before is not told
        self._timeline.listener = self._entered
        try:
            yield
            self._timeline.settle()
            self._close(time.perf_counter())
        finally:
            self._timeline.listener = unheard
        self._left -= 1

    def take(self) -> tuple[TraceSpan, ...] | None:
        if self._left or not self._spans:
            return None
        spans, self._spans = tuple(self._spans), []
        return spans

    def _entered(self, phase: Phase, at_s: float) -> None:
        self._close(at_s)
        self._open = phase, at_s

    def _close(self, at_s: float) -> None:
        if self._open is None:
            return
        phase, begin_s = self._open
        number = None
        if phase in self._counts:
            number = self._counts[phase]
            self._counts[phase] += 1
        self._spans.append(TraceSpan(phase.value, self._step, number, begin_s, at_s))


def tracer_for(steps: int, *, profiled_steps: int, steps_left: int, timeline: Timeline) -> StepTracer:
    steps = min(steps, steps_left)
    return StepTracer(min(WARM_STEPS + profiled_steps, steps_left - steps), steps, timeline)


def gather(
    spans: tuple[TraceSpan, ...], name: str, workers: Workers, device: torch.device
) -> tuple[WorkerTrace, ...]:
    exchanges = []
    for _ in range(_CLOCK_ROUNDS):
        begin_s = time.perf_counter()
        workers.sum([0.0], device)
        exchanges.append((begin_s, time.perf_counter()))
    mine = WorkerTrace(name, spans, time.time() - time.perf_counter(), tuple(exchanges))
    return tuple(workers.all_gather(mine))


@dataclass(frozen=True, slots=True)
class Shift:
    """What is added to a worker's clock to have the first worker's, and the largest possible error."""

    seconds: float
    uncertainty_s: float


def aligned(workers: Sequence[WorkerTrace]) -> tuple[Shift, ...]:
    """Returns the clocks of all workers on the first one's.

    No one leaves an exchange before all have come to it. So by the first worker's clock another's
    begin is before the first one's end, and its end after the first one's begin: each exchange
    bounds the shift from both sides. Unix time counts as far as it keeps to these bounds, so
    that workers of one machine, who share a clock, are not moved at all.
    """
    first = workers[0]
    shifts = []
    for worker in workers:
        pairs = list(zip(first.exchanges, worker.exchanges, strict=True))
        low = max(ours[0] - theirs[1] for ours, theirs in pairs)
        high = min(ours[1] - theirs[0] for ours, theirs in pairs)
        by_unix_time = worker.epoch_s - first.epoch_s
        shifts.append(Shift(min(max(by_unix_time, low), high), max(0.0, high - low)))
    return tuple(shifts)


def chrome_trace(workers: Sequence[WorkerTrace], about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the windows as one document in Chrome's trace-event format; times in microseconds."""
    shifts = aligned(workers)
    origin_s = min(
        span.begin_s + shift.seconds
        for worker, shift in zip(workers, shifts, strict=True)
        for span in worker.spans
    )
    events: list[dict[str, Any]] = []
    for rank, (worker, shift) in enumerate(zip(workers, shifts, strict=True)):
        about_rank = {"process_name": {"name": worker.name}, "process_sort_index": {"sort_index": rank}}
        for kind, value in about_rank.items():
            events.append({"ph": "M", "name": kind, "pid": rank, "tid": 0, "args": value})
        moved_s = shift.seconds - origin_s
        for step, spans in groupby(worker.spans, lambda span: span.step):
            inside = list(spans)
            whole = replace(inside[0], phase=f"step {step}", micro_batch=None, end_s=inside[-1].end_s)
            events.append(_event(whole, "step", rank, moved_s))
            events += [_event(span, "phase", rank, moved_s) for span in inside]
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "otherData": {
            **about,
            "clock_shift_us": [round(shift.seconds * 1e6, 3) for shift in shifts],
            "clock_uncertainty_us": [round(shift.uncertainty_s * 1e6, 3) for shift in shifts],
        },
    }


def _event(span: TraceSpan, kind: str, rank: int, moved_s: float) -> dict[str, Any]:
    # Rounded to nanoseconds before the difference, so that one slice ends where the next begins.
    begin, end = (round((at_s + moved_s) * 1e9) for at_s in (span.begin_s, span.end_s))
    numbered = {} if span.micro_batch is None else {"micro_batch": span.micro_batch}
    return {
        "ph": "X", "name": span.phase, "cat": kind, "pid": rank, "tid": 0,
        "ts": begin / 1e3, "dur": (end - begin) / 1e3, "args": {"step": span.step, **numbered},
    }  # fmt: skip


def write(folder: Place, document: Mapping[str, Any]) -> None:
    """Writes a trace next to an attempt's checkpoints; after an error the earlier one is intact."""
    put(folder / TRACE, json.dumps(document, separators=(",", ":")).encode())


def write_kernels(folder: Place, traces: Sequence[bytes]) -> None:
    for rank, trace in enumerate(traces):
        put(kernel_trace(folder, rank), trace)


def measurements(workers: Sequence[WorkerTrace]) -> Iterator[Measurement]:
    for rank, worker in enumerate(workers):
        steps = len({span.step for span in worker.spans})
        start_s, end_s = worker.spans[0].begin_s + worker.epoch_s, worker.spans[-1].end_s + worker.epoch_s
        for phase in dict.fromkeys(span.phase for span in worker.spans):
            spent_s = sum(span.end_s - span.begin_s for span in worker.spans if span.phase == phase)
            name, scope, ms = "phase_ms_per_step", f"worker:{rank}:{phase}", 1e3 * spent_s / steps
            yield Measurement(name, ms, "ms", Provenance.counter, scope, start_s, end_s)
