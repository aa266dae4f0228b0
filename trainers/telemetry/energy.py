"""Energy and cost of a worker's window, from rated power and price."""

from __future__ import annotations

import time
from dataclasses import dataclass

from trainers.config import Rates
from trainers.reporting import Provenance

J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Consumption:
    """What a window consumed on one worker.

    Attributes:
        energy_j: in joules.
        cost_usd: in USD.
        provenance: of the energy.
    """

    energy_j: float
    cost_usd: float
    provenance: Provenance


def modelled_energy_j(rates: Rates, wall_s: float, busy_s: float) -> float:
    """Energy as rated power times busy device-seconds, at most `wall_s` per device.

    Args:
        rates: rated power of one device and devices per worker.
        wall_s: length of the window, in s.
        busy_s: device-seconds of work in it.
    """
    return rates.tdp_w * min(busy_s, wall_s * rates.devices_per_worker)


def cost_usd(rates: Rates, wall_s: float) -> float:
    """Price per device-hour times devices times hours: a device held is paid for, busy or not."""
    return rates.price_usd_per_hour * rates.devices_per_worker * wall_s / 3600.0


class ConsumptionWindow:
    """Consumption since this was made.

    On CPU the busy device-seconds are the CPU time of this process; on CUDA the device counts
    as busy throughout: an upper bound, until its own counter is read.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._wall_s, self._cpu_s = time.perf_counter(), time.process_time()

    def end(self) -> Consumption:
        """What was consumed until now."""
        wall_s = time.perf_counter() - self._wall_s
        busy_s = (
            time.process_time() - self._cpu_s
            if self._rates.device == "cpu"
            else wall_s * self._rates.devices_per_worker
        )
        return Consumption(
            modelled_energy_j(self._rates, wall_s, busy_s),
            cost_usd(self._rates, wall_s),
            Provenance.modelled,
        )
