"""Messages of the live streams, as `follow` and `follow_run` yield them."""

from __future__ import annotations

from dataclasses import dataclass

from service.domain.records import Event, ExperimentStatus, LogLine, NewSeries, Run


@dataclass(frozen=True, slots=True)
class Happened:
    """Something happened to the experiment."""

    event: Event


@dataclass(frozen=True, slots=True)
class RunChanged:
    """A run as it is now, with the last value of each metric.

    While it prepares its data, `line` is the newest line of its log, which says how far it is.
    """

    run: Run
    latest: dict[str, float]
    line: LogLine | None = None


@dataclass(frozen=True, slots=True)
class ExperimentChanged:
    """The experiment as it is now."""

    experiment: ExperimentStatus


@dataclass(frozen=True, slots=True)
class Ended:
    """The experiment has ended; the last message."""

    experiment: ExperimentStatus


@dataclass(frozen=True, slots=True)
class NewPoints:
    """Points that were not there before, by metric; a (metric, step) again replaces the old."""

    series: dict[str, NewSeries]


@dataclass(frozen=True, slots=True)
class NewLine:
    """A line of the log."""

    line: LogLine


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run has ended; the last message."""

    run: Run
