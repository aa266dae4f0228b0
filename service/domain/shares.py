"""Shares of devices: entitlements, holders, when waiting runs start, and what projects used in a month."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime

from service.domain.serialization import Number, Serializable

_ROUNDING = 1e-6  # Parts of a device need not add up exactly


@dataclass(frozen=True, slots=True)
class Standing(Serializable):
    """What one of several projects, or of a project's users, holds, is entitled to and has used."""

    weight: Number  # Relative to the other projects, 0 = its budget is spent; 1 for each user inside one
    held_usd_per_hour: Number  # Price of the devices that it holds now
    entitled_usd_per_hour: Number
    """Price of the devices that its weight entitles it to, among those that hold or want some."""
    entitled_part: Number  # The same as a part of all those devices
    used_usd: Number  # What it has used lately; an amount halves in a week
    used_part: Number  # The same as a part of what all of them have used


STANDING = tuple(field.name for field in fields(Standing))


@dataclass(frozen=True, slots=True)
class ShareScore(Standing):
    """What decides between projects, or between the users of one, for devices of one kind."""

    score: Number  # The lowest goes first
    excess_usd: Number  # By how much it has used more than it was entitled to, as far as that still counts


@dataclass(frozen=True, slots=True)
class Share(Standing):
    """A project's part of the devices of one kind, or a user's inside the project."""

    pool: str  # Cluster that has the devices
    hardware: str  # Kind of the devices
    project: str | None  # None = all projects together that the reader does not see
    user: str | None  # None = the whole project
    held_devices: Number  # Devices that it holds now
    waits: bool  # Whether runs of it wait for such devices


@dataclass(frozen=True, slots=True)
class BudgetUse(Serializable):
    """How far a budget of the month has been used."""

    unit: str  # usd, kwh or device_hours
    budget: Number  # What may be used in the month
    used: Number  # What has been used
    left: Number  # Below 0, it is overspent
    forecast: Number  # Use by the end of the month at the rate since it began; of a past month, its use


@dataclass(frozen=True, slots=True)
class UserUse(Serializable):
    """What one user's experiments have used."""

    user: str  # Name of the user
    used: Spending  # By what they submitted


@dataclass(frozen=True, slots=True)
class ProjectUse(Serializable):
    """What a project has used in a calendar month, in UTC."""

    project: str  # Name of the project
    month: str  # As 2026-11
    used: Spending  # By all its users
    budgets: list[BudgetUse]  # Those that are set now
    users: list[UserUse]  # Who has used something, the most USD first


@dataclass(frozen=True, slots=True)
class DeviceAllowance:
    """Devices of one hardware kind that an experiment may hold now."""

    devices: float  # Most at a time; a run that shares its device counts as its part of it
    preemptible: bool = True  # Runs beyond it stop, with a checkpoint
    reason: str | None = None  # Who holds or gets what else it could use, in words; None = it has enough

    def covers(self, devices: float) -> bool:
        return devices <= self.devices + _ROUNDING


@dataclass(frozen=True, slots=True)
class DeviceHolder(Serializable):
    """The experiment that holds devices."""

    id: int  # Number of the experiment
    name: str  # Name for people
    owner: str  # Who submitted it
    project: str  # Project that it belongs to


@dataclass(frozen=True, slots=True)
class HeldDevices(Serializable):
    """Devices that one experiment holds for one run at a time."""

    pool: str  # Cluster that has the devices
    hardware: str  # Name in the catalogue
    devices: float  # How many; a part of one where runs share it
    workers: int  # Worker processes on them
    since_s: float  # When they were reserved, Unix time
    node: str | None  # Node of the run's first worker; null = no run is on them, or it is not known
    run_id: int | None  # Run that is on them; null = none, or of a project that the reader does not see
    experiment: DeviceHolder | None
    """Who holds them; null = an experiment of a project that the reader does not see."""


@dataclass(frozen=True, slots=True)
class StartForecast(Serializable):
    """When the next run of a waiting experiment will start, and what decides about it."""

    at_s: Number  # When this was forecast, Unix time
    hardware: str  # Kind of the devices that the run waits for
    devices: Number  # How many it needs
    place: int  # Its place among all experiments, running ones as well, that wait for such devices; from 1
    reason: str  # What it waits for, in words
    ahead: list[int]
    """Experiments that come first, the next one first; at most five, and only those that the reader sees."""
    earliest_s: Number | None
    """The start, Unix time: the early end of an interval; null = not before something changes."""
    median_s: Number | None  # Its middle; null = not in sight
    latest_s: Number | None  # Its late end; null = not in sight
    project: ShareScore  # Where its project stands
    user: ShareScore  # Where its owner stands inside the project


@dataclass(frozen=True, slots=True)
class Yields(Serializable):
    """Runs that would stop at their next checkpoint."""

    experiment_id: int | None  # Whose runs; null = of experiments that the reader does not see
    owner: str | None  # Its owner; null = not seen
    runs: int  # How many of them


@dataclass(frozen=True, slots=True)
class PlannedStart(Serializable):
    """When a spec's first run would start if it were submitted now, and at whose expense."""

    hardware: str  # Kind of the devices that it would wait for
    devices: Number  # How many the run needs
    earliest_s: Number | None
    """Seconds from now to its start: the early end of an interval; null = not in sight."""
    median_s: Number | None  # Its middle; null = not in sight
    latest_s: Number | None  # Its late end; null = not in sight
    reason: str | None  # What it would wait for, in words; null = it would start at once
    ahead: int  # Experiments that would come first for such devices
    behind: int  # Waiting experiments that would come after it, and be later for it
    yields: list[Yields]  # Whose runs would stop for it at their next checkpoint
    words: str  # All of this in one line


@dataclass(frozen=True, slots=True)
class Month:
    """A calendar month in UTC, such as `2026-11`; `end_s` belongs to the next month."""

    name: str
    start_s: float
    end_s: float


def month_of(now_s: float) -> Month:
    now = datetime.fromtimestamp(now_s, UTC)
    start = datetime(now.year, now.month, 1, tzinfo=UTC)
    end = datetime(now.year + now.month // 12, now.month % 12 + 1, 1, tzinfo=UTC)
    return Month(f"{start:%Y-%m}", start.timestamp(), end.timestamp())


def month_named(name: str) -> Month:
    """Raises `ValueError` where the name is not a month's."""
    try:
        return month_of(datetime.fromisoformat(f"{name}-01T00:00:00+00:00").timestamp())
    except ValueError:
        raise ValueError(f"{name!r} is not a month such as 2026-11") from None


@dataclass(frozen=True, slots=True)
class Spending(Serializable):
    """What devices took while they were held, lost work included."""

    usd: float = 0.0  # Their price
    kwh: float = 0.0  # Energy at their rated power
    device_hours: float = 0.0  # Device time, in hours
