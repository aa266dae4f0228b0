"""What a profiled window of steps says: kernels, launches, occupancy, operators.

The figures are computed from the trace that `torch.profiler` exports (Chrome's format), by a pure
function that a recorded trace tests as well as a live one.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile
from typing_extensions import override

from trainers.device_kinds import kind_of
from trainers.reporting import Measurement, Provenance
from trainers.telemetry.devices import MIB
from trainers.telemetry.timeline import Phase, Timeline

WARM_STEPS = 10
"""Steps of a run before the window: caches fill, kernels are chosen."""
TOP = 10
"""Operators and kernels that are named."""
_NAME_LIMIT = 160
_GZIP_LEVEL = 5
_OCCUPANCY = "est. achieved occupancy %"
_BYTES = "bytes"
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "hipLaunchKernel")


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that a kind of kernel, copy or fill moved.

    Attributes:
        name: Name of the kernel, or `Memcpy HtoD` and the like.
        bytes_per_step: Bytes per step as counted by the profiler.
        gb_s: bytes / time in which they were moved.
    """

    name: str
    bytes_per_step: float
    gb_s: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """A profiled window of one worker.

    Attributes:
        profiled: its figures.
        start_s, end_s: Start and end in Unix time.
        trace: Trace in Chrome's trace-event format, compressed by gzip.
    """

    profiled: Profiled
    start_s: float
    end_s: float
    trace: bytes


@dataclass(frozen=True, slots=True)
class Profiled:
    """Figures of a profiled window; what belongs to kernels is None where no GPU ran any.

    Attributes:
        steps: Steps in the window.
        kernel_active_ratio: time in which at least one kernel ran / time from the first operator
            to the end of the last kernel.
        kernel_launches_per_step: calls of the driver that start a kernel or a graph of them.
        sm_occupancy_pct: estimated achieved occupancy of the SMs, mean over kernels by their time.
        sm_occupancy_wall_pct: the same over the whole window: times all kernels' time / the window's.
        kernels_ms: by name, time per step; the longest first.
        operators_ms: by name, CPU time per step without that of operators inside; the longest first.
        moved: Transfers for which the profiler has byte counts; the longest first.
    """

    steps: int
    kernel_active_ratio: float | None
    kernel_launches_per_step: float | None
    sm_occupancy_pct: float | None
    sm_occupancy_wall_pct: float | None
    kernels_ms: tuple[tuple[str, float], ...]
    operators_ms: tuple[tuple[str, float], ...]
    moved: tuple[Moved, ...] = ()

    def figures(self) -> dict[str, float]:
        """Returns what goes into the run's summary."""
        named = {
            "kernel_active_ratio": self.kernel_active_ratio,
            "kernel_launches_per_step": self.kernel_launches_per_step,
            "sm_occupancy_pct": self.sm_occupancy_pct,
            "sm_occupancy_wall_pct": self.sm_occupancy_wall_pct,
        }
        return {name: value for name, value in named.items() if value is not None}

    def measurements(
        self, start_s: float, end_s: float, *, bandwidth_gb_s: float | None = None
    ) -> Iterator[Measurement]:
        """Yields the named operators and kernels.

        Args:
            start_s, end_s: the window, in Unix time.
            bandwidth_gb_s: published bandwidth of the device's memory; None = unknown.
        """
        for one in self.moved:
            scope = f"kernel:{one.name}"
            mib = one.bytes_per_step / MIB
            yield Measurement("moved_mib_per_step", mib, "MiB", Provenance.counter, scope, start_s, end_s)
            if bandwidth_gb_s is not None:
                pct = 100.0 * one.gb_s / bandwidth_gb_s
                yield Measurement("memory_bandwidth_pct", pct, "%", Provenance.counter, scope, start_s, end_s)
        for name, kind, times in (
            ("kernel_ms_per_step", "kernel", self.kernels_ms),
            ("operator_ms_per_step", "operator", self.operators_ms),
        ):
            for what, milliseconds in times:
                yield Measurement(
                    name, milliseconds, "ms", Provenance.counter, f"{kind}:{what}", start_s, end_s
                )


def read_trace(events: Iterable[Mapping[str, Any]], steps: int) -> Profiled:
    """Figures of the complete events of a trace.

    Args:
        events: `traceEvents` of an exported trace; times in microseconds.
        steps: Number of steps covered.
    """
    kinds: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            kinds[str(event.get("cat", ""))].append(event)
    kernels, operators = kinds["kernel"], kinds["cpu_op"]
    by_kernel: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        by_kernel[str(kernel["name"])] += kernel["dur"]
    launches = [
        event
        for event in (*kinds["cuda_runtime"], *kinds["cuda_driver"])
        if str(event["name"]).startswith(_LAUNCHES)
    ]
    occupancy, window_us = _occupancy(kernels), _window_us(kernels, operators)
    kernel_us = sum(by_kernel.values())
    return Profiled(
        steps=steps,
        kernel_active_ratio=_active_us(kernels) / window_us if kernels else None,
        kernel_launches_per_step=len(launches) / steps if kernels else None,
        sm_occupancy_pct=occupancy,
        sm_occupancy_wall_pct=None if occupancy is None else occupancy * kernel_us / window_us,
        kernels_ms=_longest(by_kernel, steps),
        operators_ms=_longest(_own_times(operators), steps),
        moved=_moved([*kernels, *kinds["gpu_memcpy"], *kinds["gpu_memset"]], steps),
    )


def _window_us(kernels: Sequence[Mapping[str, Any]], operators: Sequence[Mapping[str, Any]]) -> float:
    """Wall time from the first operator to the end of the last kernel, in which the device idles too."""
    if not kernels:
        return 0.0
    end = max(kernel["ts"] + kernel["dur"] for kernel in kernels)
    return float(end - min(event["ts"] for event in (*kernels, *operators)))


def _active_us(kernels: Sequence[Mapping[str, Any]]) -> float:
    """Kernels on several streams overlap: their union counts."""
    spans = sorted((kernel["ts"], kernel["ts"] + kernel["dur"]) for kernel in kernels)
    active, end = 0.0, float("-inf")
    for start, stop in spans:
        active += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return active


def _moved(activities: Sequence[Mapping[str, Any]], steps: int) -> tuple[Moved, ...]:
    """The longest of those whose bytes the profiler has: copies, fills, and kernels where it counts them."""
    bytes_of: dict[str, float] = defaultdict(float)
    us_of: dict[str, float] = defaultdict(float)
    for event in activities:
        count = event.get("args", {}).get(_BYTES)
        if count is not None and event["dur"] > 0:
            bytes_of[str(event["name"])] += count
            us_of[str(event["name"])] += event["dur"]
    first = sorted(us_of, key=lambda name: -us_of[name])[:TOP]
    return tuple(
        Moved(name[:_NAME_LIMIT], bytes_of[name] / steps, bytes_of[name] / us_of[name] / 1e3)
        for name in first
    )


def _occupancy(kernels: Sequence[Mapping[str, Any]]) -> float | None:
    known = [
        (kernel["args"][_OCCUPANCY], kernel["dur"])
        for kernel in kernels
        if _OCCUPANCY in kernel.get("args", {})
    ]
    whole = sum(duration for _, duration in known)
    return sum(value * duration for value, duration in known) / whole if whole else None


def _own_times(operators: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Microseconds by name, each moment given to the innermost operator of its thread."""
    own: dict[str, float] = defaultdict(float)
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in operators:
        threads[event.get("pid"), event.get("tid")].append(event)
    for events in threads.values():
        outer: list[tuple[float, str]] = []  # end and name of the operators around the current one
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            while outer and outer[-1][0] <= event["ts"]:
                outer.pop()
            if outer:
                own[outer[-1][1]] -= event["dur"]
            own[str(event["name"])] += event["dur"]
            outer.append((event["ts"] + event["dur"], str(event["name"])))
    return own


def _longest(microseconds: Mapping[str, float], steps: int) -> tuple[tuple[str, float], ...]:
    first = sorted(microseconds.items(), key=lambda item: -item[1])[:TOP]
    return tuple((name[:_NAME_LIMIT], time_us / 1000.0 / steps) for name, time_us in first)


class StepProfiler:
    """Profiles a window of a run's own steps; the null form profiles none.

    The steps are ordinary ones, with the same effect on the model: a resumed run passes the
    window by its step numbers. Only their time is kept out of the rates (`Phase.profiling`).

    Attributes:
        active: the current step is in the window.
    """

    active = False

    def around(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Around one step (0-based), with everything that belongs to it."""
        return contextlib.nullcontext()

    def take(self) -> Recorded | None:
        """Returns what the window says, once, after it has ended."""
        return None

    def close(self) -> None:
        """Ends a window that the run has left early."""


class TorchProfiler(StepProfiler):
    """Profiles with `torch.profiler`.

    Args:
        steps: length of the window.
        total_steps: Steps of the run; a short run's window ends with the run.
        device: Device to compute on.
        timeline: Timeline whose phases count as `profiling` in the window.
    """

    def __init__(self, steps: int, total_steps: int, device: torch.device, timeline: Timeline) -> None:
        self._first = max(0, min(WARM_STEPS, total_steps - steps))
        self._end = self._first + steps
        self._device, self._timeline = device, timeline
        self._running: profile | None = None
        self._covered = 0
        self._began_s = 0.0
        self._recorded: Recorded | None = None

    @contextlib.contextmanager
    @override
    def around(self, step: int) -> Iterator[None]:
        if not self._first <= step < self._end:
            yield
            return
        self._timeline.enter(Phase.profiling)
        self.active = self._timeline.profiling = True
        if self._running is None:
            self._begin()
        try:
            yield
            self._covered += 1
            if step + 1 == self._end:
                self._end_window(read=True)
        finally:
            self.active = self._timeline.profiling = False

    @override
    def close(self) -> None:
        self._end_window(read=False)

    @override
    def take(self) -> Recorded | None:
        recorded, self._recorded = self._recorded, None
        return recorded

    def _begin(self) -> None:
        activities = kind_of(self._device).backend.profiler_activities()
        self._running, self._covered, self._began_s = profile(activities=activities), 0, time.time()
        self._running.start()

    def _end_window(self, *, read: bool) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        kind_of(self._device).backend.synchronize(self._device)
        running.stop()
        if not read:
            return
        ended_s = time.time()
        with tempfile.TemporaryDirectory(prefix="stillhouse-profile-") as folder:
            file = Path(folder) / "trace.json"
            running.export_chrome_trace(str(file))
            # Names of kernels may have bytes that are no UTF-8.
            text = file.read_text(encoding="utf-8", errors="replace")
        profiled = read_trace(json.loads(text)["traceEvents"], self._covered)
        self._recorded = Recorded(profiled, self._began_s, ended_s, gzip.compress(text.encode(), _GZIP_LEVEL))


def profiler_for(steps: int, total_steps: int, device: torch.device, timeline: Timeline) -> StepProfiler:
    """Returns the profiler of `telemetry.profile_steps`; see `TorchProfiler`."""
    if not steps:
        return StepProfiler()
    return TorchProfiler(steps, total_steps, device, timeline)
