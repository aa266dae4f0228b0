from __future__ import annotations

from dataclasses import dataclass

_ROUNDING = 1e-6
"""Shares of a device need not add up exactly."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Devices of one hardware kind that an experiment may hold now.

    Attributes:
        devices: Most at a time; a run that shares its device counts as its part of it.
        preemptible: Runs beyond it stop, with a checkpoint.
        reason: Who holds or gets what else the experiment could use, in words; None = it has enough.
    """

    devices: float
    preemptible: bool = True
    reason: str | None = None

    def covers(self, devices: float) -> bool:
        return devices <= self.devices + _ROUNDING
