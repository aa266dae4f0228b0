"""Modelled energy, and cost: from rated power and price."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainers.config import DevicePricing

J_PER_KWH = 3.6e6


def modelled_energy_j(
    rates: DevicePricing, wall_s: float, busy_s: float, *, limit_w: float | None = None
) -> float:
    """Returns the energy as rated power times busy device-seconds, at most `wall_s` per device.

    Args:
        rates: thermal design power of one device and devices per worker.
        wall_s: length of the window, in s.
        busy_s: device-seconds of work in it; on CUDA all of them, an upper bound.
        limit_w: power limit of the device itself, in W, which replaces the table's; None = it has none.
    """
    # The time of CPUs is measured for each run; a device that others share is busy for all of them at once.
    most = rates.devices_per_worker if rates.kind.counted_in_cpus else rates.charged_devices
    return rated_power_w(rates, limit_w)[0] * min(busy_s, wall_s * most)


def rated_power_w(rates: DevicePricing, limit_w: float | None) -> tuple[float, str]:
    """Power of one busy device in W, and where it comes from: `power_limit` or `hardware_table`."""
    return (rates.tdp_w, "hardware_table") if limit_w is None else (limit_w, "power_limit")


def cost_usd(rates: DevicePricing, wall_s: float) -> float:
    """Returns the price per device-hour times devices times hours: a device held is paid for, busy or not.

    Of a device that runs share, each pays for its place.
    """
    return rates.price_usd_per_hour * rates.charged_devices * wall_s / 3600.0
