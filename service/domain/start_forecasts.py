"""When waiting experiments will start, before and behind whom, and at whose expense."""

from dataclasses import dataclass

from service.domain.serialization import Number, Serializable
from service.domain.shares import ShareScore


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
