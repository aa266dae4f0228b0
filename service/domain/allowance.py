"""How many devices of one kind an experiment may hold."""

from __future__ import annotations

from dataclasses import dataclass

_ROUNDING = 1e-6
"""Shares of a device need not add up exactly."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Devices of one hardware kind that an experiment may hold now.

    Attributes:
        devices: most at a time; a run that shares its device counts as its part of it.
        preemptible: whether runs that have begun stop, with a checkpoint, where they are beyond it.
        reason: who holds or gets what the experiment could use besides, in words; None = it has enough.
    """

    devices: float
    preemptible: bool = True
    reason: str | None = None

    def covers(self, devices: float) -> bool:
        """Returns whether it allows to hold so many."""
        return devices <= self.devices + _ROUNDING
