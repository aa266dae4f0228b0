"""What a profiled window of steps shows, computed from the trace that `torch.profiler` exports."""

from __future__ import annotations

import contextlib
import gzip
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from trainers.config.sections import Telemetry
from trainers.device_kinds import kind_of
from trainers.device_kinds.counters import MIB
from trainers.reporting import Measurement, Provenance
from trainers.telemetry.kernels import COUNTERS, Kernel, Uncounted, kernels_of, with_counters
from trainers.telemetry.timeline import Phase, Timeline

WARM_STEPS = 10  # Steps of a run before the window: caches fill, kernels are chosen
TOP = 10  # Operators and kernels that are named
_NAME_LIMIT = 160
_GZIP_LEVEL = 5
_OCCUPANCY = "est. achieved occupancy %"
_BYTES = "bytes"
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "hipLaunchKernel")


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that a kind of kernel, copy or fill (`Memcpy HtoD`) moved; `gb_s` is over the time of moving."""

    name: str
    bytes_per_step: float
    gb_s: float


@dataclass(frozen=True, slots=True)
class Recorded:
    profiled: Profiled
    start_s: float
    end_s: float
    trace: bytes  # Trace in Chrome's trace-event format, compressed by gzip
    uncounted: str | None = None  # Why kernels have no hardware counters, where they were requested


@dataclass(frozen=True, slots=True)
class Profiled:
    """Figures of a profiled window; those of kernels are None where no GPU ran any.

    The window lasts from the first operator to the end of the last kernel.
    """

    steps: int
    kernel_active_ratio: float | None  # Time in which at least one kernel ran / the window's
    kernel_launches_per_step: float | None  # Calls of the driver that start a kernel or a graph of them
    sm_occupancy_pct: float | None  # Estimated achieved occupancy of the SMs, mean over kernels by their time
    sm_occupancy_wall_pct: float | None  # The same times all kernels' time / the window's
    kernels: tuple[Kernel, ...]  # The one with the most time first
    operators_ms: tuple[tuple[str, float], ...]  # CPU time per step, without operators inside; longest first
    moved: tuple[Moved, ...] = ()  # Transfers for which the profiler has byte counts; the longest first

    def figures(self) -> dict[str, float]:
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
        """Yields the named operators, kernels and transfers of the first worker; the window in Unix time."""
        for one in self.moved:
            scope = f"kernel:{one.name}"
            mib = one.bytes_per_step / MIB
            yield Measurement("moved_mib_per_step", mib, "MiB", Provenance.counter, scope, start_s, end_s)
            if bandwidth_gb_s is not None:
                pct = 100.0 * one.gb_s / bandwidth_gb_s
                yield Measurement("memory_bandwidth_pct", pct, "%", Provenance.counter, scope, start_s, end_s)
        for kernel in self.kernels[:TOP]:
            yield from kernel.measurements(0, start_s, end_s)
        for what, milliseconds in self.operators_ms:
            scope, name = f"operator:{what}", "operator_ms_per_step"
            yield Measurement(name, milliseconds, "ms", Provenance.counter, scope, start_s, end_s)


def by_category(events: Iterable[Mapping[str, Any]]) -> Mapping[str, list[Mapping[str, Any]]]:
    kinds: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X":
            kinds[str(event.get("cat", ""))].append(event)
    return kinds


def read_trace(events: Iterable[Mapping[str, Any]], steps: int) -> Profiled:
    kinds = by_category(events)
    kernels, operators = kinds["kernel"], kinds["cpu_op"]
    launches = [
        event
        for event in (*kinds["cuda_runtime"], *kinds["cuda_driver"])
        if str(event["name"]).startswith(_LAUNCHES)
    ]
    occupancy, window_us = _occupancy(kernels), _window_us(kernels, operators)
    kernel_us = sum(kernel["dur"] for kernel in kernels)
    return Profiled(
        steps=steps,
        kernel_active_ratio=_active_us(kernels) / window_us if kernels else None,
        kernel_launches_per_step=len(launches) / steps if kernels else None,
        sm_occupancy_pct=occupancy,
        sm_occupancy_wall_pct=None if occupancy is None else occupancy * kernel_us / window_us,
        kernels=kernels_of(kernels, steps=steps, window_us=window_us),
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
    """Profiles a window of a run's own steps with `torch.profiler`; a short run's window ends with the run.

    The steps are ordinary ones, with the same effect on the model: a resumed run passes the
    window by its step numbers. Only their time is kept out of the rates (`Phase.profiling`).

    Counters are read in the step after the profiled ones: CUPTI runs each kernel alone, and several
    times over the same memory, so that nothing else can be measured meanwhile.
    """

    active = False

    def __init__(
        self, wanted: Telemetry, total_steps: int, device: torch.device, timeline: Timeline, *, alone: bool
    ) -> None:
        self._device, self._timeline = device, timeline
        steps, counters = wanted.profile_steps, wanted.kernel_counters
        self._uncounted = self._why_uncounted(alone) if counters else None
        self._counts = counters and self._uncounted is None
        self._first = max(0, min(WARM_STEPS, total_steps - steps - self._counts))
        self._end = self._first + steps
        self._running: profile | None = None
        self._covered = 0
        self._began_s = 0.0
        self._trace: tuple[str, float] | None = None  # In Chrome's format, and the Unix time of its end
        self._recorded: Recorded | None = None

    def _why_uncounted(self, alone: bool) -> str | None:
        if not kind_of(self._device).backend.counts_kernels:
            return f"torch reads no counters of kernels on a {self._device.type} device"
        if not alone:
            return "counting repeats each kernel, and a repeated exchange would wait for the other workers"
        return None

    def covers(self, step: int) -> bool:
        return self._first <= step < self._end or self._counts_in(step)

    def _counts_in(self, step: int) -> bool:
        return self._counts and step == self._end and self._trace is not None

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        if not self.covers(step):
            yield
            return
        counts = self._counts_in(step)
        self._timeline.enter(Phase.profiling)
        self.active = self._timeline.profiling = True
        if self._running is None:
            self._begin(counts)
        try:
            yield
            if counts and (running := self._stop()) is not None:
                self._conclude(
                    by_category(json.loads(exported(running))["traceEvents"])["cuda_profiler_range"]
                )
            elif not counts:
                self._covered += 1
                if step + 1 == self._end:
                    self._end_window()
        finally:
            self.active = self._timeline.profiling = False

    def close(self) -> None:
        self._stop()

    def take(self) -> Recorded | None:
        recorded, self._recorded = self._recorded, None
        return recorded

    def _begin(self, counts: bool) -> None:
        if counts:
            self._running = profile(
                activities=[ProfilerActivity.CUDA],
                experimental_config=_ExperimentalConfig(
                    profiler_metrics=list(COUNTERS.values()), profiler_measure_per_kernel=True
                ),
            )
        else:
            activities = kind_of(self._device).backend.profiler_activities()
            self._running, self._covered, self._began_s = profile(activities=activities), 0, time.time()
        self._running.start()

    def _stop(self) -> profile | None:
        running, self._running = self._running, None
        if running is not None:
            kind_of(self._device).backend.synchronize(self._device)
            running.stop()
        return running

    def _end_window(self) -> None:
        if (running := self._stop()) is None:
            return
        self._trace = exported(running), time.time()
        if not self._counts:
            self._conclude()

    def _conclude(self, counted: Sequence[Mapping[str, Any]] = ()) -> None:
        assert self._trace is not None
        (text, ended_s), self._trace = self._trace, None
        events = json.loads(text)["traceEvents"]
        profiled, uncounted = read_trace(events, self._covered), self._uncounted
        if self._counts:
            launched = by_category(events)["kernel"]
            try:
                kernels = with_counters(profiled.kernels, counted, launched, steps=self._covered)
                profiled = replace(profiled, kernels=kernels)
            except Uncounted as why:
                uncounted = str(why)
        self._recorded = Recorded(
            profiled, self._began_s, ended_s, gzip.compress(text.encode(), _GZIP_LEVEL), uncounted
        )


def exported(finished: profile) -> str:
    with tempfile.TemporaryDirectory(prefix="stillhouse-profile-") as folder:
        file = Path(folder) / "trace.json"
        finished.export_chrome_trace(str(file))
        # Names of kernels may have bytes that are not UTF-8.
        return file.read_text(encoding="utf-8", errors="replace")
