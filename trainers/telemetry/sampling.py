"""Samples of a device, taken by one thread next to the loop, and the machine's own counters (RAPL).

RAPL counts the whole machine's processors and memory, whoever uses them; Linux shows it under
`/sys/class/powercap`, for AMD's processors under the same names, and most systems let only root read it.
"""

import contextlib
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from trainers.device_kinds.counters import SAMPLED, Device, DeviceSample

RING = 4096  # Samples kept: over half an hour at 0.5 s between them
POWERCAP = Path("/sys/class/powercap")
_PACKAGE = re.compile(r"(intel|amd)-rapl:\d+$")  # `intel-rapl-mmio:0` counts the same package again
_PART = re.compile(r"(intel|amd)-rapl:\d+:\d+$")
_BUSY = (0, 1, 2, 5, 6, 7)  # Columns of `/proc/stat` that are work: user, nice, system, irq, softirq, steal


class Ring:
    """The newest samples, in memory that does not grow.

    When it is full, every other sample is dropped and the room is used again: older times are
    known more coarsely. Means and integrals weigh samples by time, so they hold; peaks are kept.
    """

    def __init__(self, size: int = RING) -> None:
        self._size = size
        self._samples: list[DeviceSample] = []
        self._peaks: dict[str, float] = {}

    def append(self, sample: DeviceSample) -> None:
        if len(self._samples) == self._size:
            # The first one, where the window begins, stays.
            self._samples = self._samples[::2]
        self._samples.append(sample)
        for name in SAMPLED:
            value = getattr(sample, name)
            if value is not None and value >= self._peaks.get(name, value):
                self._peaks[name] = value

    @property
    def last(self) -> DeviceSample | None:
        return self._samples[-1] if self._samples else None

    def take(self) -> tuple[list[DeviceSample], dict[str, float]]:
        """Returns all samples and peaks since the last call; the last one begins the next window."""
        samples, peaks = self._samples, self._peaks
        self._samples, self._peaks = [], {}
        for sample in samples[-1:]:
            self.append(sample)
        return samples, peaks


@dataclass(frozen=True, slots=True)
class Sampled:
    """Summary of the samples of a window; `integrals`, by trapezoids, are over `seconds`, both by name."""

    integrals: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # From the first to the last sample with it
    peaks: dict[str, float] = field(default_factory=dict)  # By name, the largest value
    throttled_s: dict[str, float] = field(default_factory=dict)  # By reason, for how long clocks were lowered
    samples: int = 0
    span_s: float = 0.0  # Time from the first to the last sample


def summarise(samples: Sequence[DeviceSample], peaks: dict[str, float]) -> Sampled:
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
    """A thread that samples a device (`every_s` 0 = never) and calls `ticks`, which must not raise."""

    def __init__(self, device: Device, every_s: float, ticks: Sequence[Callable[[], object]] = ()) -> None:
        self._device, self._every_s, self._ticks = device, every_s, ticks
        self._ring, self._lock = Ring(), threading.Lock()
        self._ended = threading.Event()
        self._samples = every_s > 0.0 and self._sample()
        self._thread = threading.Thread(target=self._run, name="stillhouse-telemetry", daemon=True)
        if self._samples or ticks:
            self._thread.start()

    def window(self) -> Sampled:
        if self._samples:
            self._sample()
        with self._lock:
            return summarise(*self._ring.take())

    def last(self) -> DeviceSample | None:
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


@dataclass(slots=True)
class _Zone:
    """One counter, which starts again at 0 after `range_uj`."""

    kind: str
    file: Path
    range_uj: int
    last_uj: int
    total_uj: int = field(default=0)

    def advance(self) -> None:
        now_uj = int(self.file.read_text(encoding="ascii"))
        self.total_uj += (now_uj - self.last_uj) % (self.range_uj + 1)
        self.last_uj = now_uj


class Rapl:
    """The counters of this machine; without zones none can be read.

    A package's counter wraps around after minutes (262 kJ at 200 W: 22). It must be read more
    often than that: the sampling thread does, and every checkpoint.
    """

    def __init__(self, zones: Sequence[_Zone] = ()) -> None:
        self._zones = zones
        self._lock = threading.Lock()
        self._lost: set[str] = set()

    def read_j(self) -> dict[str, float]:
        """Returns joules since this was made: `cpu` (all packages), `dram`; none of a lost counter."""
        with self._lock:
            for zone in self._zones:
                try:
                    zone.advance()
                except (OSError, ValueError):
                    self._lost.add(zone.kind)
            totals: dict[str, float] = {}
            for zone in self._zones:
                if zone.kind not in self._lost:
                    totals[zone.kind] = totals.get(zone.kind, 0.0) + zone.total_uj / 1e6
        return totals


def find_rapl(root: Path = POWERCAP) -> Rapl:
    zones = []
    try:
        entries = sorted(root.iterdir())
    except OSError:
        return Rapl()
    for entry in entries:
        if not (_PACKAGE.match(entry.name) or _PART.match(entry.name)):
            continue
        with contextlib.suppress(OSError, ValueError):
            name = (entry / "name").read_text(encoding="ascii").strip()
            if _PACKAGE.match(entry.name) and name.startswith("package"):
                kind = "cpu"
            elif name == "dram":
                kind = "dram"
            else:
                continue  # cores and graphics are parts of the package, psys is more than both
            file = entry / "energy_uj"
            limit_uj = int((entry / "max_energy_range_uj").read_text(encoding="ascii"))
            zones.append(_Zone(kind, file, limit_uj, int(file.read_text(encoding="ascii"))))
    return Rapl(zones)


def machine_cpu_s(stat: Path = Path("/proc/stat")) -> float | None:
    """Returns CPU seconds of all processes of the machine; None where they are not known."""
    try:
        fields = stat.read_text(encoding="ascii").splitlines()[0].split()[1:]
        return sum(int(fields[column]) for column in _BUSY) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def machine() -> str:
    """Returns the same for all processes of one machine until it boots again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename
