"""All that one worker measures with: windows of what it uses, from entry to exit. Imports no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from trainers.config import RunConfig
from trainers.device_kinds.counters import Device
from trainers.reporting import Measurement, Provenance, Sink
from trainers.telemetry.node_power import NodeMeter
from trainers.telemetry.sampling import Sampled, Sampler, find_rapl, machine, machine_cpu_s
from trainers.telemetry.timeline import OVERHEAD, Boundary, Phase
from trainers.telemetry.usage import Energy, Window, cost_usd, joined, modelled_energy_j, rated_power_w

if TYPE_CHECKING:
    import torch

    from trainers.telemetry.memory import PeakMemory


_LEAST_SHARE_OF_POWER = 0.95
"""Share of a window's samples, by time, between which power is known, for its integral to be the window's
energy: of a GPU that stopped answering it would be less than was used."""
OVERHEAD_TIME = "overhead_time_s"
"""Measurement of one stretch, with its phase as scope; in a summary, the sum over all."""
COUNTED = "counters and idle_w"  # How a node's power is known that no management controller measures
OVERHEAD_SCOPE = "overhead"  # Scope of `window_energy_kwh` that covers overhead; no other window does


class Instruments:
    """The counters of one worker. A context: the sampling thread ends with it.

    The first window begins when the attempt began (`time.perf_counter()`), a GPU's when `attach` has
    found it; until then it was idle. Stretches that `cut` ends as overhead are in `overhead`, all
    others in `window`.
    """

    def __init__(self, config: RunConfig, began_s: float) -> None:
        self._rates, self._every_s = config.rates, config.telemetry.sample_every_s
        self.device = Device()
        self._site = config.site
        self._rapl = find_rapl()
        self._node = NodeMeter(config.site)
        self._node_j: float | None = 0.0
        self._sampler: Sampler | None = None
        self._memory: PeakMemory | None = None
        self._preparation_mib = 0.0
        self._limit_w: float | None = None
        self._own: list[Window] = []
        self._overhead: list[Window] = []
        self._wall_s = began_s
        self._mark()

    def __enter__(self) -> Instruments:
        return self

    def __exit__(self, *error: object) -> None:
        if self._sampler is not None:
            self._sampler.close()
        self._node.close()

    def attach(self, device: torch.device, *, alive: Callable[[], object] | None = None) -> None:
        """Finds the device's counters and begins to sample; `alive` is called at each sample."""
        from trainers.telemetry.memory import PeakMemory

        self.device = self._rates.kind.backend.counters(device)
        self._limit_w = self.device.power_limit_w()
        self._memory = PeakMemory(device)
        self._device_j = self.device.energy_j()
        ticks = [self._rapl.read_j, *([alive] if alive else [])]
        self._sampler = Sampler(self.device, self._every_s, ticks)

    def facts(self) -> dict[str, object]:
        power_w, source = rated_power_w(self._rates, self._limit_w)
        found = {**self.device.facts(), "rated_power_w": power_w, "rated_power_source": source}
        found["power_fraction"] = self._rates.power_fraction
        return found | ({"site": site} if (site := self._site.facts()) else {})

    def prepared(self) -> None:
        """Restarts the peak of memory, which is that of training from the next step on."""
        if self._memory is not None:
            self._preparation_mib = self._memory.restart()

    def cut(self, *, overhead: bool, at_s: float | None = None) -> None:
        """Ends a stretch, at a `time.perf_counter()` just passed or now; `window` leaves out overhead."""
        (self._overhead if overhead else self._own).append(self._stretch(at_s))

    def peak_within(self) -> Callable[[], float]:
        """Begins to watch the memory of a part of the run; returns a function that reads its peak, in MiB."""
        return self._memory.within() if self._memory is not None else lambda: 0.0

    def window(self, until_s: float | None = None) -> Window:
        self.cut(overhead=False, at_s=until_s)
        own, self._own = joined(self._own), []
        peak_mib = self._memory.peak() if self._memory else 0.0
        return replace(own, peak_memory_mib=peak_mib, preparation_memory_mib=self._preparation_mib)

    def shown(self) -> dict[str, float]:
        sample = self._sampler.last() if self._sampler else None
        if sample is None:
            return {}
        values = {"gpu_memory_used_mib": sample.memory_used_mib, "gpu_temperature_c": sample.temperature_c}
        return {name: value for name, value in values.items() if value is not None}

    def overhead(self) -> Window:
        ended, self._overhead = joined(self._overhead), []
        return ended

    def _stretch(self, until_s: float | None) -> Window:
        wall_s, cpu_s, machine_s = self._wall_s, self._cpu_s, self._machine_cpu_s
        rapl_j, device_j, node_j = self._rapl_j, self._device_j, self._node_j
        self._wall_s = time.perf_counter() if until_s is None else until_s
        self._mark()
        self._node_j = self._node.read_j()
        wall_s, cpu_s = self._wall_s - wall_s, self._cpu_s - cpu_s
        sampled = self._sampler.window() if self._sampler else Sampled()
        device_s = wall_s * self._rates.devices_per_worker
        busy_s = cpu_s if self._rates.kind.counted_in_cpus else device_s
        energy = self._device_energy(device_j, sampled)
        where = machine()
        for kind, joules in self._rapl_j.items():
            energy[kind] = Energy(joules - rapl_j[kind], Provenance.counter, where)
        if "cpu" in energy and machine_s is not None and self._machine_cpu_s is not None:
            # Both times tick in hundredths of a second: a short window's share may exceed the whole.
            share = min(1.0, cpu_s / max(self._machine_cpu_s - machine_s, cpu_s, 1e-9))
            mine = f"{where}:{os.getpid()}"
            energy["cpu_share"] = Energy(energy["cpu"].joules * share, Provenance.counter, mine)
        modelled_j = modelled_energy_j(self._rates, wall_s, busy_s, limit_w=self._limit_w)
        node = self._node_energy(node_j, wall_s, energy, modelled_j)
        return Window(
            cost_usd=cost_usd(self._rates, wall_s),
            modelled_j=modelled_j,
            energy=energy if node is None else {**energy, "node": node},
            cpu_s=cpu_s,
            device_s=device_s,
            sampled=sampled,
        )

    def _mark(self) -> None:
        self._cpu_s = time.process_time()
        self._machine_cpu_s = machine_cpu_s()
        self._rapl_j = self._rapl.read_j()
        self._device_j = self.device.energy_j()

    def _node_energy(
        self, before_j: float | None, wall_s: float, energy: Mapping[str, Energy], modelled_j: float
    ) -> Energy | None:
        """Returns the node's energy x this worker's share of the node's devices; None = not known."""
        devices = os.cpu_count() if self._rates.kind.counted_in_cpus else self.device.on_node()
        if not devices:
            return None
        share, mine = min(1.0, self._rates.charged_devices / devices), f"{machine()}:{os.getpid()}"
        if before_j is not None and self._node_j is not None:
            joules = share * max(0.0, self._node_j - before_j)
            return Energy(joules, Provenance.sampled, mine, self._node.source)
        if self._site.idle_w is None:
            return None
        counted = {kind: one.joules for kind, one in energy.items()}
        of_cpus, own_j = counted.get("cpu_share", 0.0), modelled_j
        if self._rates.kind.counted_in_cpus:
            of_cpus, own_j = 0.0, counted.get("cpu_share", modelled_j)
        elif self.device.exclusive and not self._rates.shared:
            own_j = counted.get("gpu", modelled_j)
        joules = own_j + of_cpus + share * (counted.get("dram", 0.0) + self._site.idle_w * wall_s)
        return Energy(joules, Provenance.modelled, mine, COUNTED)

    def _device_energy(self, before_j: float | None, sampled: Sampled) -> dict[str, Energy]:
        # A counter that went back began again in between: what it counted until then is gone.
        if self._device_j is not None and before_j is not None and self._device_j >= before_j:
            joules, provenance = self._device_j - before_j, Provenance.counter
        elif sampled.seconds.get("power_w", 0.0) > _LEAST_SHARE_OF_POWER * sampled.span_s:
            joules, provenance = sampled.integrals["power_w"], Provenance.sampled
        else:
            return {}
        return {"gpu": Energy(joules, provenance, self.device.identity)}


def overhead_meter(instruments: Instruments, sink: Sink) -> Boundary:
    """Cuts the instruments' windows and reports overhead as it ends."""
    epoch_s = time.time() - time.perf_counter()

    def cut(ended: Phase, began_s: float, ended_s: float) -> None:
        instruments.cut(overhead=ended in OVERHEAD, at_s=ended_s)
        if ended in OVERHEAD:
            spent_s, window = ended_s - began_s, (epoch_s + began_s, epoch_s + ended_s)
            sink.measurement(
                Measurement(OVERHEAD_TIME, spent_s, "s", Provenance.counter, ended.value, *window)
            )

    return cut
