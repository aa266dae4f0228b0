"""What an experiment has used: time, money and energy of every attempt, what was lost, and overhead. Pure.

Rules. Devices are paid for from the moment they are placed until they are released, busy or not. An attempt
has the time from its opening to its end; one whose process died without reporting an error is charged up to
its last heartbeat, because the moment when that was noticed proves nothing. Energy is the sum of the
attempt's own windows; time that no window covers (the tail of a killed attempt) counts at the devices' rated
power. Each provenance of energy has its own sum. Work is lost when no later state holds it: what an attempt
did after the checkpoint that the next one resumed from, and all of a run that failed or was cancelled.

Overhead is what the sweep needs and no configuration causes. Some of it lies inside attempts, which measure
it themselves (filling caches, warming up, setting up again after a kill); the rest is time in which devices
were held and no attempt was open: starting worker processes, and waiting between runs. It is paid for, and
stands in no run's own figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from service.domain.formats import duration, figure
from service.domain.records import MeasurementRow, Placement
from service.domain.serialization import Number, Serializable
from service.domain.states import RunState
from trainers.errors import FAILURES_OF_MACHINES, FailureClass
from trainers.telemetry.heartbeat import lost_work_s
from trainers.telemetry.timeline import OVERHEAD
from trainers.telemetry.usage import J_PER_KWH

WINDOW_ENERGY, WINDOW_UTILISATION = "window_energy_kwh", "window_utilisation_pct"
OVERHEAD_TIME = "overhead_time_s"
WINDOWS = (WINDOW_ENERGY, WINDOW_UTILISATION, OVERHEAD_TIME)
WORKER_START, BETWEEN_RUNS = "worker_start", "between_runs"
OUTSIDE_ATTEMPTS = (WORKER_START, BETWEEN_RUNS)
"""Parts of the overhead outside attempts; those inside are named after the trainer's phases."""
MODELLED = "modelled"
_INTERRUPTED = frozenset({FailureClass.preempted, FailureClass.infrastructure, FailureClass.lost})
_FRUITLESS = frozenset({RunState.failed, RunState.cancelled})

Until = Literal["its end", "now", "its last heartbeat"]


@dataclass(frozen=True, slots=True)
class Measured:
    covered_s: float = 0.0  # Time that windows of energy cover
    energy_kwh: Mapping[str, float] | None = None  # By provenance
    utilisation_pct: float | None = None  # Mean over the time of its windows; None = unknown
    utilisation_provenance: str | None = None
    overhead_s: Mapping[str, float] = field(default_factory=dict)  # By part; no configuration causes it


@dataclass(frozen=True, slots=True)
class AttemptUsage:
    """An attempt as it is stored, with the price and power of all its devices."""

    run_id: int
    number: int
    run_state: RunState
    state: RunState
    failure_class: FailureClass | None
    started_s: float  # When it was opened, Unix time
    ended_s: float | None  # When it ended, or was found dead
    seen_s: float | None  # Last known to be alive
    resumed_from_s: float | None  # When its first checkpoint was taken; None = from the beginning, or unknown
    resumed_from_step: int | None
    last_step: int
    devices: float  # Number of devices held; a part of one where runs share it
    price_usd_per_hour: float
    power_w: float
    placement: str | None = None  # Id of the devices; None = unknown
    measured: Measured = field(default_factory=Measured)


@dataclass(frozen=True, slots=True)
class Amounts(Serializable):
    time_s: Number  # Time that is charged, in seconds
    device_hours: Number  # Time x devices, in hours
    cost_usd: Number  # Time x price of the devices, in USD
    energy_kwh: Mapping[str, Number]
    """By provenance (counter, sampled, modelled), in kWh; provenances are never added up."""
    lost_s: Number  # The part of the time, in seconds, whose work no result holds
    lost_usd: Number  # Cost of that part, in USD
    overhead_s: Number
    """The part of the time, in seconds, that no configuration caused: filling caches, warming up, restoring
    state."""
    overhead_usd: Number  # Cost of that part, in USD


@dataclass(frozen=True, slots=True)
class Sum(Amounts):
    """Charges added up."""

    attempts: int = 0  # How many attempts
    retries: int = 0  # Attempts beyond the first at a run
    estimated_s: Number = 0.0  # The part of the time, in seconds, that is charged up to a last heartbeat
    co2_kg: Number | None = None
    """CO2 of all the energy at the pool's site, in kg; null = not declared, or part of a larger sum."""


@dataclass(frozen=True, slots=True)
class Charge(Amounts):
    """What one attempt is charged."""

    attempt: int  # Its number
    state: RunState  # How it stands or ended
    failure_class: FailureClass | None  # Why it failed; null when it did not
    started_s: float  # When it was opened
    until: Until
    """What ends the time that is charged; one that died without reporting an error has no other end."""
    utilisation_pct: Number | None  # Of its CPUs (counter) or GPUs (sampled), in percent; null = not reported
    utilisation_provenance: str | None  # How the utilisation was measured: counter or sampled


_AMOUNTS = tuple(field.name for field in fields(Amounts))


@dataclass(frozen=True, slots=True)
class Overhead(Serializable):
    """One part of what no configuration caused."""

    part: str
    """`worker_start` and `between_runs` outside attempts; `preparation`, `warm_up` and `restart` inside."""
    time_s: Number  # Summed over placements and attempts, in seconds
    device_hours: Number  # Time x devices, in hours
    cost_usd: Number  # Time x price of the devices, in USD


@dataclass(frozen=True, slots=True)
class Account(Serializable):
    """One run: its attempts, oldest first, and their sum."""

    run_id: int  # The run
    state: RunState  # State of the run
    charges: tuple[Charge, ...]  # One per attempt
    total: Sum  # Their sum


@dataclass(frozen=True, slots=True)
class Ledger(Serializable):
    """An experiment: its runs that had an attempt, the overhead by part, and the sum of all that was held."""

    experiment_id: int  # The experiment
    runs: tuple[Account, ...]  # In the order of their numbers
    overhead: tuple[Overhead, ...]  # Overhead by part, inside attempts and outside
    total: Sum  # All that was held: the runs, and the overhead outside their attempts


@dataclass(frozen=True, slots=True)
class Interruptions(Serializable):
    """What runs on a market with interruptions cost, and what they would have cost on demand."""

    attempts: int  # That were interrupted: preempted, or their machine was lost
    lost_s: Number  # Time of work that was lost to that and of restarts after it, in seconds
    lost_usd: Number  # Cost of that time, in USD
    cost_usd: Number  # Cost of the runs, that time included, in USD
    on_demand_usd: Number  # Cost of the same runs at the on-demand price, without interruptions, in USD

    @property
    def words(self) -> str:
        times = f"{self.attempts} interruption{'s' * (self.attempts != 1)}"
        less = self.on_demand_usd - self.cost_usd
        return (
            f"{times} cost {duration(self.lost_s)} and {figure('cost_usd', self.lost_usd)} of "
            f"{figure('cost_usd', self.cost_usd)}; on demand the same runs would have cost "
            f"{figure('cost_usd', self.on_demand_usd)}, {figure('cost_usd', abs(less))} "
            f"{'more' if less >= 0 else 'less'}"
        )


def interruptions(charged: Sequence[tuple[Account, float] | None]) -> Interruptions | None:
    """Adds up accounts, each with the on-demand price over the paid one; None = some or all have none."""
    attempts, figures = 0, []
    for each in charged:
        if each is None:
            return None
        account, ratio = each
        lost_s = lost_usd = 0.0
        interrupted = False
        for charge in account.charges:
            if interrupted:
                lost_s, lost_usd = lost_s + charge.overhead_s, lost_usd + charge.overhead_usd
            interrupted = charge.failure_class in _INTERRUPTED
            if interrupted:
                attempts += 1
                lost_s, lost_usd = lost_s + charge.lost_s, lost_usd + charge.lost_usd
        cost_usd = account.total.cost_usd
        figures.append((lost_s, lost_usd, cost_usd, (cost_usd - lost_usd) * ratio))
    return Interruptions(attempts, *map(math.fsum, zip(*figures, strict=True))) if figures else None


def counts_towards_usage(measurement: MeasurementRow) -> bool:
    if measurement.name == OVERHEAD_TIME:
        return measurement.scope in OVERHEAD  # Other scopes are sums, which a run ends with.
    return measurement.name == WINDOW_ENERGY


def ledger(
    experiment_id: int, used: Iterable[AttemptUsage], placements: Iterable[Placement] = (), *, now_s: float
) -> Ledger:
    used, by_run = list(used), dict[int, list[AttemptUsage]]()
    for attempt in used:
        by_run.setdefault(attempt.run_id, []).append(attempt)
    accounts = tuple(
        account(run_id, of[0].run_state, of, now_s=now_s) for run_id, of in sorted(by_run.items())
    )
    charged_s: dict[str | None, float] = {}
    for attempt in used:
        charged_s[attempt.placement] = charged_s.get(attempt.placement, 0.0) + _time_s(attempt, now_s)
    outside = [
        part
        for placement in placements
        for part in _outside_attempts(placement, charged_s.get(placement.id, 0.0), now_s)
    ]
    inside = [
        _Stretch(part, seconds, attempt.devices, attempt.price_usd_per_hour, attempt.power_w)
        for attempt in used
        for part, seconds in attempt.measured.overhead_s.items()
    ]
    totals = [*(run.total for run in accounts), *(stretch.charged() for stretch in outside)]
    return Ledger(experiment_id, accounts, _by_part([*outside, *inside]), _sum(totals))


@dataclass(frozen=True, slots=True)
class _Stretch:
    part: str
    time_s: float
    devices: float
    price_usd_per_hour: float
    power_w: float

    def charged(self) -> Sum:
        cost_usd = self.time_s * self.price_usd_per_hour / 3600
        return Sum(
            time_s=self.time_s,
            device_hours=self.time_s * self.devices / 3600,
            cost_usd=cost_usd,
            energy_kwh={MODELLED: self.time_s * self.power_w / J_PER_KWH} if self.power_w else {},
            lost_s=0.0,
            lost_usd=0.0,
            overhead_s=self.time_s,
            overhead_usd=cost_usd,
        )


def _outside_attempts(placement: Placement, charged_s: float, now_s: float) -> list[_Stretch]:
    ends_s = now_s if placement.released_s is None else placement.released_s
    held_s = max(0.0, ends_s - placement.placed_s)
    ready_s = ends_s if placement.ready_s is None else placement.ready_s
    start_s = min(held_s, max(0.0, ready_s - placement.placed_s))
    between_s = max(0.0, held_s - start_s - charged_s)
    return [
        _Stretch(part, seconds, placement.devices, placement.price_usd_per_hour, placement.power_w)
        for part, seconds in ((WORKER_START, start_s), (BETWEEN_RUNS, between_s))
        if seconds
    ]


def _by_part(stretches: Sequence[_Stretch]) -> tuple[Overhead, ...]:
    parts = {}
    for part in dict.fromkeys(stretch.part for stretch in stretches):
        mine = [stretch for stretch in stretches if stretch.part == part]
        parts[part] = Overhead(
            part,
            math.fsum(stretch.time_s for stretch in mine),
            math.fsum(stretch.time_s * stretch.devices for stretch in mine) / 3600,
            math.fsum(stretch.time_s * stretch.price_usd_per_hour for stretch in mine) / 3600,
        )
    return tuple(parts.values())


def account(run_id: int, state: RunState, used: Sequence[AttemptUsage], *, now_s: float) -> Account:
    ordered = sorted(used, key=lambda attempt: attempt.number)
    charges = tuple(
        _charge(attempt, _kept_until_s(attempt, ordered[place + 1 :]), now_s)
        for place, attempt in enumerate(ordered)
    )
    parts = [
        Sum(
            **{name: getattr(charge, name) for name in _AMOUNTS},
            attempts=1,
            retries=int(place > 0),
            estimated_s=charge.time_s if charge.until == "its last heartbeat" else 0.0,
        )
        for place, charge in enumerate(charges)
    ]
    return Account(run_id, state, charges, _sum(parts))


def _charge(attempt: AttemptUsage, kept_until_s: float, now_s: float) -> Charge:
    until, ends_s = _until(attempt, now_s)
    time_s = _time_s(attempt, now_s)
    overhead_s = min(time_s, math.fsum(attempt.measured.overhead_s.values()))
    # Overhead comes before the first step, so what is kept of the attempt holds it first.
    lost_s = min(time_s - overhead_s, lost_work_s(attempt.started_s, ends_s, kept_until_s))
    usd_per_s = attempt.price_usd_per_hour / 3600
    return Charge(
        attempt=attempt.number,
        state=attempt.state,
        failure_class=attempt.failure_class,
        started_s=attempt.started_s,
        until=until,
        time_s=time_s,
        device_hours=time_s * attempt.devices / 3600,
        cost_usd=time_s * usd_per_s,
        energy_kwh=_energy(attempt, time_s),
        utilisation_pct=attempt.measured.utilisation_pct,
        utilisation_provenance=attempt.measured.utilisation_provenance,
        lost_s=lost_s,
        lost_usd=lost_s * usd_per_s,
        overhead_s=overhead_s,
        overhead_usd=overhead_s * usd_per_s,
    )


def _time_s(attempt: AttemptUsage, now_s: float) -> float:
    return max(0.0, _until(attempt, now_s)[1] - attempt.started_s)


def charged_until_s(attempt: AttemptUsage) -> float | None:
    """End of the time that an attempt is charged, Unix time; None while it is open."""
    if attempt.ended_s is not None and attempt.failure_class in FAILURES_OF_MACHINES:
        # Nothing is known to have lived after it was found dead.
        return min(attempt.ended_s, attempt.started_s if attempt.seen_s is None else attempt.seen_s)
    return attempt.ended_s


def _until(attempt: AttemptUsage, now_s: float) -> tuple[Until, float]:
    ends_s = charged_until_s(attempt)
    if ends_s is None:
        return "now", now_s
    return "its last heartbeat" if attempt.failure_class in FAILURES_OF_MACHINES else "its end", ends_s


def _energy(attempt: AttemptUsage, time_s: float) -> dict[str, float]:
    energy = dict(attempt.measured.energy_kwh or {})
    uncovered_s = time_s - attempt.measured.covered_s
    if uncovered_s > 0.0 and attempt.power_w > 0.0:
        energy[MODELLED] = energy.get(MODELLED, 0.0) + uncovered_s * attempt.power_w / J_PER_KWH
    return energy


def _kept_until_s(attempt: AttemptUsage, later: Sequence[AttemptUsage]) -> float:
    """Until when the attempt's work was kept, Unix time; -inf = none of it, inf = all of it."""
    if attempt.run_state in _FRUITLESS:
        return -math.inf
    # Each later attempt that trained has chosen what it continues from; the least of it is what is left.
    return min((_went_on_from_s(attempt, after) for after in later), default=math.inf)


def _went_on_from_s(attempt: AttemptUsage, after: AttemptUsage) -> float:
    if after.resumed_from_step is None:
        return math.inf  # It never began to train, and so gave nothing up.
    if after.resumed_from_step == 0:
        return -math.inf
    if after.resumed_from_s is not None:
        return after.resumed_from_s
    # It did not say when the checkpoint was taken: in proportion to the steps.
    began = attempt.resumed_from_step or 0
    steps = attempt.last_step - began
    share = 1.0 if steps <= 0 else min(1.0, max(0.0, (after.resumed_from_step - began) / steps))
    if share >= 1.0:
        return math.inf
    ends_s = attempt.ended_s if attempt.seen_s is None else attempt.seen_s
    return attempt.started_s + share * max(0.0, (ends_s or attempt.started_s) - attempt.started_s)


def _sum(parts: Sequence[Sum]) -> Sum:
    sources = sorted({source for part in parts for source in part.energy_kwh})
    energy_kwh = {source: math.fsum(part.energy_kwh.get(source, 0.0) for part in parts) for source in sources}
    names = [name for name in (*_AMOUNTS, "estimated_s") if name != "energy_kwh"]
    totals: dict[str, Any] = {name: math.fsum(getattr(part, name) for part in parts) for name in names}
    return Sum(
        **totals,
        energy_kwh=energy_kwh,
        attempts=sum(part.attempts for part in parts),
        retries=sum(part.retries for part in parts),
    )


@dataclass(frozen=True, slots=True)
class Prospect:
    unfinished: int  # Runs that have not ended
    done: int  # Runs that trained to their end
    done_usd: float  # Cost of these
    moving: int  # Training runs that have made a step in their present attempt
    moving_usd: float  # Their expected total cost, at the pace of that attempt
    moving_rest_usd: float  # The part of it that is still to come

    def rest_usd(self) -> float | None:
        """Returns the expected cost of all remaining steps; None = nothing to go by yet.

        A run that trains continues at its pace. One that waits costs as much as the mean of those that ended
        and those that train: early stops and restarts to come are not foreseen.
        """
        waiting = self.unfinished - self.moving
        if not waiting:
            return self.moving_rest_usd
        known = self.done + self.moving
        if not known:
            return None
        return self.moving_rest_usd + waiting * (self.done_usd + self.moving_usd) / known
