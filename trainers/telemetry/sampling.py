"""Samples of a device, taken by one thread next to the loop, and their summary over a window."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from trainers.device_kinds.counters import SAMPLED, Device, Sample

RING = 4096
"""Samples kept: over half an hour at 0.5 s between them."""


class Ring:
    """The newest samples, in memory that does not grow.

    When it is full, every other sample is dropped and the room is used again: older times are
    known more coarsely. Means and integrals weigh samples by time, so they hold; peaks are kept.
    """

    def __init__(self, size: int = RING) -> None:
        self._size = size
        self._samples: list[Sample] = []
        self._peaks: dict[str, float] = {}

    def append(self, sample: Sample) -> None:
        if len(self._samples) == self._size:
            # The first one, where the window begins, stays.
            self._samples = self._samples[::2]
        self._samples.append(sample)
        for name in SAMPLED:
            value = getattr(sample, name)
            if value is not None and value >= self._peaks.get(name, value):
                self._peaks[name] = value

    @property
    def last(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    def take(self) -> tuple[list[Sample], dict[str, float]]:
        """Returns all samples, and the largest value of each number since the last call.

        The last sample stays, since the next window begins where it was taken.
        """
        taken, peaks = self._samples, self._peaks
        self._samples, self._peaks = [], {}
        for sample in taken[-1:]:
            self.append(sample)
        return taken, peaks


@dataclass(frozen=True, slots=True)
class Sampled:
    """Summary of the samples of a window.

    Attributes:
        integrals: By name of a sample's number, its integral over `seconds` (trapezoids).
        seconds: By name, the time from the first to the last sample that has it.
        peaks: By name, the largest value.
        throttled_s: By reason, for how long clocks were lowered.
        span_s: Time from the first to the last sample.
    """

    integrals: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    throttled_s: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    span_s: float = 0.0


def summarise(samples: Sequence[Sample], peaks: dict[str, float]) -> Sampled:
    integrals: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for name in SAMPLED:
        known = [(sample.at_s, value) for sample in samples if (value := getattr(sample, name)) is not None]
        if known:
            integrals[name] = sum((t1 - t0) * (v0 + v1) / 2 for (t0, v0), (t1, v1) in pairwise(known))
            seconds[name] = known[-1][0] - known[0][0]
    throttled_s: dict[str, float] = {}
    for before, after in pairwise(samples):
        for reason in after.throttled:
            throttled_s[reason] = throttled_s.get(reason, 0.0) + after.at_s - before.at_s
    span_s = samples[-1].at_s - samples[0].at_s if samples else 0.0
    return Sampled(integrals, seconds, peaks, throttled_s, len(samples), span_s)


def joined_samples(windows: Sequence[Sampled]) -> Sampled:
    integrals: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    throttled_s: Counter[str] = Counter()
    peaks: dict[str, float] = {}
    for window in windows:
        integrals.update(window.integrals)
        seconds.update(window.seconds)
        throttled_s.update(window.throttled_s)
        for name, peak in window.peaks.items():
            peaks[name] = max(peak, peaks.get(name, peak))
    samples, span_s = sum(window.samples for window in windows), sum(window.span_s for window in windows)
    return Sampled(dict(integrals), dict(seconds), peaks, dict(throttled_s), samples, span_s)


class Sampler:
    """One thread that samples a device and does other small things at each tick.

    Args:
        every_s: Pause between samples; 0 = no samples.
        ticks: Called at each tick, once a second where there are no samples; must not raise.
    """

    def __init__(self, device: Device, every_s: float, ticks: Sequence[Callable[[], object]] = ()) -> None:
        self._device, self._every_s, self._ticks = device, every_s, ticks
        self._ring, self._lock = Ring(), threading.Lock()
        self._ended = threading.Event()
        self._samples = every_s > 0.0 and self._sample()
        self._thread = threading.Thread(target=self._run, name="stillhouse-telemetry", daemon=True)
        if self._samples or ticks:
            self._thread.start()

    def window(self) -> Sampled:
        """Returns the summary of the samples since the last call, up to now."""
        if self._samples:
            self._sample()
        with self._lock:
            return summarise(*self._ring.take())

    def last(self) -> Sample | None:
        with self._lock:
            return self._ring.last

    def close(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s or 1.0):
            if self._samples:
                self._sample()
            for tick in self._ticks:
                tick()

    def _sample(self) -> bool:
        with self._lock:  # so that samples are kept in the order in which they are taken
            sample = self._device.sample()
            if sample is not None:
                self._ring.append(sample)
        return sample is not None
