"""The scheduler's pass over a pool's devices: divides them among what runs there and what could next.

`divide` looks at the cluster, at what is active and at the head of the queue, and stores what each may hold.
Drivers read that with their heartbeat. How much is queued does not matter to its cost. Each pool has passes
of its own; limits of projects are over all pools.

What the cluster could not run even when idle is not limited: it waits for nodes, or fails, as without other
claimants. Devices of different kinds are divided apart, also where both are CPUs of the same nodes.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sqlalchemy import Connection

from service.config.hardware import find, lookup
from service.db import queue_statements, schema, share_statements, statements
from service.domain.access import DEFAULT_POOL
from service.domain.records import Experiment
from service.fairness.allowances import Division, divide, may_yield
from service.fairness.state import (
    Capacity,
    Claimant,
    Demand,
    Lane,
    ProjectTerms,
    Situation,
    Usage,
    UsageTree,
)
from service.fairness.usage import charged
from service.scheduling.budgets import BudgetWatch
from service.scheduling.cluster import (
    CPU,
    SHARERS,
    ClusterNode,
    ClusterSnapshot,
    devices_of,
    exclusive_holds,
    unsatisfiable,
)
from service.spec.experiment import ExperimentSpec, read_stored
from service.store import Store

logger = logging.getLogger(__name__)

CHARGE_EVERY_S = 5.0
"""How often the use of devices is added up for shares."""
LONGEST_CHARGE_S = 60.0
"""Most time that is charged at once: how long a scheduler may have been away."""
DEMAND_EVERY_S = 5.0
"""How often the runs of an experiment that have not ended are counted."""
_USAGE_KEY = ("project", "owner", "pool", "hardware")
CONSIDERED = 16
"""Waiting experiments that a pass looks at, the first in the order of claims."""


_DEFAULT_TERMS = ProjectTerms()


@dataclass(slots=True)
class _Known:
    """What a pass remembers of an experiment.

    Attributes:
        spec: its spec; None = this release cannot read it.
        counted_s: when its runs were counted, monotonic.
        demand: (devices, of the largest run) by hardware.
        since: since when it has held devices for one run, for two, and so on, by hardware; monotonic.
    """

    spec: ExperimentSpec | None
    counted_s: float = float("-inf")
    demand: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    since: dict[str, list[float]] = field(default_factory=dict)


class FairPass:
    """Divides the devices of a pool's cluster.

    Args:
        store: the database.
        pool: whose experiments get them.
    """

    def __init__(self, store: Store, pool: str = DEFAULT_POOL) -> None:
        self._store = store
        self._pool = pool
        self._catalogue = store.settings.catalogue()
        self._known: dict[int, _Known] = {}
        self._charged_s = float("-inf")
        self._division: Division | None = None
        self._in_figures: set[str] = set()
        self._budgets = BudgetWatch(store)

    @property
    def budgets_left(self) -> Mapping[tuple[str, str], float]:
        """Part of each budget that is left, by project and unit, as of the last look."""
        return self._budgets.left

    def divide(self, cluster: ClusterSnapshot, active: Sequence[Experiment], places: int) -> list[int]:
        """Stores what each experiment may hold from now on.

        Args:
            cluster: as it was a moment ago.
            active: experiments of the pool that are starting or running.
            places: how many more drivers may be started.

        Waiting experiments that get none are given the reason.

        Returns:
            The waiting experiments that may hold something, at most `places`, in the order of claims.

        Raises:
            StoreUnavailable: the database is unavailable; nothing is lost.
        """
        going = {experiment.id for experiment in active}
        with self._store.database.read() as connection:
            waiting = self._head_of_queue(connection) if places > 0 else []
            self._look_at([*active, *waiting], connection)
            held = _held(connection, going)
            now_s = self._store.database_time(connection)
            terms = _left_here(self._terms(connection, now_s), connection, self._pool)
            usage = UsageTree(_usage(connection))
        devices = self._devices(cluster)
        claimants = [
            self._claimant(each, held.get(each.id, {}), cluster, devices) for each in [*active, *waiting]
        ]
        capacity = Capacity(
            {Lane(self._pool, name): count for name, count in devices.items()},
            {name: lookup(name, self._catalogue).price_usd_per_hour for name in devices},
        )

        def divided(claimants: Sequence[Claimant]) -> Division:
            return divide(Situation(now_s, capacity, claimants, terms, usage))

        self._division = divided(claimants)
        first = _allowed(self._division, claimants)
        chosen = [each.id for each in waiting if self._has_some(each.id, first)][:places]
        at_work = [each for each in claimants if each.id in going or each.id in chosen]
        allowed = first if len(at_work) == len(claimants) else _allowed(divided(at_work), at_work)
        self._put(self._rows(claimants, allowed, terms))
        self._budgets.tell()
        self._charge()
        return [id for id in chosen if self._has_some(id, allowed)]

    def share_errors(self) -> dict[str, float]:
        """Returns how far each project's part of recent use is from what its weight entitles it to.

        Positive = it has had more. It is about those that took part in the last pass: they run something or
        are next in the queue. A project that did so before and has no work any more counts as 0.
        """
        if self._division is None:
            return {}
        errors = self._division.share_errors()
        self._in_figures |= errors.keys()
        return dict.fromkeys(self._in_figures, 0.0) | errors

    def _terms(self, connection: Connection, now_s: float) -> dict[str, ProjectTerms]:
        """Returns what each project's limits say about devices."""
        settings = {row.name: row.settings for row in connection.execute(share_statements.PROJECT_SETTINGS)}
        holds = self._budgets.holds(connection, settings, now_s)
        names = ("weight", "guaranteed", "ceiling", "concurrent_runs_per_user")
        return {
            project: ProjectTerms(
                **{name: found[name] for name in names if name in found}, holds=holds.get(project)
            )
            for project, found in settings.items()
        }

    def _head_of_queue(self, connection: Connection) -> list[Experiment]:
        """Returns the first experiments in the order of claims that could be claimed now."""
        now, below = self._store.database_time(connection), 1 << 30
        ids: list[int] = []
        while len(ids) < CONSIDERED:
            found = connection.execute(
                queue_statements.next_to_claim(connection),
                {
                    "pool": self._pool,
                    "below": below,
                    "now": now,
                    "count": CONSIDERED - len(ids),
                    "passed_over": [],
                },
            ).all()
            if not found:
                break
            ids += [row.id for row in found if row.id is not None]
            below = found[0].priority
        rows = connection.execute(statements.experiments_by_id(ids)).mappings()
        experiments = {row["id"]: Experiment.from_row(row) for row in rows}
        return [experiments[id] for id in ids]

    def _look_at(self, experiments: Sequence[Experiment], connection: Connection) -> None:
        """Reads the specs of experiments that are new here, and counts runs that were counted long ago."""
        ids = {experiment.id for experiment in experiments}
        self._known = {id: known for id, known in self._known.items() if id in ids}
        new = ids - self._known.keys()
        if new:
            specs = {row[0]: row[1] for row in connection.execute(queue_statements.canonical_specs(new))}
            self._known |= {id: _Known(_read(id, specs.get(id))) for id in new}
        now = self._store.monotonic()
        due = sorted(id for id, known in self._known.items() if now - known.counted_s >= DEMAND_EVERY_S)
        if not due:
            return
        demand: defaultdict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
        for row in connection.execute(share_statements.demand(due)):
            demand[row.experiment_id][row.hardware] = float(row.devices), float(row.largest)
        for id in due:
            self._known[id].demand, self._known[id].counted_s = demand[id], now

    def _claimant(
        self,
        experiment: Experiment,
        held: Mapping[str, float],
        cluster: ClusterSnapshot,
        devices: Mapping[str, float],
    ) -> Claimant:
        known = self._known[experiment.id]
        limited: list[Demand] = []
        preemptible = False
        if known.spec is not None and self._satisfiable(known.spec, cluster):
            for name, counted in known.demand.items():
                demand = self._demand(known.spec, name, *counted, held.get(name, 0.0), cluster.nodes)
                demand = replace(demand, yieldable=self._yieldable(known, demand))
                if demand.devices <= devices.get(name, 0.0):
                    limited.append(demand)
            alone = known.spec.measure == "exclusive"
            preemptible = not alone and known.spec.queue.may_be_preempted(experiment.priority)
        return Claimant(
            experiment.id,
            experiment.project,
            experiment.owner,
            experiment.priority,
            experiment.queued_s,
            tuple(limited),
            preemptible=preemptible,
            pool=self._pool,
        )

    def _yieldable(self, known: _Known, demand: Demand) -> int:
        """Returns for how many runs an experiment has had devices for a useful time, one after the other.

        A run that follows another one on its devices does not begin anew: devices of short runs are given
        back like those of long ones.
        """
        now = self._store.monotonic()
        since = known.since.setdefault(demand.hardware, [])
        del since[demand.running :]
        since += [now] * (demand.running - len(since))
        return sum(may_yield(now, each, 0.0) for each in since)

    def _satisfiable(self, spec: ExperimentSpec, cluster: ClusterSnapshot) -> bool:
        """Returns whether the idle cluster could run it; what it lacks is its driver's to say."""
        known = find(spec.hardware, self._catalogue) is not None
        return known and unsatisfiable(spec, cluster, self._catalogue) is None

    def _demand(
        self,
        spec: ExperimentSpec,
        hardware: str,
        devices: float,
        largest: float,
        held: float,
        nodes: Sequence[ClusterNode],
    ) -> Demand:
        """Returns what an experiment holds and could use, in devices that its runs really take.

        A run that shares its device takes a part of it; on CPUs, one that is measured alone takes a whole
        node; an elastic one is content with the fewest workers.
        """
        runs, each = devices / largest, largest
        at_a_time = min(runs, spec.queue.max_concurrent_runs or runs)
        if spec.parallel.min_workers is not None:
            fewest = each * spec.worker_numbers[-1] / spec.worker_numbers[0]
            return _in_runs(hardware, fewest, at_a_time * each / fewest, held)
        found = find(hardware, self._catalogue)
        if spec.queue.share_device:
            each, held = each / SHARERS, held / SHARERS
        elif spec.measure == "exclusive" and found is not None and found.kind.counted_in_cpus:
            alone = exclusive_holds(spec, nodes, self._catalogue) if spec.hardware == hardware else ()
            each = max((hold.workers * hold.resources[CPU] for hold in alone[:1]), default=each)
        return _in_runs(hardware, each, at_a_time, held)

    def _devices(self, cluster: ClusterSnapshot) -> dict[str, float]:
        """Returns how many devices there are of the kinds that somebody asks for and the cluster has."""
        names = {name for known in self._known.values() for name in known.demand}
        found = {name: find(name, self._catalogue) for name in names}
        counts = {name: devices_of(each, cluster.nodes) for name, each in found.items() if each is not None}
        return {name: count for name, count in counts.items() if count > 0}

    def _has_some(self, id: int, allowed: Mapping[tuple[int, str], float]) -> bool:
        """Returns whether an experiment may hold something; without runs to start it ends by itself."""
        names = self._known[id].demand
        return not names or any(allowed.get((id, name), 1.0) > 0 for name in names)

    def _rows(
        self,
        claimants: Sequence[Claimant],
        allowed: Mapping[tuple[int, str], float],
        terms: Mapping[str, ProjectTerms],
    ) -> list[dict[str, Any]]:
        """Returns the rows of `allowances`."""
        capped = _users_at_cap(claimants, allowed, terms)
        rows: list[dict[str, Any]] = []
        for claimant in claimants:
            holds = terms.get(claimant.project, _DEFAULT_TERMS).holds
            for demand in claimant.demands:
                hardware = demand.hardware
                # What runs there stays until it ends, and no run takes its place.
                devices = 0.0 if holds is not None else allowed.get((claimant.id, hardware), 0.0)
                row = {
                    "experiment_id": claimant.id,
                    "hardware": hardware,
                    "devices": devices,
                    "preemptible": claimant.preemptible and holds is None,
                    "reason": holds or _reason(claimant, demand, devices, claimants, allowed, capped),
                    "pool": self._pool,
                }
                rows.append(row)
        return rows

    def _put(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the pool's allowances where they differ."""

        def key(row: Mapping[str, Any]) -> tuple[int, str]:
            return row["experiment_id"], row["hardware"]

        own = {"in_pool": self._pool}
        with self._store.database.read() as connection:
            found = connection.execute(share_statements.ALLOWANCES_IN, own).mappings()
            stored = [dict(row) for row in found]
        if sorted(stored, key=key) == sorted(rows, key=key):
            return

        def body(connection: Connection) -> None:
            _in_turn(connection)
            connection.execute(share_statements.FORGET_ALLOWANCES, own)
            if rows:
                connection.execute(share_statements.STORE_ALLOWANCES, list(rows))

        self._store.database.write(body)

    def _charge(self) -> None:
        """Adds the use of all pools' devices since the last time, whichever scheduler added that."""
        if self._store.monotonic() - self._charged_s < CHARGE_EVERY_S:
            return

        def body(connection: Connection) -> None:
            _in_turn(connection)
            now = self._store.database_time(connection)
            before = _usage(connection)
            # The newest row dates the last charge, in the transaction that made it: nothing is charged twice.
            last_s = max((row.at_s for row in before.values()), default=0.0)
            since_s = max(last_s, now - LONGEST_CHARGE_S)
            if since_s >= now:
                return  # The clock was set back; or another scheduler has just done it.
            new = []
            for row in connection.execute(share_statements.USED_SINCE, {"since": since_s, "now": now}):
                # A placement that ended or began in between counts for its own part of the time.
                lane = Lane(row.pool, row.hardware)
                old = before.get((row.project, row.owner, lane), Usage(0.0, now))
                total = charged(old, now, max(0.0, row.usd_s_per_hour) / (now - since_s), now - since_s)
                new.append({"project": row.project, "owner": row.owner, **lane._asdict(), **asdict(total)})
            if new:
                statement = statements.insert_or_replace(connection, schema.share_usage, _USAGE_KEY)
                connection.execute(statement, new)

        self._store.database.write(body)
        self._charged_s = self._store.monotonic()


def _read(id: int, canonical: str | None) -> ExperimentSpec | None:
    """Returns a stored spec; None where it cannot be read: such an experiment is not limited."""
    try:
        return None if canonical is None else read_stored(canonical)
    except ValueError as error:
        logger.warning("experiment %d: its spec cannot be read here: %s", id, error)
        return None


def _in_turn(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(share_statements.DIVIDE_IN_TURN)


def _usage(connection: Connection) -> dict[tuple[str, str, Lane], Usage]:
    rows = connection.execute(share_statements.SHARE_USAGE)
    return {(row.project, row.owner, Lane(row.pool, row.hardware)): Usage(row.usd, row.at_s) for row in rows}


def _in_runs(hardware: str, devices: float, at_a_time: float, held: float) -> Demand:
    """Returns a demand in runs; devices that are held count as runs, also while their workers start."""
    running = math.ceil(held / devices - 1e-6)
    return Demand(hardware, devices, running, max(0, math.floor(at_a_time + 1e-6) - running))


def _allowed(division: Division, claimants: Sequence[Claimant]) -> dict[tuple[int, str], float]:
    """Returns what each experiment may hold, by (id, hardware).

    Devices that others still hold until their next step boundary are among those of whoever they are for: its
    driver gets its run ready meanwhile, and Ray places it when they are free.
    """
    allowed: defaultdict[tuple[int, str], float] = defaultdict(float)
    for id, allowance in division.allowances.items():
        for hardware, devices in allowance.devices.items():
            allowed[id, hardware] += devices
    for each in division.preemptions:
        allowed[each.for_experiment_id, each.hardware] += each.devices
    return {
        (claimant.id, demand.hardware): min(
            allowed[claimant.id, demand.hardware], (demand.running + demand.waiting) * demand.devices
        )
        for claimant in claimants
        for demand in claimant.demands
    }


def _held(connection: Connection, ids: Collection[int]) -> dict[int, dict[str, float]]:
    held: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for id, hardware, devices in connection.execute(share_statements.held(ids)):
        held[id][hardware] = float(devices)
    return held


def _left_here(
    terms: Mapping[str, ProjectTerms], connection: Connection, pool: str
) -> dict[str, ProjectTerms]:
    """Returns the terms without the part of guarantees and ceilings that other pools' allowances fill."""
    elsewhere: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for row in connection.execute(share_statements.ALLOWED_ELSEWHERE, {"in_pool": pool}):
        elsewhere[row.project][row.hardware] = float(row.devices)

    def less(devices: Mapping[str, float], project: str) -> dict[str, float]:
        filled = elsewhere[project]
        return {name: max(0.0, count - filled.get(name, 0.0)) for name, count in devices.items()}

    return {
        name: replace(own, guaranteed=less(own.guaranteed, name), ceiling=less(own.ceiling, name))
        if name in elsewhere
        else own
        for name, own in terms.items()
    }


def _users_at_cap(
    claimants: Sequence[Claimant],
    allowed: Mapping[tuple[int, str], float],
    terms: Mapping[str, ProjectTerms],
) -> dict[tuple[str, str], str]:
    """Returns, by (project, user), who may start no more runs because of the project's cap, in words."""
    if all(each.concurrent_runs_per_user is None for each in terms.values()):
        return {}
    runs: defaultdict[tuple[str, str], float] = defaultdict(float)
    for claimant in claimants:
        for demand in claimant.demands:
            devices = allowed.get((claimant.id, demand.hardware), 0.0)
            runs[claimant.project, claimant.user] += devices / demand.devices
    return {
        (project, user): f"{user} has {cap} of {cap} runs at a time in project {project}"
        for (project, user), count in runs.items()
        if (cap := terms.get(project, _DEFAULT_TERMS).concurrent_runs_per_user) is not None
        and count + 1e-6 >= cap
    }


def _reason(
    claimant: Claimant,
    demand: Demand,
    devices: float,
    claimants: Sequence[Claimant],
    allowed: Mapping[tuple[int, str], float],
    capped: Mapping[tuple[str, str], str],
) -> str | None:
    """Returns why an experiment holds fewer devices than it could; others' projects are not named."""
    hardware = demand.hardware
    if devices + demand.devices > (demand.running + demand.waiting) * demand.devices + 1e-6:
        return None
    if (cap := capped.get((claimant.project, claimant.user))) is not None:
        return cap
    others = [
        each for each in claimants if each is not claimant and allowed.get((each.id, hardware), 0.0) > 0
    ]
    names = [f"experiment {each.id} of {each.user}" for each in others if each.project == claimant.project]
    if hidden := len(others) - len(names):
        names.append(f"{hidden} experiment{'s' * (hidden != 1)} of other projects")
    share = (
        f"its share is {devices:g} of the {hardware} devices" if devices else f"no {hardware} device is free"
    )
    return f"{share}; devices go to {', '.join(names)}" if names else share
