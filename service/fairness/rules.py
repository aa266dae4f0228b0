"""Constants and small rules of a pass, which drivers and forecasts apply as well.

A driver that has to give devices back and a pass that takes them agree on who yields (`may_yield`); forecasts
of starts (`eta`) play the queue forward with the same waiting times.
"""

from __future__ import annotations

from service.fairness.state import Claimant, Demand, Lane, ProjectTerms

PATIENCE_S = 1800.0
"""Time after which a large run that comes first stops others for its devices."""
DRAINED_AFTER_S = 43_200.0
"""Time after which free devices are kept for it also where others' runs end when they end."""
PROMOTED_AFTER_S = 86_400.0
"""Time without a start after which low priority counts as normal."""
PROMOTED_TO = 50
"""Class `normal`."""
OVERDUE_AFTER_S = 172_800.0
"""Time of waiting after which a user who has held nothing of a lane meanwhile comes first in the project."""
USEFUL_S = 1800.0
"""Least time that a run has worked since it last started before it is preempted."""
USEFUL_RESTARTS = 50.0
"""The same, in times of what a restart costs: at most 2% of a run is lost to preemption."""
ROUNDING = 1e-6
"""Parts of devices need not add up exactly."""


def may_yield(now_s: float, started_s: float, restart_s: float) -> bool:
    """Returns whether a run may be preempted: whether it has worked long enough since it last started.

    Args:
        now_s: Unix seconds.
        started_s: when its present attempt started.
        restart_s: what stopping and starting again costs it.
    """
    return now_s - started_s >= max(USEFUL_S, USEFUL_RESTARTS * restart_s)


def permitted(priority: int, terms: ProjectTerms) -> int:
    """Returns a priority, or the highest that a project may use where that is lower."""
    most = terms.most_priority
    return priority if most is None or priority < most else most


def waits_since_s(claimant: Claimant) -> float:
    """Returns when an experiment last got devices, or joined the queue; Unix seconds."""
    return claimant.queued_s if claimant.served_s is None else max(claimant.queued_s, claimant.served_s)


def lane_of(claimant: Claimant, demand: Demand) -> Lane:
    """Returns the lane in which an experiment holds and wants the devices of a demand."""
    return Lane(claimant.pool, demand.hardware)
