"""Modelled energy, and cost: from rated power and price."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainers.config import Rates

J_PER_KWH = 3.6e6


def modelled_energy_j(rates: Rates, wall_s: float, busy_s: float) -> float:
    """Energy as rated power times busy device-seconds, at most `wall_s` per device.

    Args:
        rates: rated power of one device and devices per worker.
        wall_s: length of the window, in s.
        busy_s: device-seconds of work in it; on CUDA all of them, an upper bound.
    """
    return rates.tdp_w * min(busy_s, wall_s * rates.devices_per_worker)


def cost_usd(rates: Rates, wall_s: float) -> float:
    """Price per device-hour times devices times hours: a device held is paid for, busy or not."""
    return rates.price_usd_per_hour * rates.devices_per_worker * wall_s / 3600.0
