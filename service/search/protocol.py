"""The registered search algorithms, and what every one is given and returns. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from service.domain.grid import Point
from trainers.config import Section


class Samples(Enum):
    """Whether a search takes a number of combinations to draw or suggest."""

    unused = "unused"  # The axes alone decide which runs there are
    optional = "optional"  # Unset = every combination
    required = "required"  # The search ends after so many


class Outcome(Enum):
    valued = "valued"  # It has a value
    running = "running"  # Not known yet
    bad = "bad"
    """It cannot be trained, did not fit into memory, diverged or was ended early: worse than every value."""
    unknown = "unknown"  # It was cancelled, or a machine failed: no evidence either way


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A configuration suggested earlier; `value` is the metric, mean over its seeds."""

    point: Point
    outcome: Outcome
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a running run ends early, by which value of the metric, and why."""

    value: float
    stops: bool
    reason: str


class Judge(Protocol):
    """Ends runs early. Its decisions follow from stored series alone, so that a new driver can take over."""

    def judge(self, run: int, series: Sequence[tuple[int, float]], total_steps: int) -> Verdict | None:
        """Judges a run by its (step, value) points so far, ascending; None = there is nothing to judge."""

    def restore(self, ended: Mapping[int, Sequence[tuple[int, float]]], steps: Mapping[int, int]) -> None:
        """Takes in series and total steps of runs that ended before this driver began; called once, first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchInfo:
    name: str
    summary: str
    section: type[Section]
    samples: Samples
    suggests: bool = False  # Runs are stored without axis values, and get them from `Search.suggest` in turn
    ends_runs_early: bool = False  # `Search.judge` returns a judge, and `Search.least_share` is below 1


SEARCHES: dict[str, SearchInfo] = {}  # All values of `search.name`; `service.search` adds ours


def names(wanted: Callable[[SearchInfo], bool]) -> str:
    """Returns `random, asha or tpe`; empty if there are none."""
    listed = [search.name for search in SEARCHES.values() if wanted(search)]
    return " or ".join(filter(None, [", ".join(listed[:-1]), *listed[-1:]]))
