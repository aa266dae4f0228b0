"""What a pool's scheduler sees before it divides devices: what there is, who runs, and who waits.

Only the head of the queue is read, so the cost does not grow with the queue. What the cluster could not run
even when idle takes no part: it waits for nodes, or fails. Devices of different kinds are counted apart, also
where both are CPUs of the same nodes.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from service.config.hardware import find, lookup
from service.db import queue_statements, schema, share_statements, statements
from service.domain.access import DEFAULT_POOL
from service.domain.notifications import BUDGET_REACHED, BUDGET_WARNED
from service.domain.records import Experiment
from service.domain.shares import Spending, month_of
from service.fairness.state import Capacity, Claimant, Demand, Lane, ProjectTerms, Situation, Usage, may_yield
from service.scheduling.cluster import (
    CPU,
    ClusterNode,
    ClusterSnapshot,
    devices_of,
    exclusive_holds,
    unsatisfiable,
)
from service.specs.experiment import ExperimentSpec, read_stored
from service.specs.project_limits import UNITS, ProjectLimits, spent_budget
from service.store import Store
from service.store.projects import spent_of

logger = logging.getLogger(__name__)

DEMAND_EVERY_S = 5.0  # How often the runs of an experiment that have not ended are counted
LOOK_EVERY_S = 10.0  # How often what projects have used is added up
WARN_AT = 0.8  # Part of a budget at which subscribers are warned


@dataclass(slots=True)
class _Known:
    """What is remembered of an experiment from one look to the next; times are monotonic."""

    spec: ExperimentSpec | None  # None = this release cannot read it
    counted_s: float = float("-inf")
    demand: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """(devices, of the largest run) by hardware."""
    since: dict[str, list[float]] = field(default_factory=dict)
    """Since when it has held devices for one run, for two, and so on, by hardware."""
    served_s: float | None = None  # When it last got devices, Unix seconds; None = it never did
    restart_s: float = 0.0  # How long its workers took to start at most

    def serve(self, at_s: float, restart_s: float | None) -> None:
        self.served_s = max(at_s, self.served_s or at_s)
        self.restart_s = max(restart_s or 0.0, self.restart_s)


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A spec that no one has submitted, as if it were the last in the queue; `demand` as in `_Known`."""

    spec: ExperimentSpec
    project: str
    owner: str
    priority: int
    demand: Mapping[str, tuple[float, float]]
    queued_s: float
    id: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    situation: Situation  # With the active experiments, the waiting ones, then the newcomer
    waiting: Sequence[Experiment]  # Head of the queue, in the order of claims


class SituationReader:
    """Looks at a pool, again and again; not for several threads."""

    def __init__(self, store: Store, pool: str = DEFAULT_POOL) -> None:
        self._store = store
        self._pool = pool
        self._catalogue = store.settings.catalogue()
        self._known: dict[int, _Known] = {}
        self.budgets = BudgetWatch(store)

    def read(
        self,
        cluster: ClusterSnapshot,
        active: Sequence[Experiment],
        considered: int,
        newcomer: Newcomer | None = None,
    ) -> Seen:
        """Returns what may be divided now; `considered` = most waiting experiments."""
        with self._store.database.read() as connection:
            now_s = self._store.database_time(connection)
            waiting = self._head_of_queue(connection, considered, now_s)
            self._look_at([*active, *waiting], connection, now_s)
            held = self._held(connection, {experiment.id for experiment in active})
            terms = _left_here(self._terms(connection, now_s), connection, self._pool)
            usage = usage_by_user(connection)
        candidates: list[Experiment | Newcomer] = [*active, *waiting]
        if newcomer is not None:
            candidates.append(newcomer)
            self._known[newcomer.id] = _Known(newcomer.spec, demand=newcomer.demand)
        devices = self._devices(cluster)
        capacity = Capacity(
            {Lane(self._pool, name): count for name, count in devices.items()},
            {name: lookup(name, self._catalogue).price_usd_per_hour for name in devices},
        )
        claimants = [self._claimant(each, held.get(each.id, {}), cluster, devices) for each in candidates]
        return Seen(Situation(now_s, capacity, claimants, terms, usage), waiting)

    def hardware_of(self, experiment_id: int) -> Collection[str]:
        """Returns the kinds of device that an experiment of the last look uses or waits for."""
        return self._known[experiment_id].demand.keys()

    def spec_of(self, experiment_id: int) -> ExperimentSpec | None:
        """Returns the spec of an experiment of the last look; None = this release cannot read it."""
        return self._known[experiment_id].spec

    def _terms(self, connection: Connection, now_s: float) -> dict[str, ProjectTerms]:
        settings = {row.name: row.settings for row in connection.execute(share_statements.PROJECT_SETTINGS)}
        holds = self.budgets.holds(connection, settings, now_s)
        names = ("weight", "guaranteed", "ceiling", "concurrent_runs_per_user")
        return {
            project: ProjectTerms(
                **{name: found[name] for name in names if name in found}, holds=holds.get(project)
            )
            for project, found in settings.items()
        }

    def _head_of_queue(self, connection: Connection, count: int, now_s: float) -> list[Experiment]:
        """Returns the first experiments in the order of claims that could be claimed now."""
        below = 1 << 30
        ids: list[int] = []
        while len(ids) < count:
            wanted = {"pool": self._pool, "below": below, "now": now_s, "count": count - len(ids)}
            found = connection.execute(
                queue_statements.next_to_claim(connection), wanted | {"passed_over": []}
            ).all()
            if not found:
                break
            ids += [row.id for row in found if row.id is not None]
            below = found[0].priority
        rows = connection.execute(statements.experiments_by_id(ids)).mappings()
        experiments = {row["id"]: Experiment.from_row(row) for row in rows}
        return [experiments[id] for id in ids]

    def _look_at(self, experiments: Sequence[Experiment], connection: Connection, now_s: float) -> None:
        """Reads the specs of experiments that are new here, and counts runs that were counted long ago."""
        ids = {experiment.id for experiment in experiments}
        self._known = {id: known for id, known in self._known.items() if id in ids}
        new = ids - self._known.keys()
        if new:
            specs = {row[0]: row[1] for row in connection.execute(queue_statements.canonical_specs(new))}
            self._known |= {id: _Known(_read(id, specs.get(id))) for id in new}
        now = self._store.monotonic()
        if started := [each.id for each in experiments if each.id in new and each.attempt]:
            for row in connection.execute(share_statements.placed(started)):
                held_for_s = max(0.0, now_s - row.placed_s)
                self._known[row.experiment_id].since.setdefault(row.hardware, []).append(now - held_for_s)
            for row in connection.execute(share_statements.served(started)):
                self._known[row.experiment_id].serve(row.served_s, row.restart_s)
        due = sorted(id for id, known in self._known.items() if now - known.counted_s >= DEMAND_EVERY_S)
        if not due:
            return
        demand: defaultdict[int, dict[str, tuple[float, float]]] = defaultdict(dict)
        for row in connection.execute(share_statements.demand(due)):
            demand[row.experiment_id][row.hardware] = float(row.devices), float(row.largest)
        for id in due:
            self._known[id].demand, self._known[id].counted_s = demand[id], now

    def _held(self, connection: Connection, ids: Collection[int]) -> dict[int, dict[str, float]]:
        """Returns what experiments hold by hardware, and notes when they got the last of it."""
        held: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for id, hardware, devices, served_s, restart_s in connection.execute(share_statements.held(ids)):
            held[id][hardware] = float(devices)
            self._known[id].serve(served_s, restart_s)
        return held

    def _claimant(
        self,
        experiment: Experiment | Newcomer,
        held: Mapping[str, float],
        cluster: ClusterSnapshot,
        devices: Mapping[str, float],
    ) -> Claimant:
        known = self._known[experiment.id]
        spec = known.spec
        limited: list[Demand] = []
        preemptible = False
        entry = None if spec is None else find(spec.hardware, self._catalogue)
        if spec and entry and not unsatisfiable(spec, cluster, self._catalogue):
            for name, counted in known.demand.items():
                demand = self._demand(spec, name, *counted, held.get(name, 0.0), cluster.possible)
                demand = replace(demand, yieldable=self._yieldable(known, demand))
                if demand.devices <= devices.get(name, 0.0):
                    limited.append(demand)
            alone = spec.measure == "exclusive"
            preemptible = not alone and spec.queue.may_be_preempted(experiment.priority)
        return Claimant(
            experiment.id,
            experiment.project,
            experiment.owner,
            experiment.priority,
            experiment.queued_s,
            tuple(limited),
            preemptible=preemptible,
            pool=self._pool,
            served_s=known.served_s,
        )

    def _yieldable(self, known: _Known, demand: Demand) -> int:
        """Returns for how many runs an experiment has had devices for a useful time.

        A run that follows another on its devices continues its time: devices of short runs are given back
        like those of long ones.
        """
        now = self._store.monotonic()
        since = known.since.setdefault(demand.hardware, [])
        del since[demand.running :]
        since += [now] * (demand.running - len(since))
        return sum(may_yield(now, each, known.restart_s) for each in since)

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

        On CPUs, a run that is measured alone takes a whole node; an elastic one makes do with the fewest
        workers.
        """
        runs, each = devices / largest, largest
        at_a_time = min(runs, spec.queue.max_concurrent_runs or runs)
        if spec.parallel.min_workers is not None:
            fewest = each * spec.worker_numbers[-1] / spec.worker_numbers[0]
            return _in_runs(hardware, fewest, at_a_time * each / fewest, held)
        found = find(hardware, self._catalogue)
        if spec.measure == "exclusive" and found is not None and found.kind.counted_in_cpus:
            alone = exclusive_holds(spec, nodes, self._catalogue) if spec.hardware == hardware else ()
            each = max((hold.workers * hold.resources[CPU] for hold in alone[:1]), default=each)
        return _in_runs(hardware, each, at_a_time, held)

    def _devices(self, cluster: ClusterSnapshot) -> dict[str, float]:
        names = {name for known in self._known.values() for name in known.demand}
        found = {name: find(name, self._catalogue) for name in names}
        nodes = cluster.possible
        counts = {name: devices_of(each, nodes) for name, each in found.items() if each is not None}
        return {name: count for name, count in counts.items() if count > 0}


def _read(id: int, canonical: str | None) -> ExperimentSpec | None:
    try:
        return None if canonical is None else read_stored(canonical)
    except ValueError as error:
        logger.warning("experiment %d: its spec cannot be read here: %s", id, error)
        return None


def usage_by_user(connection: Connection) -> dict[tuple[str, str, Lane], Usage]:
    rows = connection.execute(sa.select(schema.share_usage))
    return {(row.project, row.owner, Lane(row.pool, row.hardware)): Usage(row.usd, row.at_s) for row in rows}


def _in_runs(hardware: str, devices: float, at_a_time: float, held: float) -> Demand:
    """Returns a demand in runs; devices that are held count as runs, also while their workers start."""
    running = math.ceil(held / devices - 1e-6)
    return Demand(hardware, devices, running, max(0, math.floor(at_a_time + 1e-6) - running))


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


class BudgetWatch:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._looked_s = float("-inf")
        self._settings: Mapping[str, Mapping[str, Any]] = {}
        self._holds: dict[str, str] = {}
        self._due: dict[str, tuple[str, str, str, dict[str, Any]]] = {}
        self._told: set[str] = set()
        self.left: dict[tuple[str, str], float] = {}
        """Part of each budget that is left, by project and unit; below 0 it is overspent."""

    def holds(
        self, connection: Connection, settings: Mapping[str, Mapping[str, Any]], now_s: float
    ) -> Mapping[str, str]:
        """Returns why projects start nothing more, by name; looked up when budgets change and regularly."""
        budgeted = {name: each for name, each in settings.items() if each.get("budgets")}
        now = self._store.monotonic()
        if budgeted == self._settings and now - self._looked_s < LOOK_EVERY_S:
            return self._holds
        self._settings, self._looked_s, self._holds = budgeted, now, {}
        self.left = {}
        for name, document in budgeted.items():
            limits = ProjectLimits.model_validate(document)
            self._look(name, limits, spent_of(connection, name, now_s), month_of(now_s).name)
        return self._holds

    def tell(self) -> None:
        """Writes the notifications that are due, each once, whichever scheduler does it."""
        while self._due:
            key, (kind, project, message, data) = next(iter(self._due.items()))
            self._store.notifications.notice(key, kind, project, message, data)
            self._told.add(key)
            del self._due[key]

    def _look(self, name: str, limits: ProjectLimits, spent: Spending, month: str) -> None:
        if (reason := spent_budget(limits, name, spent, month)) is not None:
            self._holds[name] = reason
        for unit, most in limits.budgets.limited().items():
            used = getattr(spent, unit)
            self.left[name, unit] = 1.0 - used / most if most else 0.0
            for part, kind in ((1.0, BUDGET_REACHED), (WARN_AT, BUDGET_WARNED)):
                key = f"budget:{name}:{month}:{unit}:{most:g}:{part * 100:g}"
                if used >= part * most:
                    message = f"project {name} has used {used:.4g} of {most:g} {UNITS[unit]} for {month}"
                    data = {"unit": unit, "budget": most, "used": used, "month": month}
                    if key not in self._told:
                        self._due[key] = kind, name, message, data
                    break
