"""The scheduler's pass over a pool's devices; drivers read what it allows them with their heartbeat."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from operator import itemgetter
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from service.config.hardware import find, lookup
from service.db import schema, share_statements, statements
from service.domain.access import DEFAULT_POOL, EVERYTHING, Visibility
from service.domain.records import Experiment
from service.domain.shares import STANDING, Share
from service.fairness.allowances import divide
from service.fairness.shares import Level, charged, decayed
from service.fairness.standings import Division
from service.fairness.state import Capacity, Claimant, Demand, Handover, Lane, ProjectTerms, Usage
from service.scheduling.cluster import ClusterSnapshot, devices_of
from service.scheduling.queue import clusters_in
from service.scheduling.situation import BudgetWatch, SituationReader, usage_by_user
from service.specs.project_limits import ProjectLimits
from service.store import Store

CHARGE_EVERY_S = 5.0  # How often the use of devices is added up for shares
LONGEST_CHARGE_S = 60.0  # Most time that is charged at once: how long a scheduler may have been away
_USAGE_KEY = ("project", "owner", "pool", "hardware")
CONSIDERED = 16  # Waiting experiments that a pass looks at, the first in the order of claims
_DEFAULT_TERMS = ProjectTerms()


class FairPass:
    def __init__(self, store: Store, pool: str = DEFAULT_POOL) -> None:
        self._store = store
        self._pool = pool
        self._catalogue = store.settings.catalogue()
        self._reader = SituationReader(store, pool)
        self._charged_s = float("-inf")
        self._division: Division | None = None
        self._in_figures: set[str] = set()
        self.lacking: frozenset[str] = frozenset()
        """Hardware of which experiments may hold more than there is: nodes start for them."""

    @property
    def budgets_left(self) -> Mapping[tuple[str, str], float]:
        """Returns the part of each budget that is left, by project and unit."""
        return self._reader.budgets.left

    def divide(self, cluster: ClusterSnapshot, active: Sequence[Experiment], places: int) -> list[int]:
        """Stores what each experiment may hold from now on, and for those that may hold nothing, why.

        Where `places` (more drivers that may be started) is 0, an experiment makes room for an owner who has
        none. Returns the waiting experiments that may hold something, at most `places`, in the order of
        claims.
        """
        going = {experiment.id for experiment in active}
        seen = self._reader.read(cluster, active, CONSIDERED)
        claimants, terms = seen.situation.claimants, seen.situation.terms
        self._division = divide(seen.situation)
        first = _allowed(self._division, claimants)
        could = [each for each in seen.waiting if self._has_some(each.id, first)]
        chosen = [each.id for each in could[: max(0, places)]]
        leaving = _leaving(claimants[: len(active)], could) if places <= 0 else None
        at_work = [
            each for each in claimants if each.id in chosen or (each.id in going and each is not leaving)
        ]
        division, allowed = self._division, first
        if len(at_work) < len(claimants):
            division = divide(replace(seen.situation, claimants=at_work))
            allowed = _allowed(division, at_work)
        # Whoever is claimed as soon as there are devices comes first when runs end, as those at work do.
        waiting = [each.id for each in seen.waiting if each.id not in chosen]
        if following := waiting[: max(0, places - len(chosen))]:
            claimed = [each for each in claimants if each in at_work or each.id in following]
            division = divide(replace(seen.situation, claimants=claimed))
        self.lacking = self._beyond(allowed, cluster)
        self._put(self._rows(claimants, allowed, terms, division.handovers()))
        self._reader.budgets.tell()
        self._charge()
        return [id for id in chosen if self._has_some(id, allowed)]

    def share_errors(self) -> dict[str, float]:
        """Returns how far each project's part of recent use is from its entitlement; positive = above.

        It covers those that took part in the last pass. A project that did so before and has no more work
        counts as 0.
        """
        if self._division is None:
            return {}
        errors = self._division.share_errors()
        self._in_figures |= errors.keys()
        return dict.fromkeys(self._in_figures, 0.0) | errors

    def _beyond(self, allowed: Mapping[tuple[int, str], float], cluster: ClusterSnapshot) -> frozenset[str]:
        devices: defaultdict[str, float] = defaultdict(float)
        for (_, name), count in allowed.items():
            devices[name] += count
        return frozenset(
            name
            for name, count in (devices.items() if cluster.to_come else ())
            if count > devices_of(lookup(name, self._catalogue), cluster.nodes)
        )

    def _has_some(self, id: int, allowed: Mapping[tuple[int, str], float]) -> bool:
        """Returns whether an experiment may hold something; without runs to start it ends by itself."""
        names = self._reader.hardware_of(id)
        return not names or any(allowed.get((id, name), 1.0) > 0 for name in names)

    def _rows(
        self,
        claimants: Sequence[Claimant],
        allowed: Mapping[tuple[int, str], float],
        terms: Mapping[str, ProjectTerms],
        handovers: Sequence[Handover],
    ) -> list[dict[str, Any]]:
        """Returns the rows of `allowances`.

        Where others' runs come first when its own end, or its project starts nothing more, an experiment is
        allowed less than it holds and stops nothing for that: its runs stay until they end, and are not
        replaced.
        """
        capped = _users_at_cap(claimants, allowed, terms)
        handed_over = {(each.experiment_id, each.hardware): each for each in handovers}
        rows: list[dict[str, Any]] = []
        for claimant in claimants:
            holds = terms.get(claimant.project, _DEFAULT_TERMS).holds
            for demand in claimant.demands:
                hardware = demand.hardware
                devices = 0.0 if holds is not None else allowed.get((claimant.id, hardware), 0.0)
                reason = holds or _reason(claimant, demand, devices, claimants, allowed, capped)
                preemptible = claimant.preemptible and holds is None
                following = handed_over.get((claimant.id, hardware))
                # What is preempted anyway stops now, and hands the rest over in a later pass.
                if following and following.devices < devices >= demand.running * demand.devices:
                    devices, preemptible = following.devices, False
                    reason = _comes_first(claimant, following.for_experiment_ids, claimants)
                rows.append(
                    {
                        "experiment_id": claimant.id,
                        "hardware": hardware,
                        "devices": devices,
                        "preemptible": preemptible,
                        "reason": reason,
                        "pool": self._pool,
                    }
                )
        return rows

    def _put(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the pool's allowances where they differ."""
        key = itemgetter("experiment_id", "hardware")
        own = schema.allowances.c.pool == self._pool
        found = self._store.read(sa.select(schema.allowances).where(own))
        stored = [dict(row._mapping) for row in found]
        if sorted(stored, key=key) == sorted(rows, key=key):
            return

        def body(connection: Connection) -> None:
            _in_turn(connection)
            connection.execute(sa.delete(schema.allowances).where(own))
            if rows:
                connection.execute(sa.insert(schema.allowances), list(rows))

        self._store.database.write(body)

    def _charge(self) -> None:
        """Adds the use of all pools' devices since the last time, whichever scheduler added that."""
        if self._store.monotonic() - self._charged_s < CHARGE_EVERY_S:
            return

        def body(connection: Connection) -> None:
            _in_turn(connection)
            now = self._store.database_time(connection)
            before = usage_by_user(connection)
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


def _leaving(active: Sequence[Claimant], waiting: Sequence[Experiment]) -> Claimant | None:
    """Returns the experiment whose driver makes room, where no more may run; it is queued again.

    For an owner who has none, it is the newest of the owner with the most, and of no higher priority. For
    another that waits, it is the newest of the lowest priority, if that is lower and all its runs have worked
    for a useful time.
    """
    drivers = Counter((each.project, each.user) for each in active)
    able = [each for each in active if each.demands and each.preemptible]
    newcomer = next((each for each in waiting if not drivers[each.project, each.owner]), None)
    if newcomer is not None:
        equal = [
            each
            for each in able
            if each.priority <= newcomer.priority and drivers[each.project, each.user] > 1
        ]
        if equal:
            return max(equal, key=lambda each: (drivers[each.project, each.user], each.id))
    urgent = max((each.priority for each in waiting), default=0)
    lower = [
        each
        for each in able
        if each.priority < urgent
        and all(demand.yieldable in (None, demand.running) for demand in each.demands)
    ]
    return min(lower, key=lambda each: (each.priority, -each.id), default=None)


def _in_turn(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(share_statements.DIVIDE_IN_TURN)


def _allowed(division: Division, claimants: Sequence[Claimant]) -> dict[tuple[int, str], float]:
    """Returns what each experiment may hold, by (id, hardware).

    It includes devices that others still hold until their next step boundary: its driver gets its run ready
    meanwhile, and Ray places it when they are free.
    """
    allowed: defaultdict[tuple[int, str], float] = defaultdict(float)
    for id, allowance in division.allowances.items():
        allowed |= {(id, hardware): devices for hardware, devices in allowance.items()}
    for each in division.preemptions:
        allowed[each.for_experiment_id, each.hardware] += each.devices
    return {
        (claimant.id, demand.hardware): min(
            allowed[claimant.id, demand.hardware], (demand.running + demand.waiting) * demand.devices
        )
        for claimant in claimants
        for demand in claimant.demands
    }


def _users_at_cap(
    claimants: Sequence[Claimant], allowed: Mapping[tuple[int, str], float], terms: Mapping[str, ProjectTerms]
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
    share = (
        f"its share is {devices:g} of the {hardware} devices" if devices else f"no {hardware} device is free"
    )
    return f"{share}; devices go to {_named(claimant, others)}" if others else share


def _comes_first(claimant: Claimant, for_ids: Collection[int], claimants: Sequence[Claimant]) -> str:
    first = [each for each in claimants if each.id in for_ids]
    return f"as its runs end, their devices go to {_named(claimant, first)}, of higher priority"


def _named(claimant: Claimant, others: Sequence[Claimant]) -> str:
    names = [f"experiment {each.id} of {each.user}" for each in others if each.project == claimant.project]
    if hidden := len(others) - len(names):
        names.append(f"{hidden} experiment{'s' * (hidden != 1)} of other projects")
    return ", ".join(names)


@dataclass(slots=True)
class _Part:
    """What a user, or a project, has and wants of a lane."""

    devices: float = 0.0
    usd_per_hour: float = 0.0
    used_usd: float = 0.0
    waits: bool = False

    @property
    def takes_part(self) -> bool:
        return self.devices > 0 or self.waits


_Users = defaultdict[str, _Part]


def shares(store: Store, visible: Visibility = EVERYTHING) -> list[Share]:
    """Returns the shares of all who hold or want devices: each project, and after it its users.

    Projects that the reader does not see are one row of each kind, without users.
    """
    with store.database.read() as connection:
        now_s = store.database_time(connection)
        lanes: defaultdict[Lane, defaultdict[str, _Users]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(_Part))
        )
        for row in connection.execute(share_statements.HELD_BY_EVERYBODY):
            part = lanes[Lane(row.pool, row.hardware)][row.project][row.owner]
            part.devices, part.usd_per_hour = float(row.devices), float(row.usd_per_hour)
        settings = {row.name: row.settings for row in connection.execute(share_statements.PROJECT_SETTINGS)}
        weights = {name: ProjectLimits.model_validate(each).weight for name, each in settings.items()}
        spent = BudgetWatch(store).holds(connection, settings, now_s)
        weights |= dict.fromkeys(spent, 0.0)
        for wanted in connection.execute(share_statements.WANTED_BY_EVERYBODY):
            if wanted.project not in spent:
                lanes[Lane(wanted.pool, wanted.hardware)][wanted.project][wanted.owner].waits = True
        for (project, owner, lane), usage in usage_by_user(connection).items():
            if lane in lanes and project in lanes[lane]:
                lanes[lane][project][owner].used_usd = decayed(usage, now_s)
        clusters = clusters_in(connection)
    found: list[Share] = []
    for lane, projects in sorted(lanes.items()):
        found += _of_lane(lane, projects, weights, _usd_per_hour(store, lane, clusters), visible)
    return found


def _usd_per_hour(store: Store, lane: Lane, clusters: Mapping[str, ClusterSnapshot]) -> float:
    hardware = find(lane.hardware, store.settings.catalogue())
    if hardware is None or lane.pool not in clusters:
        return 0.0
    prices = Capacity({}, {lane.hardware: hardware.price_usd_per_hour})
    return devices_of(hardware, clusters[lane.pool].possible) * prices.price(lane.hardware)


def _of_lane(
    lane: Lane,
    projects: Mapping[str, _Users],
    weights: Mapping[str, float],
    usd_per_hour: float,
    visible: Visibility,
) -> Iterable[Share]:
    parts = {name: part for name, users in sorted(projects.items()) if (part := _sum(users)).takes_part}
    level = Level(
        {name: weights.get(name, 1.0) for name in parts},
        {name: part.used_usd for name, part in parts.items()},
        usd_per_hour,
    )
    hidden: list[Share] = []
    for name, part in parts.items():
        own = _share(lane, name, None, part, level)
        if not visible.includes(name):
            hidden.append(own)
            continue
        yield own
        users = {user: each for user, each in sorted(projects[name].items()) if each.takes_part}
        inside = Level(
            dict.fromkeys(users, 1.0),
            {user: each.used_usd for user, each in users.items()},
            own.entitled_usd_per_hour,
        )
        for user, each in users.items():
            yield _share(lane, name, user, each, inside)
    if hidden:
        sums = {name: sum(getattr(share, name) for share in hidden) for name in (*STANDING, "held_devices")}
        waits = any(share.waits for share in hidden)
        yield replace(hidden[0], project=None, user=None, waits=waits, **sums)


def _sum(users: _Users) -> _Part:
    devices, usd_per_hour, used_usd, waits = map(sum, zip(*map(astuple, users.values()), strict=True))
    return _Part(devices, usd_per_hour, used_usd, waits > 0)


def _share(lane: Lane, project: str, user: str | None, part: _Part, level: Level) -> Share:
    score = level.score(project if user is None else user, part.usd_per_hour)
    return Share(
        **{name: getattr(score, name) for name in STANDING},
        pool=lane.pool,
        hardware=lane.hardware,
        project=project,
        user=user,
        held_devices=part.devices,
        waits=part.waits,
    )
