"""Devices that an experiment may hold: which runs may start, and which give theirs back.

A run beyond the allowance stops at its next step boundary with a checkpoint and is queued again. Runs that
have worked for a useful time go before those that have just started; of each, the newest go first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from service.domain.shares import Allowance
from service.driving.live_turns import LiveTurn, LiveTurns
from service.fairness.rules import may_yield
from service.scheduling.run_plan import Shape


class Allowances:
    def __init__(self, live: LiveTurns, clock: Callable[[], float]) -> None:
        self._live, self._clock = live, clock
        self._by_hardware: Mapping[str, Allowance] = {}

    def set(self, by_hardware: Mapping[str, Allowance]) -> None:
        """Replaces all allowances; hardware that is missing is not limited."""
        self._by_hardware = by_hardware

    def fits(self, hardware: str, shape: Shape) -> bool:
        """Returns whether one more run may hold its devices.

        With nothing held, any allowance above zero lets one run start, even one that is larger: devices are
        allowed in the sizes the scheduler knows, and a run measured alone takes a whole node.
        """
        allowance = self._by_hardware.get(hardware)
        if allowance is None:
            return True
        held = sum(live.turn.shape.devices for live in self._live if live.run.hardware == hardware)
        return allowance.covers(held + shape.devices) or (allowance.devices > 0 and not held)

    @property
    def nothing(self) -> str | None:
        """Who has the devices, in words, if the experiment may hold none at all; else None."""
        allowances = list(self._by_hardware.values())
        if not allowances or any(allowance.devices for allowance in allowances):
            return None
        return next((each.reason for each in allowances if each.reason), "others have the devices")

    def in_excess(self) -> list[LiveTurn]:
        """Returns the turns beyond the allowance; what cannot be interrupted counts as held."""
        found = []
        for hardware, allowance in self._by_hardware.items():
            live = [each for each in self._live if each.run.hardware == hardware]
            kept = 0.0
            for each in sorted(live, key=lambda each: self._order(each, allowance)):
                devices = each.turn.shape.devices
                allowed = allowance.covers(kept + devices) or (allowance.devices > 0 and not kept)
                if allowed or not _interruptible(each, allowance):
                    kept += devices
                else:
                    found.append(each)
        return found

    def reason(self, hardware: str) -> str | None:
        allowance = self._by_hardware.get(hardware)
        return None if allowance is None else allowance.reason

    def _order(self, live: LiveTurn, allowance: Allowance) -> tuple[bool, bool, bool, int]:
        """Sort key; first those that stay: uninterruptible, with an attempt, recent, early in the queue."""
        worked = may_yield(self._clock(), live.since_s, 0.0)
        return _interruptible(live, allowance), live.assignment is None, worked, live.turn.number


def _interruptible(live: LiveTurn, allowance: Allowance) -> bool:
    """A run that is measured alone is not interrupted: its times would span several attempts."""
    return live.assignment is None or (allowance.preemptible and not live.turn.shape.exclusive)
