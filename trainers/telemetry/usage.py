from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trainers.config import DevicePricing
from trainers.reporting import Provenance
from trainers.telemetry.sampling import Sampled, joined_samples

J_PER_KWH = 3.6e6


def modelled_energy_j(
    rates: DevicePricing, wall_s: float, busy_s: float, *, limit_w: float | None = None
) -> float:
    """Returns rated power x its fraction x busy device-seconds, at most `wall_s` per device."""
    # The time of CPUs is measured for each run; a device that others share is busy for all of them at once.
    most = rates.devices_per_worker if rates.kind.counted_in_cpus else rates.charged_devices
    return rates.power_fraction * rated_power_w(rates, limit_w)[0] * min(busy_s, wall_s * most)


def rated_power_w(rates: DevicePricing, limit_w: float | None) -> tuple[float, str]:
    return (rates.tdp_w, "hardware_table") if limit_w is None else (limit_w, "power_limit")


def cost_usd(rates: DevicePricing, wall_s: float) -> float:
    """Returns the price of the devices held, busy or not; runs that share one pay for their places."""
    return rates.price_usd_per_hour * rates.charged_devices * wall_s / 3600.0


@dataclass(frozen=True, slots=True)
class Energy:
    joules: float
    provenance: Provenance  # `counter`, or `sampled` where power was integrated; `modelled` of a node's sum
    source: str  # Measured source; several workers' readings of one source count once
    method: str = ""  # Of a node: where its power is read


@dataclass(frozen=True, slots=True)
class Window:
    """What one worker used between two moments.

    `energy` is measured, by kind: `gpu`, `cpu`, `dram` (each whole), `cpu_share` (this process'), `node` (the
    part that the worker's devices are of it).
    """

    cost_usd: float  # Price of the devices held
    modelled_j: float  # Rated power x busy time
    energy: Mapping[str, Energy]
    cpu_s: float  # CPU time of the process
    device_s: float  # Time x devices held
    peak_memory_mib: float = 0.0  # Most memory since the worker was prepared
    preparation_memory_mib: float = 0.0  # Most memory until then
    sampled: Sampled = field(default_factory=Sampled)


def joined(windows: Sequence[Window]) -> Window:
    kinds = set.intersection(*(set(window.energy) for window in windows)) if windows else set()
    return Window(
        cost_usd=sum(window.cost_usd for window in windows),
        modelled_j=sum(window.modelled_j for window in windows),
        energy={kind: _joined_energy([window.energy[kind] for window in windows]) for kind in sorted(kinds)},
        cpu_s=sum(window.cpu_s for window in windows),
        device_s=sum(window.device_s for window in windows),
        peak_memory_mib=max((window.peak_memory_mib for window in windows), default=0.0),
        preparation_memory_mib=max((window.preparation_memory_mib for window in windows), default=0.0),
        sampled=joined_samples([window.sampled for window in windows]),
    )


def _joined_energy(parts: Sequence[Energy]) -> Energy:
    provenance = _weakest(part.provenance for part in parts)
    methods = " and ".join(dict.fromkeys(part.method for part in parts))
    return Energy(sum(part.joules for part in parts), provenance, parts[0].source, methods)


def _weakest(each: Iterable[Provenance]) -> Provenance:
    return max(each, key=list(Provenance).index)


@dataclass(slots=True)
class RunUsage:
    """Sums over all workers and attempts that led here; see `Window` and `Sampled`."""

    queue_s: float = 0.0  # Time in which no attempt worked, since the run was submitted
    cost_usd: float = 0.0
    modelled_j: float = 0.0
    cpu_s: float = 0.0
    device_s: float = 0.0
    peak_memory_mib: float = 0.0  # Of the worker and attempt with the most
    preparation_memory_mib: float = 0.0  # Likewise
    device_j: dict[str, float] = field(default_factory=dict)  # Energy of each GPU, by identity
    modelled_device_j: dict[str, float] = field(default_factory=dict)  # By rank of the worker
    windows: int = 0  # Windows of single workers that were added
    measured_j: dict[str, float] = field(default_factory=dict)  # By kind
    measured_windows: dict[str, int] = field(default_factory=dict)  # By kind, in how many it was measured
    provenance: dict[str, str] = field(default_factory=dict)  # By kind, the weakest of any part of the sum
    node_methods: list[str] = field(default_factory=list)  # Where the power of nodes was read
    carbon_s: float = 0.0  # Carbon intensity of the site x device time, in kg s/kWh
    integrals: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    throttled_s: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    passes_s: float = 0.0  # Time in the passes of steps
    bubble_s: float = 0.0  # The part of it in which a stage waited
    flops: float = 0.0  # Counted arithmetic of the timed steps
    teacher_flops: float = 0.0
    profiled: dict[str, float] = field(default_factory=dict)  # Figures of the profiled window, by name

    def add(self, windows: Sequence[Window], carbon_kg_per_kwh: float | None = None) -> None:
        """Adds the windows of all workers, by rank, over the same time, with its carbon intensity."""
        sources: dict[tuple[str, str], float] = {}
        for window in windows:
            self.windows += 1
            self.cost_usd += window.cost_usd
            self.modelled_j += window.modelled_j
            self.cpu_s += window.cpu_s
            self.device_s += window.device_s
            self.carbon_s += window.device_s * (carbon_kg_per_kwh or 0.0)
            self.peak_memory_mib = max(self.peak_memory_mib, window.peak_memory_mib)
            self.preparation_memory_mib = max(self.preparation_memory_mib, window.preparation_memory_mib)
            for kind, energy in window.energy.items():
                self.measured_windows[kind] = self.measured_windows.get(kind, 0) + 1
                before = Provenance(self.provenance.get(kind, Provenance.counter))
                self.provenance[kind] = _weakest((before, energy.provenance)).value
                if energy.method and energy.method not in self.node_methods:
                    self.node_methods.append(energy.method)
                source = (kind, energy.source)
                sources[source] = max(sources.get(source, 0.0), energy.joules)
            _add(self.integrals, window.sampled.integrals)
            _add(self.seconds, window.sampled.seconds)
            _add(self.throttled_s, window.sampled.throttled_s)
            for name, peak in window.sampled.peaks.items():
                self.peaks[name] = max(peak, self.peaks.get(name, peak))
        for (kind, device), joules in sources.items():
            self.measured_j[kind] = self.measured_j.get(kind, 0.0) + joules
            if kind == "gpu":
                _add(self.device_j, {device: joules})
        _add(self.modelled_device_j, {str(rank): one.modelled_j for rank, one in enumerate(windows)})

    def measured(self, kind: str) -> tuple[float, Provenance] | None:
        """Joules and provenance of a kind, if every worker measured it in every window."""
        if not self.windows or self.measured_windows.get(kind, 0) < self.windows:
            return None
        return self.measured_j[kind], Provenance(self.provenance[kind])

    def mean(self, name: str) -> float | None:
        """Returns the mean over time of a sampled number, over all workers' devices; None = not sampled."""
        seconds = self.seconds.get(name, 0.0)
        return self.integrals[name] / seconds if seconds > 0.0 else None


def _add(sums: dict[str, float], more: Mapping[str, float]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value
