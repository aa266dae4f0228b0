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
        busy_s: Device-seconds of work in the window; on CUDA all of them, an upper bound.
        limit_w: Power limit of the device itself, which replaces the table's; None = it has none.
    """
    # The time of CPUs is measured for each run; a device that others share is busy for all of them at once.
    most = rates.devices_per_worker if rates.kind.counted_in_cpus else rates.charged_devices
    return rated_power_w(rates, limit_w)[0] * min(busy_s, wall_s * most)


def rated_power_w(rates: DevicePricing, limit_w: float | None) -> tuple[float, str]:
    """Returns the power of one busy device, and its source: `power_limit` or `hardware_table`."""
    return (rates.tdp_w, "hardware_table") if limit_w is None else (limit_w, "power_limit")


def cost_usd(rates: DevicePricing, wall_s: float) -> float:
    """Returns price per device-hour x devices x hours: a device held is paid for, busy or not.

    Each of the runs that share a device pays for its place.
    """
    return rates.price_usd_per_hour * rates.charged_devices * wall_s / 3600.0
