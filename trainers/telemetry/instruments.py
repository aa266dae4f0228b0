"""All that one worker measures with: windows of what it uses, and its node's power. Imports no torch."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trainers.config import RunConfig
from trainers.config.site import Site
from trainers.device_kinds.counters import Device
from trainers.reporting import Measurement, Provenance, Sink
from trainers.telemetry.sampling import Sampled, Sampler, find_rapl, machine, machine_cpu_s
from trainers.telemetry.timeline import OVERHEAD, Boundary, Phase
from trainers.telemetry.usage import Energy, Window, cost_usd, joined, modelled_energy_j, rated_power_w

READ_EVERY_S = 5.0
READ_LIMIT_S = 5.0  # For one answer of a controller; most take under a second
_STALE_S = 60.0  # After this long without a reading, the power is unknown
_UNREADABLE = (
    OSError, http.client.HTTPException, subprocess.SubprocessError, ValueError, LookupError, TypeError,
)  # fmt: skip

_CHASSIS = "/redfish/v1/Chassis"
_READINGS: tuple[tuple[str, tuple[str | int, ...]], ...] = (
    ("Power", ("PowerControl", 0, "PowerConsumedWatts")),
    ("EnvironmentMetrics", ("PowerWatts", "Reading")),
)
"""Of a chassis: a linked document and where its power is. Newer controllers have `PowerSubsystem` for
`Power`, with what supplies can give; what is drawn is then in `EnvironmentMetrics`."""
_INSTANTANEOUS = re.compile(r"Instantaneous power reading:\s*(\d+)\s*Watts")

ReadPower = Callable[[], float]  # In watts; raises one of `_UNREADABLE`


class _Redfish:
    def __init__(self, url: str, credentials: str | None, ca: str | None) -> None:
        self._url = urlsplit(url.replace("{node}", os.uname().nodename))
        self._credentials, self._ca = credentials, ca
        self._reading: tuple[str, tuple[str | int, ...]] | None = None

    def __call__(self) -> float:
        if self._reading is None:
            self._reading = self._find()
        path, keys = self._reading
        return _power(self._get(path), keys)

    def _find(self) -> tuple[str, tuple[str | int, ...]]:
        """Returns the document with the power of the chassis that is in no other, or the one of the URL."""
        given = self._url.path.rstrip("/")
        named = given.startswith(f"{_CHASSIS}/")
        paths = [given] if named else [one["@odata.id"] for one in self._get(_CHASSIS)["Members"]]
        for path in paths:
            chassis = self._get(path)
            if not named and "ContainedBy" in chassis.get("Links", {}):
                continue
            for name, keys in _READINGS:
                link = chassis.get(name, {}).get("@odata.id")
                if link is not None:
                    try:
                        _power(self._get(link), keys)
                    except (ValueError, LookupError, TypeError):
                        continue
                    return link, keys
        raise LookupError("no chassis has a power reading")

    def _get(self, path: str) -> Any:
        host, headers = self._url.netloc, {"Accept": "application/json"}
        if self._credentials is not None:
            secret = Path(self._credentials).read_bytes().strip()
            headers["Authorization"] = f"Basic {base64.b64encode(secret).decode()}"
        if self._url.scheme == "https":
            context = ssl.create_default_context(cafile=self._ca)
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, timeout=READ_LIMIT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, timeout=READ_LIMIT_S)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise ValueError(f"{path}: {answer.status} {answer.reason}")
            return json.loads(answer.read())
        finally:
            connection.close()


def _power(document: Any, keys: tuple[str | int, ...]) -> float:
    for key in keys:
        document = document[key]
    return float(document)


def _redfish(site: Site) -> ReadPower | None:
    if site.redfish_url is None:
        return None
    return _Redfish(site.redfish_url, site.redfish_credentials, site.redfish_ca)


def _ipmi(site: Site) -> ReadPower | None:
    tool = shutil.which("ipmitool")
    if tool is None:
        return None

    def read_w() -> float:
        command = [tool, "dcmi", "power", "reading"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=READ_LIMIT_S, check=True)
        found = _INSTANTANEOUS.search(answer.stdout)
        if found is None or not int(found[1]):  # Controllers that do not measure answer 0 W.
            raise ValueError("no power reading")
        return float(found[1])

    return read_w


NODE_POWER: Mapping[str, Callable[[Site], ReadPower | None]] = {"redfish": _redfish, "ipmi": _ipmi}
"""Sources of a node's power, the best one first; None = this node has no such source."""


class NodeMeter:
    """A thread that reads the node's power and adds it up; without a source, nothing runs."""

    def __init__(self, site: Site, every_s: float = READ_EVERY_S) -> None:
        self.source = ""  # The one that is used; empty for none, or not known yet
        self._every_s = every_s
        self._began_s, self._read_s, self._power_w, self._joules = time.perf_counter(), 0.0, 0.0, 0.0
        self._ended, self._tried, self._lock = threading.Event(), threading.Event(), threading.Lock()
        self._found = {name: read for name, find in NODE_POWER.items() if (read := find(site)) is not None}
        self._thread = threading.Thread(target=self._run, name="stillhouse-node-power", daemon=True)
        if self._found:
            self._thread.start()

    def read_j(self) -> float | None:
        """Returns joules since this was made, the first reading's power before it; None = not known."""
        if not self._found:
            return None
        self._tried.wait(len(self._found) * READ_LIMIT_S)
        with self._lock:
            since_s = time.perf_counter() - self._read_s
            if not self.source or since_s > _STALE_S:
                return None
            return self._joules + self._power_w * since_s

    def close(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            for name, read in self._found.items():
                if self.source in ("", name) and self._read(name, read):
                    break
            self._tried.set()
            if not self.source or self._ended.wait(self._every_s):
                return

    def _read(self, name: str, read: ReadPower) -> bool:
        try:
            power_w = read()
        except _UNREADABLE:
            return False
        with self._lock:
            now_s = time.perf_counter()
            if self.source:
                self._joules += self._power_w * (now_s - self._read_s)
            else:
                self._joules = power_w * (now_s - self._began_s)
            self.source, self._power_w, self._read_s = name, power_w, now_s
        return True


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
    epoch_s = time.time() - time.perf_counter()

    def cut(ended: Phase, began_s: float, ended_s: float) -> None:
        instruments.cut(overhead=ended in OVERHEAD, at_s=ended_s)
        if ended in OVERHEAD:
            spent_s, window = ended_s - began_s, (epoch_s + began_s, epoch_s + ended_s)
            sink.measurement(
                Measurement(OVERHEAD_TIME, spent_s, "s", Provenance.counter, ended.value, *window)
            )

    return cut
