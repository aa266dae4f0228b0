"""What a pass over the devices is given, and what it returns; nothing else is remembered between passes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from service.domain.access import DEFAULT_POOL
from service.domain.shares import ShareScore

LEAST_PRICE_USD_PER_HOUR = 0.01  # Counts for cheaper devices, so that free ones are shared as well
MOST_AHEAD = 5  # Experiments ahead that are listed by id
PATIENCE_S = 1800.0  # Time after which a large run that comes first stops others for its devices
DRAINED_AFTER_S = 43_200.0
"""Time after which free devices are kept for it also where others' runs end when they end."""
PROMOTED_AFTER_S = 86_400.0  # Time without a start after which low priority counts as normal
PROMOTED_TO = 50  # normal
OVERDUE_AFTER_S = 172_800.0
"""Time of waiting after which a user who has held nothing of a lane meanwhile comes first in the project."""
USEFUL_S = 1800.0  # Least time that a run has worked since it last started before it is preempted
USEFUL_RESTARTS = 50.0  # The same in costs of a restart: at most 2% of a run is lost to preemption
ROUNDING = 1e-6  # Parts of devices need not add up exactly


class Lane(NamedTuple):
    """Devices that can stand in for each other: one hardware kind in one pool."""

    pool: str
    hardware: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """Number of devices, in use or not, and their prices in USD per device and hour by hardware kind."""

    devices: Mapping[Lane, float]
    prices: Mapping[str, float] = field(default_factory=dict)

    def price(self, hardware: str) -> float:
        return max(self.prices.get(hardware, 0.0), LEAST_PRICE_USD_PER_HOUR)


@dataclass(frozen=True, slots=True)
class ProjectTerms:
    """What a project may count on, and its limits, checked when they were set; devices by hardware kind."""

    weight: float = 1.0
    guaranteed: Mapping[str, float] = field(default_factory=dict)  # Before others; lent out while idle
    ceiling: Mapping[str, float] = field(default_factory=dict)  # A missing kind has none
    concurrent_runs_per_user: int | None = None  # None = no limit
    holds: str | None = None  # Why it starts nothing more (a budget that is spent), in words; None = it does


@dataclass(frozen=True, slots=True)
class Demand:
    """What an experiment holds and wants of one hardware kind, in runs of one size."""

    hardware: str
    devices: float  # What one run needs at once; a part of one where runs share it
    running: int = 0
    waiting: int = 0  # Further runs that could start now, within the experiment's own limit
    yieldable: int | None = None  # Running ones that may be preempted (`may_yield`); None = all


@dataclass(frozen=True, slots=True)
class Claimant:
    """An experiment that runs or waits; its use is charged to its project and user."""

    id: int
    project: str
    user: str
    priority: int
    queued_s: float  # When it joined the queue, Unix seconds
    demands: tuple[Demand, ...]  # One for each hardware kind and size of run
    preemptible: bool = True
    pool: str = DEFAULT_POOL
    served_s: float | None = None  # When one of its runs last started, Unix seconds; None = none has


@dataclass(frozen=True, slots=True)
class Usage:
    """An amount in USD that halves with time, as of `at_s`, Unix seconds."""

    usd: float = 0.0
    at_s: float = 0.0


UsageByUser = Mapping[tuple[str, str, Lane], Usage]  # By project, user and lane


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a pass depends on; a project without terms has the default."""

    now_s: float
    capacity: Capacity
    claimants: Sequence[Claimant]
    terms: Mapping[str, ProjectTerms] = field(default_factory=dict)
    usage: UsageByUser = field(default_factory=dict)


class WaitingReason(StrEnum):
    """Why a run waits; the first that applies."""

    budget = "budget"  # The project's budget is spent: it starts nothing more
    user_cap = "user_cap"  # The user has as many runs at a time as the project allows
    ceiling = "ceiling"  # The project holds as many devices of the kind as it may
    no_capacity = "no_capacity"  # There are not as many devices of the kind as one run needs
    reclaiming = "reclaiming"  # Devices are about to become free for it, at another run's checkpoint
    reserved = "reserved"  # Free devices are kept for a larger run that has waited long
    share = "share"  # Its user or project has its share, or others with less than theirs are ahead
    busy = "busy"  # All devices are in use, and no one holds more than their share
    places = "places"  # As many experiments run as may at a time; a pass does not know that limit


@dataclass(frozen=True, slots=True)
class Preemption:
    """Runs of one experiment that stop at a checkpoint for another."""

    experiment_id: int
    hardware: str
    runs: int
    devices: float  # What they hold together
    for_experiment_id: int


@dataclass(frozen=True, slots=True)
class Handover:
    """An experiment that may start runs only within `devices`: as its runs end, others come first."""

    experiment_id: int
    hardware: str
    devices: float
    for_experiment_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why the next run of one experiment waits."""

    experiment_id: int
    hardware: str
    devices: float
    reason: WaitingReason
    position: int  # Among those that wait for the same lane, from 1
    project_score: ShareScore
    user_score: ShareScore
    ahead: tuple[int, ...]  # Experiments that come first, at most `MOST_AHEAD`, the next one first
    detail: str | None = None  # Limit or reason in words, where there is one (a budget, a number)


def may_yield(now_s: float, started_s: float, restart_s: float) -> bool:
    return now_s - started_s >= max(USEFUL_S, USEFUL_RESTARTS * restart_s)


def waits_since_s(claimant: Claimant) -> float:
    """Returns when an experiment last got devices, or joined the queue; Unix seconds."""
    return claimant.queued_s if claimant.served_s is None else max(claimant.queued_s, claimant.served_s)


def lane_of(claimant: Claimant, demand: Demand) -> Lane:
    return Lane(claimant.pool, demand.hardware)
