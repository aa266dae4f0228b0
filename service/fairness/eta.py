"""When the runs that wait will start, as an interval, and in words why they wait.

`starts` plays the passes (`allowances.divide`) forward three times, with low, median and high durations. What
it cannot know (who submits next, whose share that changes) widens the interval: `Calibration` learns from
past starts by how much. It is conformalised quantile regression (Romano, Patterson and Candes 2019) on the
logarithms of waits: as long as the future is like the past, intervals cover what they should, whatever the
forecasts are worth.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import attrgetter

from service.domain.metrics import Span
from service.domain.shares import ShareScore
from service.fairness.allowances import divide
from service.fairness.shares import charge
from service.fairness.state import (
    USEFUL_S,
    Claimant,
    Demand,
    Lane,
    Situation,
    Waiting,
    WaitingReason,
    lane_of,
)

COVERAGE = 0.9  # Part of the starts that are to fall into their interval
REMEMBERED = 500  # Latest starts that the calibration rests on
FEWEST = 50  # Starts that a calibration needs; `UNCALIBRATED` is used until then
UNCALIBRATED = 4.0  # Factor by which an interval is widened either way before there is a calibration
GRAIN_S = 60.0  # Waits shorter than this count as equally short
MOST_PASSES = 300  # Passes that are played; what has not started by then is not forecast
STEP, LEAST_STEP_S = 1.05, 10.0
"""Least ratio of the times of two passes, and least time between them: the further, the rarer they are."""


@dataclass(frozen=True, slots=True)
class RunningRun:
    """A run that holds devices: seconds until it ends, may be preempted, and can stop at a checkpoint."""

    remaining: Span
    yields_s: float
    checkpoint_s: float


def starts(
    situation: Situation,
    running: Mapping[tuple[int, str], Sequence[RunningRun]],
    times: Mapping[int, Span],
    only: Collection[int] | None = None,
) -> dict[int, Span]:
    """Returns in how many seconds the next run of each waiting experiment starts, before calibration.

    They are by experiment; infinite = not before something changes.
    Pools of hardware in which none of the experiments waits stay as they are. `running` has the runs that
    hold devices, by experiment and hardware, those that yield first in front; `times` are of one run each.
    `only` names the experiments to forecast: the fewer and the nearer, the less is played.
    """
    waiting = {each.id for each in situation.claimants if any(demand.waiting for demand in each.demands)}
    wanted = waiting if only is None else waiting & set(only)
    ends = map(attrgetter, ("low", "middle", "high"))
    played = [_play(situation, running, times, end, wanted) for end in ends]
    return {id: Span(*sorted(each.get(id, math.inf) for each in played)) for id in wanted}


@dataclass(slots=True)
class _Run:
    """A run while passes are played; all times are Unix seconds."""

    end_s: float
    yields_s: float
    checkpoint_s: float
    stops: bool = False

    @property
    def gone_s(self) -> float:
        return min(self.end_s, self.checkpoint_s) if self.stops else self.end_s


@dataclass(slots=True)
class _Job:
    claimant: Claimant
    demand: Demand
    duration_s: float
    runs: list[_Run]
    waiting: int
    served_s: float | None
    first_s: float | None = None  # When the first of the waiting runs starts

    def claim(self, now_s: float) -> Claimant:
        useful = sum(run.yields_s <= now_s for run in self.runs)
        demand = Demand(self.demand.hardware, self.demand.devices, len(self.runs), self.waiting, useful)
        return replace(self.claimant, demands=(demand,), served_s=self.served_s)

    def serve(self, at_s: float) -> None:
        self.waiting -= 1
        self.served_s = at_s
        self.first_s = at_s if self.first_s is None else self.first_s

    def change(self, now_s: float, count: int) -> None:
        """Starts runs, or has some stop at their next checkpoint, until there are `count`."""
        for _ in range(count - len(self.runs)):
            self.serve(now_s)
            useful_s = now_s + USEFUL_S
            self.runs.append(_Run(now_s + self.duration_s, useful_s, useful_s))
        self.runs.sort(key=lambda run: (run.yields_s > now_s, run.checkpoint_s))
        for place, run in enumerate(self.runs):
            run.stops = place < len(self.runs) - count
            run.checkpoint_s = max(run.checkpoint_s, now_s)

    def advance(self, to_s: float) -> None:
        """Ends runs; between passes, the experiment's next run takes over the devices of the last one."""
        for run in [each for each in self.runs if each.gone_s <= to_s]:
            while run.end_s < to_s and self.waiting and not run.stops:
                self.serve(run.end_s)
                run.end_s += self.duration_s
            if run.gone_s <= to_s:
                self.waiting += run.gone_s < run.end_s
                self.runs.remove(run)


def _play(
    situation: Situation,
    running: Mapping[tuple[int, str], Sequence[RunningRun]],
    times: Mapping[int, Span],
    end: Callable[[Span], float],
    wanted: Set[int],
) -> dict[int, float]:
    """Returns the seconds until the next run of experiments starts; without those that never do."""
    now_s, usage = situation.now_s, situation.usage
    demands = [(claimant, demand) for claimant in situation.claimants for demand in claimant.demands]
    lanes = {lane_of(*each) for each in demands if each[0].id in wanted and each[1].waiting}
    jobs: list[_Job] = []
    for claimant, demand in demands:
        if lane_of(claimant, demand) in lanes:
            runs = [
                _Run(now_s + end(run.remaining), now_s + run.yields_s, now_s + run.checkpoint_s)
                for run in running.get((claimant.id, demand.hardware), ())
            ]
            duration_s = end(times[claimant.id])
            jobs.append(_Job(claimant, demand, duration_s, runs, demand.waiting, claimant.served_s))
    for _ in range(MOST_PASSES):
        claimants = [job.claim(now_s) for job in jobs]
        division = divide(replace(situation, now_s=now_s, claimants=claimants, usage=usage))
        rates: defaultdict[tuple[str, str, Lane], float] = defaultdict(float)
        for job in jobs:
            devices = division.allowances.get(job.claimant.id, {}).get(job.demand.hardware, 0.0)
            job.change(now_s, round(devices / job.demand.devices))
            lane = lane_of(job.claimant, job.demand)
            usd_per_hour = len(job.runs) * job.demand.devices * situation.capacity.price(lane.hardware)
            rates[job.claimant.project, job.claimant.user, lane] += usd_per_hour
        starting = {job.claimant.id for job in jobs if job.first_s is not None}
        events = [run.gone_s for job in jobs for run in job.runs]
        events += [run.yields_s for job in jobs for run in job.runs if run.yields_s > now_s]
        if wanted <= starting or not events:
            break
        least_s = max(LEAST_STEP_S, (STEP - 1.0) * (now_s - situation.now_s))
        next_s = max(min(events), now_s + least_s)
        usage = charge(usage, next_s, rates, next_s - now_s)
        now_s = next_s
        for job in jobs:
            job.advance(now_s)
    first: dict[int, float] = {}
    for job in jobs:
        if job.first_s is not None:
            start_s = job.first_s - situation.now_s
            first[job.claimant.id] = min(start_s, first.get(job.claimant.id, start_s))
    return first


@dataclass(frozen=True, slots=True)
class Calibration:
    """How much too narrow intervals were, by the reason of the wait.

    Holds logarithms of real waits over forecast earliest and latest ones, in pairs, the newest last.
    """

    errors: Mapping[WaitingReason, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def learned(self, reason: WaitingReason, forecast: Span, waited_s: float) -> Calibration:
        """Returns the calibration with one more start, `waited_s` after its forecast."""
        if not math.isfinite(forecast.high):
            return self
        error = _log_ratio(waited_s, forecast.low), _log_ratio(waited_s, forecast.high)
        return Calibration({**self.errors, reason: (*self.errors.get(reason, ()), error)[-REMEMBERED:]})

    def widened(self, reason: WaitingReason, forecast: Span) -> Span:
        """Returns the interval into which `COVERAGE` of the starts fall."""
        errors = self.errors.get(reason, ())
        if len(errors) < FEWEST:
            early, late = -math.log(UNCALIBRATED), math.log(UNCALIBRATED)
        else:
            tail = (1.0 - COVERAGE) / 2.0
            early = _quantile([each for each, _ in errors], tail)
            late = _quantile([each for _, each in errors], 1.0 - tail)
        earliest = max(0.0, (forecast.low + GRAIN_S) * math.exp(early) - GRAIN_S)
        latest = max(earliest, (forecast.high + GRAIN_S) * math.exp(late) - GRAIN_S)
        return Span(earliest, min(max(forecast.middle, earliest), latest), latest)


def _log_ratio(waited_s: float, forecast_s: float) -> float:
    return math.log((waited_s + GRAIN_S) / (forecast_s + GRAIN_S))


def _quantile(values: Sequence[float], part: float) -> float:
    """Returns the quantile with the correction for a finite sample, outwards."""
    ordered, count = sorted(values), len(values)
    rank = math.ceil((count + 1) * part) if part > 0.5 else math.floor((count + 1) * part)
    return ordered[min(count, max(1, rank)) - 1]


def reason_in_words(waiting: Waiting, project: str) -> str:
    detail = waiting.detail
    words = {
        WaitingReason.budget: f"the project starts nothing more: {detail}",
        WaitingReason.user_cap: f"the user's limit is reached ({detail} at a time)",
        WaitingReason.ceiling: f"the project's ceiling is reached ({detail} of {waiting.hardware})",
        WaitingReason.no_capacity: "the cluster has fewer devices of this kind than the run needs",
        WaitingReason.reclaiming: "others stop for it at their next checkpoint",
        WaitingReason.reserved: "free devices are kept for a larger run that has waited long",
        WaitingReason.share: _over(waiting),
        WaitingReason.places: f"as many experiments run as may at a time ({detail})",
        WaitingReason.busy: "all devices are in use, and no one holds more than their share of them",
    }[waiting.reason].replace("the project", f"project {project}", 1)
    return f"waits for {waiting.devices:g} {waiting.hardware}: {words}"


def start_in_words(start: Span) -> str:
    if start.low == float("inf"):
        return "no start in sight"
    if start.high == float("inf"):
        return f"starts in {duration_in_words(start.low)} at the earliest"
    low, high = duration_in_words(start.low), duration_in_words(start.high)
    return f"starts in about {low}" if low == high else f"starts in {low} to {high}"


def duration_in_words(seconds: float) -> str:
    """Returns a duration in the largest unit of which there are two."""
    for unit_s, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _over(waiting: Waiting) -> str:
    if waiting.project_score.held_usd_per_hour > waiting.project_score.entitled_usd_per_hour:
        return f"the project is over its share ({_amounts(waiting.project_score)})"
    return f"its user is over their share of the project ({_amounts(waiting.user_score)})"


def _amounts(score: ShareScore) -> str:
    return (
        f"devices of {score.held_usd_per_hour:.2f} USD/h, entitled to {score.entitled_usd_per_hour:.2f}; "
        f"{score.used_part:.0%} of recent use, entitled to {score.entitled_part:.0%}"
    )
