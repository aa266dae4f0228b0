"""How fairly devices are shared over 30 days: 20 people, 5 projects, 3 kinds of hardware, a simulated clock.

    python -m benchmarks.fairness [--days D] [--seeds S] [--smoke]

The scheduler's own code (`service.fairness`) divides 56 devices on a trace of submissions; a FIFO queue
divides the same devices on the same trace in the same process. Devices are counted, not placed: there are
no nodes.

**Trace.** Six people never pause: of each kind of device they submit experiments whenever fewer than 40 runs
of theirs wait for it (a fifth of their experiments are one run, the others grids of 2 to 1,000, log-uniform).
The other 14 submit in office hours with exponential gaps (three fifths one run, the others grids of 2 to 40),
for some kinds more than their share. A run takes 1, 2, 4 or 8 devices of one kind for a log-normal time
around 40 minutes (sigma 0.8 between experiments, 0.3 inside); forecasts of it are off by a log-normal factor
(sigma 0.5). A tenth of the experiments has low priority; those do not count among the 40. One person gives
each experiment one of three priorities in turn (low, normal, high). Checkpoints are 5 to 20 minutes apart. A
run that is preempted stops at its next checkpoint, and costs its restart, 30 to 120 s, when it starts again.
One project is guaranteed 2 of the 16 A100; a guarantee of an H100 would forbid the runs that need all eight.
FIFO gets the submissions at the times at which they were made under fair sharing.

**FIFO**: by age alone; a run that does not fit lets those behind it pass (the fullest cluster that FIFO can
have).

**Entitlement.** What can be had is what the cluster delivered, hour by hour and kind by kind, and what can be
used is work that has been submitted by then. Of that everyone is entitled to the weighted max-min division:
what is delivered goes to those who have work and have received least for their weight, where what was
received halves in 7 days, as if devices could be split at will and runs moved at no cost (`Fluid`). So nobody
is entitled to more than they asked for, or before they asked; who was away catches up; and lumps,
checkpoints, restarts, and the scheduler's own bounds on what counts are errors. Projects are divided among
each other, users equally among those of what their project got. Each kind is divided by itself, for the
reasons in `service.fairness.shares`. Those who never pause are taken to have endless work. What low priority
got counts as asked for when it was got: it is not entitled to others' time. `share_error_pct` is the largest
difference of what someone received from that, in percent of it, both in USD at list prices over all kinds; of
the projects and users that have runs waiting in at least 99% of all passes after the first day: for the
others it is their own pauses that decide.

**Figures**, the worst of the seeds each, `eta_width` the median: `share_error_pct`; `starved`: experiments of
which nothing started for 72 h while runs of them waited; `starved_within_share`: those of people who asked,
at all priorities together, for no more hours of such devices than an equal part of their project's share has;
`utilisation_vs_fifo`: device time used over FIFO's; `priority_order_pct`: of the runs that the person with
three priorities started, those for which no run of theirs of higher priority waited that needs no more
devices of the kind (low priority that has waited for a day counts as normal); `priority_wait_h`: their median
wait for the first start, by priority; `small_job_wait_ratio`: median wait of one-run experiments over FIFO's;
`preemption_waste_pct`: device time spent on restarts after a preemption, of all; `eta_covered_pct`: starts
within the interval that was forecast when they were submitted (every third experiment; one without a latest
start is a miss, and is counted as `without_eta`); `eta_width`: its latest end over its earliest, each with a
minute more; `pass_ms_100k`: a pass over 100 projects, 1,000 users and 100,000 queued runs of 1,000
experiments (median of 15); a scheduler gives it the first 16 of those that wait.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.options import Benchmark
from service.domain.access import DEFAULT_POOL
from service.domain.metrics import Span
from service.fairness.allowances import divide
from service.fairness.eta import Calibration, RunningRun, starts
from service.fairness.shares import HALF_LIFE_S, charge
from service.fairness.standings import Division
from service.fairness.state import (
    PROMOTED_AFTER_S,
    PROMOTED_TO,
    USEFUL_RESTARTS,
    USEFUL_S,
    Capacity,
    Claimant,
    Demand,
    Lane,
    ProjectTerms,
    Situation,
    UsageByUser,
    WaitingReason,
    may_yield,
)

BENCHMARK = Benchmark(
    "fairness",
    __doc__,
    fields=(
        "share_error_pct", "starved", "starved_within_share", "utilisation_vs_fifo", "small_job_wait_ratio",
        "preemption_waste_pct", "eta_covered_pct", "eta_width", "priority_order_pct", "pass_ms_100k",
    ),
    also=("days", "seeds"),
)  # fmt: skip
DEVICES = {"h100": 8, "a100": 16, "v100": 32}
PRICES_USD_PER_HOUR = {"h100": 3.0, "a100": 1.8, "v100": 0.7}
WEIGHTS = {"search": 3.0, "nlp": 2.0, "vision": 1.0, "speech": 1.0, "theses": 1.0}
GUARANTEED = {"theses": {"a100": 2.0}}
PEOPLE_PER_PROJECT = 4
ALWAYS_BUSY = {"search": 2, "nlp": 2, "vision": 2}
"""People of each project who never pause."""
LOW, NORMAL, HIGH = 25, 50, 75
OF_THREE_PRIORITIES = "vision-3"
"""The person whose experiments have low, normal and high priority in turn; asks for less than their share."""
AHEAD = 40
"""Runs of each kind that those keep waiting."""
TICK_S = 60.0
"""Time between passes: devices that become free wait for the next one."""
STEP_S = 3600.0
"""Time in which entitlement is computed at once."""
STARVED_H = 72.0
FORECAST_EVERY = 3
"""Of so many experiments, the start of one is forecast."""
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Submission:
    """An experiment of the trace."""

    id: int
    project: str
    user: str
    at_s: float
    hardware: str
    devices: int
    works_s: tuple[float, ...]
    forecast: Span
    checkpoint_s: float
    restart_s: float
    priority: int


Trace = Mapping[tuple[str, str], Sequence[Submission]]
"""Submissions by (project, user)."""


@dataclass(slots=True)
class Run:
    """A run that has begun, or was preempted."""

    of: Submission
    left_s: float
    restart_s: float = 0.0
    started_s: float = 0.0
    stops: bool = False

    def ends_s(self) -> float:
        return self.started_s + self.restart_s + self.left_s

    def next_checkpoint_s(self, now_s: float) -> float:
        every = self.of.checkpoint_s
        worked_s = max(0.0, now_s - self.started_s - self.restart_s)
        return self.started_s + self.restart_s + every * math.ceil(worked_s / every + 1e-9)


@dataclass(slots=True)
class Experiment:
    """An experiment at work."""

    of: Submission
    begun: int = 0
    running: list[Run] = field(default_factory=list)
    preempted: list[Run] = field(default_factory=list)
    first_start_s: float | None = None
    served_s: float | None = None
    longest_s: float = 0.0

    @property
    def waiting(self) -> int:
        return len(self.of.works_s) - self.begun + len(self.preempted)

    def start(self, now_s: float) -> Run:
        if self.preempted:
            run = self.preempted.pop()
            run.restart_s = self.of.restart_s
        else:
            run = Run(self.of, self.of.works_s[self.begun])
            self.begun += 1
        run.started_s, run.stops = now_s, False
        self.running.append(run)
        self.longest_s = max(self.longest_s, now_s - (self.served_s or self.of.at_s))
        self.served_s = now_s
        if self.first_start_s is None:
            self.first_start_s = now_s
        return run


class People:
    """Submissions as they come: of people in office hours, and of those who never pause."""

    def __init__(self, seed: int, days: float) -> None:
        self._random = random.Random(seed)
        self._next = 0
        self._end_s = days * DAY_S
        self.busy = {
            (project, f"{project}-{n}") for project, count in ALWAYS_BUSY.items() for n in range(count)
        }
        self.trace: dict[tuple[str, str], list[Submission]] = {}
        for project in WEIGHTS:
            for n in range(PEOPLE_PER_PROJECT):
                self.trace[project, f"{project}-{n}"] = list(self._of(project, f"{project}-{n}"))

    def _of(self, project: str, user: str) -> Iterable[Submission]:
        rng = self._random
        if (project, user) in self.busy:
            # In order; each is submitted as soon as few enough of the former wait.
            hours = dict.fromkeys(DEVICES, 0.0)
            while any(hours[name] < count * self._end_s / 3600.0 for name, count in DEVICES.items()):
                made = self._submission(project, user, 0.0, most=1000, alone=0.2)
                hours[made.hardware] += sum(made.works_s) * made.devices / 3600.0
                yield made
            return
        at_s = rng.expovariate(1 / (3 * 3600.0))
        while at_s < self._end_s:
            if at_s % DAY_S < 9 * 3600.0 and at_s // DAY_S % 7 < 5:
                yield self._submission(project, user, at_s, most=40, alone=0.6)
            at_s += rng.expovariate(1 / (2.5 * 3600.0))

    def _submission(self, project: str, user: str, at_s: float, *, most: int, alone: float) -> Submission:
        rng = self._random
        runs = 1 if rng.random() < alone else round(math.exp(rng.uniform(math.log(2), math.log(most))))
        hardware = rng.choices(list(DEVICES), [0.3, 0.3, 0.4])[0]
        devices = rng.choices([1, 2, 4, 8], [0.75, 0.15, 0.07, 0.03])[0]
        median_s = min(8 * 3600.0, max(120.0, rng.lognormvariate(math.log(2400.0), 0.8)))
        forecast_s = median_s * rng.lognormvariate(0.0, 0.5)
        self._next += 1
        return Submission(
            self._next,
            project,
            user,
            at_s,
            hardware,
            devices,
            tuple(median_s * rng.lognormvariate(0.0, 0.3) for _ in range(runs)),
            Span(forecast_s / 2.3, forecast_s, forecast_s * 2.3),
            rng.uniform(300.0, 1200.0),
            rng.uniform(30.0, 120.0),
            self._priority(user, rng.choices([LOW, NORMAL], [0.1, 0.9])[0]),
        )

    def _priority(self, user: str, drawn: int) -> int:
        return (LOW, NORMAL, HIGH)[self._next % 3] if user == OF_THREE_PRIORITIES else drawn


class Cluster:
    """Devices, what runs on them, and the clock; `Fair` and `Fifo` divide them."""

    def __init__(
        self,
        trace: Trace,
        busy: Set[tuple[str, str]],
        days: float,
        endless: Set[tuple[str, str]] | None = None,
    ) -> None:
        self.now_s, self._end_s = 0.0, days * DAY_S
        self._busy = {
            (*owner, hardware): [each for each in reversed(trace[owner]) if each.hardware == hardware]
            for owner in sorted(busy)
            for hardware in DEVICES
        }
        later = [each for key, submitted in trace.items() if key not in busy for each in submitted]
        self._arrivals = sorted(later, key=lambda each: (each.at_s, each.id), reverse=True)
        self.experiments: dict[int, Experiment] = {}
        self.ended: list[Experiment] = []
        self.endless = busy if endless is None else endless
        self.used_s: defaultdict[int, defaultdict[tuple[str, str, str], float]] = defaultdict(
            lambda: defaultdict(float)
        )
        """Device time in each step of `STEP_S`, by (project, user, hardware)."""
        self.asked_s: defaultdict[int, defaultdict[tuple[str, str, str], float]] = defaultdict(
            lambda: defaultdict(float)
        )
        self.wasted_s = 0.0
        self.idle_passes: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.passes = 0

    def run(self) -> None:
        """Runs until the last day is over."""
        while self.now_s < self._end_s:
            arrived = self._arrive()
            self.divide(arrived)
            self._count()
            self._advance()

    def divide(self, arrived: Sequence[Experiment]) -> None:
        raise NotImplementedError

    def begin(self, experiment: Experiment, count: int) -> None:
        for _ in range(count):
            experiment.start(self.now_s)

    def free(self) -> dict[str, float]:
        free = {hardware: float(count) for hardware, count in DEVICES.items()}
        for each in self.experiments.values():
            free[each.of.hardware] -= each.of.devices * len(each.running)
        return free

    def _arrive(self) -> list[Experiment]:
        new = []
        while self._arrivals and self._arrivals[-1].at_s <= self.now_s:
            new.append(self._arrivals.pop())
        waiting: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        for each in self.experiments.values():
            if each.of.priority >= NORMAL:
                waiting[each.of.project, each.of.user, each.of.hardware] += each.waiting
        for (*owner, hardware), trace in self._busy.items():
            while trace and waiting[*owner, hardware] < AHEAD:
                made = trace.pop()
                waiting[*owner, hardware] += len(made.works_s) if made.priority >= NORMAL else 0
                new.append(made)
        found = []
        for each in new:
            dated = Submission(
                each.id, each.project, each.user, self.now_s, each.hardware, each.devices, each.works_s,
                each.forecast, each.checkpoint_s, each.restart_s, each.priority,
            )  # fmt: skip
            if each.priority >= NORMAL:
                asked = self.asked_s[int(self.now_s / STEP_S)]
                asked[each.project, each.user, each.hardware] += sum(each.works_s) * each.devices
            found.append(Experiment(dated))
            self.experiments[each.id] = found[-1]
        return found

    def _count(self) -> None:
        if self.now_s >= DAY_S:
            self.passes += 1
            waiting = {(e.of.project, e.of.user) for e in self.experiments.values() if e.waiting}
            for project in WEIGHTS:
                if not any(key[0] == project for key in waiting):
                    self.idle_passes[project, ""] += 1
                for n in range(PEOPLE_PER_PROJECT):
                    if (project, f"{project}-{n}") not in waiting:
                        self.idle_passes[project, f"{project}-{n}"] += 1

    def _advance(self) -> None:
        """Lets time pass up to the next tick at which something has happened, and ends what is over."""
        following = min(
            (
                min(run.ends_s(), run.next_checkpoint_s(self.now_s) if run.stops else math.inf)
                for each in self.experiments.values()
                for run in each.running
            ),
            default=math.inf,
        )
        if self._arrivals:
            following = min(following, self._arrivals[-1].at_s)
        before_s = self.now_s
        ticks = max(1, math.ceil((min(following, self._end_s) - self.now_s) / TICK_S))
        self.now_s = min(self._end_s, self.now_s + ticks * TICK_S)
        step = int(before_s / STEP_S)
        for id, each in list(self.experiments.items()):
            of = each.of
            key = of.project, of.user, of.hardware
            for run in list(each.running):
                stop_s = run.next_checkpoint_s(before_s) if run.stops else math.inf
                end_s = min(run.ends_s(), stop_s)
                used_s = of.devices * (min(end_s, self.now_s) - before_s)
                self.used_s[step][key] += used_s
                if of.priority < NORMAL:
                    self.asked_s[step][key] += used_s
                if end_s > self.now_s:
                    continue
                each.running.remove(run)
                self.wasted_s += run.restart_s * of.devices
                if stop_s < run.ends_s():
                    run.left_s -= max(0.0, stop_s - run.started_s - run.restart_s)
                    each.preempted.append(run)
            if not each.running and not each.waiting:
                self.ended.append(self.experiments.pop(id))


class Fifo(Cluster):
    """By age; a run that does not fit lets those behind it pass."""

    def divide(self, arrived: Sequence[Experiment]) -> None:
        free = self.free()
        for each in self.experiments.values():
            count = min(each.waiting, int(free[each.of.hardware] / each.of.devices))
            if count > 0:
                free[each.of.hardware] -= count * each.of.devices
                self.begin(each, count)


class Fair(Cluster):
    """As the scheduler does it."""

    def __init__(self, trace: Trace, busy: Set[tuple[str, str]], days: float) -> None:
        super().__init__(trace, busy, days)
        lanes = {Lane(DEFAULT_POOL, name): float(count) for name, count in DEVICES.items()}
        self._capacity = Capacity(lanes, PRICES_USD_PER_HOUR)
        self._terms = {
            name: ProjectTerms(weight, GUARANTEED.get(name, {})) for name, weight in WEIGHTS.items()
        }
        self._usage: UsageByUser = {}
        self._charged_s = 0.0
        self._rates: dict[tuple[str, str, Lane], float] = {}
        self._calibration = Calibration()
        self._forecasts: dict[int, tuple[WaitingReason, Span]] = {}
        self.etas: list[tuple[Span, float]] = []
        self.preemptions = 0
        self.starts_in_order: list[bool] = []
        """Of each run started by the person with three priorities: whether none of theirs came first."""

    def divide(self, arrived: Sequence[Experiment]) -> None:
        self._usage = charge(self._usage, self.now_s, self._rates, self.now_s - self._charged_s)
        claimants = [self._claimant(each) for each in self.experiments.values()]
        division = divide(Situation(self.now_s, self._capacity, claimants, self._terms, self._usage))
        theirs = {
            each.of.id: self._counts_as(each)
            for each in self.experiments.values()
            if each.of.user == OF_THREE_PRIORITIES
        }
        started: list[tuple[Experiment, int]] = []
        for each in self.experiments.values():
            devices = division.allowances.get(each.of.id, {}).get(each.of.hardware, 0.0)
            runs = round(devices / each.of.devices)
            self._stop(each, len(each.running) - runs)
            if runs > len(each.running):
                started.append((each, runs - len(each.running)))
                self.begin(*started[-1])
                self._learn(each)
        for each, count in started:
            if each.of.id in theirs:
                passed = (
                    priority > theirs[each.of.id] and self._could_have(self.experiments[id], each)
                    for id, priority in theirs.items()
                )
                self.starts_in_order += [not any(passed)] * count
        rates: defaultdict[tuple[str, str, Lane], float] = defaultdict(float)
        for each in self.experiments.values():
            of, usd = each.of, PRICES_USD_PER_HOUR[each.of.hardware]
            lane = Lane(DEFAULT_POOL, of.hardware)
            rates[of.project, of.user, lane] += len(each.running) * of.devices * usd
        self._rates, self._charged_s = dict(rates), self.now_s
        new = [each for each in arrived if each.first_start_s is None and each.of.id % FORECAST_EVERY == 0]
        if new:
            self._forecast(division, new)

    def _counts_as(self, each: Experiment) -> int:
        """Returns what an experiment's priority counts as for its turn."""
        since_s = each.of.at_s if each.served_s is None else each.served_s
        is_old = self.now_s - since_s >= PROMOTED_AFTER_S
        return max(each.of.priority, PROMOTED_TO) if is_old else each.of.priority

    @staticmethod
    def _could_have(waiting: Experiment, started: Experiment) -> bool:
        """Returns whether an experiment waits for devices that another's run has got."""
        kind = waiting.of.hardware == started.of.hardware
        return bool(waiting.waiting) and kind and waiting.of.devices <= started.of.devices

    def _claimant(self, each: Experiment) -> Claimant:
        of = each.of
        ready = [run for run in each.running if may_yield(self.now_s, run.started_s, of.restart_s)]
        demand = Demand(
            of.hardware,
            float(of.devices),
            len(each.running),
            each.waiting,
            len(ready),
        )
        return Claimant(of.id, of.project, of.user, of.priority, of.at_s, (demand,), served_s=each.served_s)

    def _stop(self, each: Experiment, count: int) -> None:
        """Marks the runs that stop at their next checkpoint, and only those."""

        def order(run: Run) -> tuple[bool, float]:
            ready = may_yield(self.now_s, run.started_s, each.of.restart_s)
            return not ready, run.next_checkpoint_s(self.now_s)

        for place, run in enumerate(sorted(each.running, key=order)):
            self.preemptions += place < count and not run.stops
            run.stops = place < count

    def _forecast(self, division: Division, new: Sequence[Experiment]) -> None:
        reasons = {each.experiment_id: each.reason for each in division.waiting()}
        situation = Situation(
            self.now_s,
            self._capacity,
            [self._claimant(each) for each in self.experiments.values()],
            self._terms,
            self._usage,
        )
        running = {
            (each.of.id, each.of.hardware): [
                RunningRun(
                    self._remaining(each.of, run),
                    run.started_s + max(USEFUL_S, USEFUL_RESTARTS * each.of.restart_s) - self.now_s,
                    run.next_checkpoint_s(self.now_s) - self.now_s,
                )
                for run in each.running
            ]
            for each in self.experiments.values()
        }
        times = {id: each.of.forecast for id, each in self.experiments.items()}
        found = starts(situation, running, times, {each.of.id for each in new})
        for each in new:
            self._forecasts[each.of.id] = reasons[each.of.id], found[each.of.id]

    def _remaining(self, of: Submission, run: Run) -> Span:
        worked_s = self.now_s - run.started_s
        low, median, high = (
            max(end - worked_s, 0.2 * end) for end in (of.forecast.low, of.forecast.middle, of.forecast.high)
        )
        return Span(low, median, high)

    def _learn(self, each: Experiment) -> None:
        if each.of.id not in self._forecasts or each.first_start_s is None:
            return
        reason, forecast = self._forecasts.pop(each.of.id)
        waited_s = each.first_start_s - each.of.at_s
        self.etas.append((self._calibration.widened(reason, forecast), waited_s))
        self._calibration = self._calibration.learned(reason, forecast, waited_s)


class Fluid:
    """An ideal division of a lane among nodes of the tree: as if devices could be split at will.

    What is delivered goes to those who have work and have received least for their weight, where what was
    received halves as the scheduler's accounts do. It is the weighted max-min division of what could be had:
    nobody gets work done that they have not asked for yet.

    Args:
        weights: of all who take part.
        endless: those whose work never ends.
    """

    def __init__(self, weights: Mapping[str, float], endless: Set[str]) -> None:
        self._weights, self._endless = weights, endless
        self._counted = dict.fromkeys(weights, 0.0)
        self._left = dict.fromkeys(weights, 0.0)
        self._owed = 0.0
        self.received = dict.fromkeys(weights, 0.0)

    def step(self, seconds: float, asked: Mapping[str, float], delivered: float) -> None:
        """Divides what was delivered in a while."""
        names = list(self._weights)
        weights = np.array([self._weights[name] for name in names])
        for name in names:
            self._counted[name] *= 0.5 ** (seconds / HALF_LIFE_S)
            self._left[name] += asked.get(name, 0.0)
        counted = np.array([self._counted[name] for name in names])
        most = np.array([math.inf if name in self._endless else self._left[name] for name in names])
        there = delivered + self._owed
        low, high = 0.0, float(np.max(counted / weights) + there / np.min(weights) + 1.0)
        for _ in range(60):
            level = (low + high) / 2
            given = np.minimum(most, np.maximum(0.0, weights * level - counted))
            low, high = (level, high) if given.sum() < there else (low, level)
        # Real runs are later than ideal ones: what is delivered of work that is done here serves later work.
        self._owed = max(0.0, there - float(given.sum()))
        for name, amount in zip(names, given, strict=True):
            self._counted[name] += float(amount)
            self._left[name] = max(0.0, self._left[name] - float(amount))
            self.received[name] += float(amount)


def share_errors(cluster: Cluster) -> dict[str, float]:
    """Returns the relative difference of received from entitled, of all who always have work."""
    received: defaultdict[str, float] = defaultdict(float)
    due: defaultdict[str, float] = defaultdict(float)
    users = {project: [f"{project}-{number}" for number in range(PEOPLE_PER_PROJECT)] for project in WEIGHTS}
    endless = {user for number, user in cluster.endless}
    for hardware, usd_per_hour in PRICES_USD_PER_HOUR.items():
        usd = usd_per_hour / 3600.0
        projects = Fluid(WEIGHTS, {project for project, _ in cluster.endless})
        people = {project: Fluid(dict.fromkeys(names, 1.0), endless) for project, names in users.items()}
        for number in range(max(cluster.used_s, default=0) + 1):
            used, asked = cluster.used_s[number], cluster.asked_s[number]

            def of(amounts: Mapping[tuple[str, str, str], float], project: str) -> dict[str, float]:
                return {
                    user: usd * amounts.get((project, user, hardware), 0.0)  # noqa: B023
                    for user in users[project]
                }

            sums = {project: sum(of(used, project).values()) for project in WEIGHTS}
            projects.step(
                STEP_S, {name: sum(of(asked, name).values()) for name in WEIGHTS}, sum(sums.values())
            )
            for name, fluid in people.items():
                fluid.step(STEP_S, of(asked, name), sums[name])
                received[name] += sums[name]
                for user, amount in of(used, name).items():
                    received[user] += amount
        for fluid in (projects, *people.values()):
            for name, amount in fluid.received.items():
                due[name] += amount

    def is_busy(project: str, user: str = "") -> bool:
        return cluster.idle_passes[project, user] <= 0.01 * cluster.passes

    busy = [project for project in WEIGHTS if is_busy(project)]
    busy += [user for project, names in users.items() for user in names if is_busy(project, user)]
    return {name: abs(received[name] - due[name]) / due[name] for name in busy if due[name]}


def simulate(seed: int, days: float) -> dict[str, Any]:
    """Returns the figures of one trace."""
    people = People(seed, days)
    fair = Fair(people.trace, people.busy, days)
    fair.run()
    submitted = [each.of for each in (*fair.experiments.values(), *fair.ended)]
    fifo = Fifo({("", ""): submitted}, frozenset(), days, people.busy)
    fifo.run()

    def starved(cluster: Cluster) -> list[Submission]:
        return [
            each.of
            for each in (*cluster.experiments.values(), *cluster.ended)
            if max(each.longest_s, cluster.now_s - (each.served_s or each.of.at_s) if each.waiting else 0.0)
            > STARVED_H * 3600.0
        ]

    waits = [_small_waits(cluster) for cluster in (fair, fifo)]
    both = waits[0].keys() & waits[1].keys()
    medians = [statistics.median(each[id] for id in both) if both else 0.0 for each in waits]
    used, fifo_used = (
        sum(amount for step in cluster.used_s.values() for amount in step.values())
        for cluster in (fair, fifo)
    )
    errors = share_errors(fair)
    covered = [start.low <= waited <= start.high < math.inf for start, waited in fair.etas]
    return {
        "share_error_pct": 100 * max(errors.values(), default=0.0),
        "share_errors_pct": {name: round(100 * value, 2) for name, value in errors.items()},
        "fifo_share_error_pct": 100 * max(share_errors(fifo).values(), default=0.0),
        "starved": len(starved(fair)),
        "starved_within_share": sum(within_share(each, fair, days) for each in starved(fair)),
        "fifo_starved": len(starved(fifo)),
        "fifo_starved_within_share": sum(within_share(each, fifo, days) for each in starved(fifo)),
        "utilisation": used / (sum(DEVICES.values()) * days * DAY_S),
        "utilisation_vs_fifo": used / fifo_used,
        "small_job_wait_s": medians[0],
        "fifo_small_job_wait_s": medians[1],
        "small_job_wait_ratio": medians[0] / medians[1] if medians[1] else 0.0,
        "priority_order_pct": 100 * statistics.mean(fair.starts_in_order or [True]),
        "priority_wait_h": _waits_by_priority(fair),
        "starts_with_priorities": len(fair.starts_in_order),
        "preemptions": fair.preemptions,
        "preemption_waste_pct": 100 * fair.wasted_s / used,
        "etas": len(covered),
        "without_eta": sum(start.high == math.inf for start, _ in fair.etas),
        "eta_covered_pct": 100 * statistics.mean(covered) if covered else 100.0,
        "eta_width": statistics.median(
            [(start.high + 60) / (start.low + 60) for start, _ in fair.etas] or [1.0]
        ),
        "experiments": len(fair.experiments) + len(fair.ended),
    }


def within_share(of: Submission, cluster: Cluster, days: float) -> bool:
    """Returns whether a person asked for no more of a kind of device than the equal part of a share.

    Work of every priority counts from its submission, done or not.
    """
    owner = of.project, of.user, of.hardware
    asked_s = sum(
        sum(each.of.works_s) * each.of.devices
        for each in (*cluster.experiments.values(), *cluster.ended)
        if (each.of.project, each.of.user, each.of.hardware) == owner
    )
    part = WEIGHTS[of.project] / sum(WEIGHTS.values()) / PEOPLE_PER_PROJECT
    return asked_s <= part * DEVICES[of.hardware] * days * DAY_S


def _waits_by_priority(cluster: Cluster) -> dict[int, float]:
    """Returns the median hours until the first start, of the person with three priorities."""
    waits: defaultdict[int, list[float]] = defaultdict(list)
    for each in (*cluster.experiments.values(), *cluster.ended):
        if each.of.user == OF_THREE_PRIORITIES:
            started_s = cluster.now_s if each.first_start_s is None else each.first_start_s
            waits[each.of.priority].append((started_s - each.of.at_s) / 3600.0)
    return {priority: round(statistics.median(found), 2) for priority, found in sorted(waits.items())}


def _small_waits(cluster: Cluster) -> dict[int, float]:
    """Waits of experiments of one run of people who pause, by id; until the end where they never started."""
    return {
        each.of.id: (cluster.now_s if each.first_start_s is None else each.first_start_s) - each.of.at_s
        for each in (*cluster.experiments.values(), *cluster.ended)
        if len(each.of.works_s) == 1 and each.of.at_s < cluster.now_s - DAY_S / 2
    }


def pass_ms(runs: int, experiments: int, rounds: int) -> float:
    """Returns the median time of a pass over 100 projects and 1,000 users, in ms.

    Every pass is over a cluster of 3 x 256 devices of which a few have just become free.
    """
    rng = random.Random(0)
    claimants = []
    for id in range(experiments):
        project = rng.randrange(100)
        demand = Demand(rng.choice(list(DEVICES)), rng.choice([1.0, 1.0, 2.0]), 0, runs // experiments)
        user = f"u{project}-{rng.randrange(10)}"
        claimants.append(Claimant(id, f"p{project}", user, 50, float(id % 86_000), (demand,)))
    for n in range(3 * 256 - 12):
        project = n % 100
        demand = Demand(list(DEVICES)[n % 3], 1.0, 1, 0, n % 2)
        owner = f"u{project}-{rng.randrange(10)}"
        id = experiments + n
        claimants.append(Claimant(id, f"p{project}", owner, 50, 0.0, (demand,), served_s=80_000.0))
    lanes = {Lane(DEFAULT_POOL, name): 256.0 for name in DEVICES}
    situation = Situation(86_000.0, Capacity(lanes, PRICES_USD_PER_HOUR), claimants)
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        divide(situation)
        times.append(1000.0 * (time.perf_counter() - began))
    return statistics.median(times)


def measure(days: float, seeds: int, runs: int, rounds: int) -> dict[str, Any]:
    """Returns all figures."""
    by_seed = [simulate(seed, days) for seed in range(seeds)]
    worst = {
        "share_error_pct": max, "starved": max, "starved_within_share": max, "utilisation_vs_fifo": min,
        "small_job_wait_ratio": max, "preemption_waste_pct": max, "eta_covered_pct": min,
        "eta_width": statistics.median, "priority_order_pct": min,
    }  # fmt: skip
    return {
        **{name: choose(each[name] for each in by_seed) for name, choose in worst.items()},
        "pass_ms_100k": pass_ms(runs, max(1, runs // 100), rounds),
        "days": days,
        "seeds": by_seed,
    }


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = BENCHMARK.parser()
    parser.size("--days", 30.0, smoke=0.25, help="simulated days")
    parser.size("--seeds", 3, smoke=1, help="traces")
    parser.size("--runs", 100_000, smoke=200, help="queued runs of the pass that is timed")
    parser.size("--rounds", 15, smoke=2, help="timed passes")
    given = parser.parse_args()
    BENCHMARK.report(measure(given.days, given.seeds, given.runs, given.rounds), given)


if __name__ == "__main__":
    main()
