"""The queue: who is claimed next, who holds what, and why the others wait.

Each pool has a queue of its own: its schedulers claim, adopt and count nothing else. Order of claims:
priority, then fair share (the owner with the fewest experiments starting or running in the pool), then age.
`fair_pass` decides which of the first may have devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection

from service.config.hardware import CATALOGUE, Hardware
from service.db import queue_statements, schema, share_statements, statements
from service.db.errors import NotFound
from service.db.group_commit import GroupCommit
from service.domain.access import DEFAULT_POOL, EVERYTHING, Visibility
from service.domain.events import EventKind
from service.domain.records import (
    Experiment,
    ExperimentStatus,
    QueueEntry,
    QueueListing,
    QueuePosition,
    StoredRecord,
    WaitingAtWork,
)
from service.domain.serialization import adapter
from service.domain.shares import StartForecast
from service.domain.states import ExperimentState, RunState
from service.scheduling.claims import ClaimRequest, serve
from service.scheduling.cluster import ClusterSnapshot, Pool, no_scheduler, order_of_pool, unsatisfiable
from service.scheduling.queue_pages import ClaimTurn, Stretch, WaitingCount, stretches
from service.specs import models
from service.specs.experiment import read_stored
from service.store import Store
from service.store.base import NewEvent, StorePart, announce, records, storable, transaction

_x, _r, _s, _c = schema.experiments.c, schema.runs.c, schema.schedulers.c, schema.cluster_snapshots.c

FORGOTTEN_AFTER_S = 7 * 86_400.0  # Schedulers silent for so long are forgotten, and so are pools without one
OUT_OF_SIGHT = "of a project that you are not a member of"  # Shown of an experiment that a reader may not see


_WAITING_AT_WORK = (
    sa.select(_x.id, _r.waits_for)
    .join_from(schema.runs, schema.experiments, _x.id == _r.experiment_id)
    .where(_r.waits_for.is_not(None), _r.state == RunState.queued, schema.ACTIVE)
    .group_by(_x.id, _r.waits_for)
    .order_by(_x.id, sa.func.min(_r.id))
)  # (experiment, what runs wait for) of those that have a driver, by index of the runs that wait
STALE_AFTER_S = 60.0  # Forecasts older than this are not shown: no scheduler renews them


@dataclass(frozen=True, slots=True)
class LiveScheduler(StoredRecord):
    name: str
    node: str
    pid: int
    started_s: float
    heartbeat_s: float
    pool: str


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of an experiment by the database's clock."""

    experiment: Experiment
    lapsed: bool
    withdrawn: bool  # It can no longer be renewed: its job is to be stopped, and its attempt ended
    silent_s: float | None  # Since it was first adopted, without a renewal; None = it never was adopted

    @property
    def submission_id(self) -> str:
        assert self.experiment.submission_id is not None  # A claim sets it.
        return self.experiment.submission_id


@dataclass(frozen=True, slots=True)
class WaitingOfOwner:
    """How many experiments of one owner wait at one priority, seen from one that is queued there or below."""

    priority: int
    owner: str
    older: int
    younger: int  # All others, the queued experiment included


def ahead(owner: str, priority: int, waiting: Iterable[WaitingOfOwner], active: Mapping[str, int]) -> int:
    """Returns how many experiments of its pool are claimed before a queued one.

    At one priority, the n-th experiment of an owner is claimed when the owner has n - 1 more than at the
    beginning. So smaller shares come first, and among equal shares the older experiments.
    """
    shares = dict(active)
    first = 0
    at_its_own: list[WaitingOfOwner] = []
    for each in waiting:
        if each.priority == priority:
            at_its_own.append(each)
        else:
            count = each.older + each.younger
            first += count
            shares[each.owner] = shares.get(each.owner, 0) + count
    # It may have been claimed a moment ago, as the last of its owner's.
    gone = WaitingOfOwner(priority, owner, 0, 0)
    mine = next((each for each in at_its_own if each.owner == owner), gone)
    share = shares.get(owner, 0) + mine.older
    for each in at_its_own:
        smaller = share - shares.get(each.owner, 0)  # How many need a smaller share, if there are so many.
        if each is mine:
            first += mine.older
        elif smaller >= 0:
            first += smaller + 1 if each.older > smaller else min(smaller, each.older + each.younger)
    return first


def explain(
    *,
    now: float,
    ahead: int,  # Experiments that are claimed before it
    not_before_s: float,  # End of its delay before a retry
    no_scheduler: str | None,
    active: int,  # Experiments starting or running in its pool
    max_concurrent: int,
    waits_for: str | None = None,  # Unfinished runs that it starts from
    missing: str | None = None,  # Resources the cluster lacks for it, from `unsatisfiable`
    last_failure: str | None = None,
    share: str | None = None,  # Why it may hold no devices now, or fewer than it could use
) -> str:
    """Returns why an experiment waits, in one line. Pure; reasons given are in words, None = not so."""
    if no_scheduler is not None:
        return no_scheduler
    if waits_for is not None:
        return waits_for
    if missing is not None:
        return f"not enough capacity: {missing}"
    if not_before_s > now:
        why = f" after: {last_failure}" if last_failure else ""
        return f"retrying in {not_before_s - now:.0f} s{why}"
    before = f"{ahead} ahead of it" if ahead else "next in line"
    if active >= max_concurrent:
        return f"max_concurrent_experiments reached ({active} of {max_concurrent} running); {before}"
    if share is not None:
        return f"{share}; {before}"
    if ahead:
        return before
    return "next in line; the scheduler will claim it shortly"


class Queue(StorePart):
    """What schedulers do (claims, leases, heartbeats) is about one pool; what people read is about all."""

    def __init__(self, store: Store, pool: str = DEFAULT_POOL) -> None:
        super().__init__(store.database, store.settings, store.clocks)
        self._run_counts_of = store.experiments.run_counts_of
        self.pool = pool
        self._group = GroupCommit[ClaimRequest, list[Experiment]](
            self._claim_group, lambda claim: claim.limit, 1000
        )

    def claim(
        self,
        scheduler: str,
        *,
        lease_s: float,
        limit: int = 1,
        max_active: int | None = None,
        job: str | None = None,
        among: Sequence[int] | None = None,
    ) -> list[Experiment]:
        """queued -> starting for the next experiments, each under a new attempt and a lease.

        The attempt and its submission id are committed before anything is started under them. `max_active`:
        claim no more than leads to this many starting or running in the pool, over all its schedulers.
        `job`: the Ray job that carries their drivers, or else each gets one of its own. `among`: only these,
        in this order.
        """
        chosen = None if among is None else tuple(among)
        return self._group(ClaimRequest(storable(scheduler), lease_s, limit, max_active, job, chosen))

    def _claim_group(self, take: Callable[[], list[ClaimRequest]]) -> list[list[Experiment] | BaseException]:
        def body(connection: Connection) -> list[list[Experiment]]:
            if connection.dialect.name == "postgresql":
                connection.execute(queue_statements.CLAIMS_IN_TURN)
            now = self.database_time(connection)
            return serve(connection, self.pool, take(), now, self.clock())

        return list(self.database.write(body))

    def active(self) -> list[Experiment]:
        """Returns the pool's experiments that are starting or running, the oldest lease first."""
        return self.read_records(Experiment, queue_statements.active_experiments(self.pool))

    def leases(self) -> list[Lease]:
        """Returns the leases of the pool's experiments that are starting or running, the oldest first."""
        with self.database.read() as connection:
            wanted = {"in_pool": self.pool, "now": self.database_time(connection)}
            rows = connection.execute(queue_statements.LEASES, wanted).mappings().all()
        return [
            Lease(Experiment.from_row(row), bool(row["lapsed"]), bool(row["withdrawn"]), row["silent_s"])
            for row in rows
        ]

    @transaction
    def adopt(
        self,
        connection: Connection,
        experiment_id: int,
        attempt: int,
        scheduler: str,
        lease_s: float,
        *,
        driver_is_silent: bool = True,
    ) -> bool:
        """Takes over an attempt whose lease ran out; False = another scheduler did, or it was renewed.

        `driver_is_silent`: there is a job whose driver should have renewed the lease.
        """
        lapsed = statements.adopt_lapsed(
            experiment_id,
            attempt,
            storable(scheduler),
            now=self.database_time(connection),
            lease_s=lease_s,
            driver_is_silent=driver_is_silent,
        )
        if not connection.execute(lapsed.where(_x.pool == self.pool)).rowcount:
            return False
        message = f"lease expired; adopted by {scheduler}"
        new = NewEvent(EventKind.experiment_adopted, message, attempt=attempt)
        announce(connection, experiment_id, [new], self.clock())
        return True

    @transaction
    def withdraw(self, connection: Connection, experiment_id: int, attempt: int) -> bool:
        """Ends the lease of a silent driver for good; False = the driver has renewed it meanwhile."""
        lapsed = statements.withdraw_lapsed(experiment_id, attempt, now=self.database_time(connection))
        return bool(connection.execute(lapsed.where(_x.pool == self.pool)).rowcount)

    def listing(
        self, *, page_size: int = 1000, page_token: str | None = None, visible: Visibility = EVERYTHING
    ) -> QueueListing:
        """Returns one page of the waiting experiments, each with why it waits; or raises `BadPageToken`.

        Pool after pool, `default` first, in the order of claims; a position is the place in the pool's queue.
        Experiments of projects that are not visible are entries without a name.
        """
        with self.database.read() as connection:
            after = None
            if page_token is not None:
                after = ClaimTurn.read(page_token, lambda id: _owner_and_pool_of(connection, id))
            if not self.database.is_sqlite:
                connection.execute(queue_statements.ALONG_THE_INDEX)
            total, found = 0, list[_Placed]()
            for pool in sorted(
                connection.execute(queue_statements.POOLS_WITH_WAITING).scalars(), key=order_of_pool
            ):
                rows = connection.execute(queue_statements.WAITING_COUNTS, {"pool": pool})
                waiting = [WaitingCount(*row) for row in rows]
                total += sum(each.count for each in waiting)
                if after is None or order_of_pool(pool) >= order_of_pool(after.pool):
                    in_pool = after if after is not None and after.pool == pool else None
                    # One more shows whether a page follows.
                    found += _placed(connection, pool, waiting, in_pool, page_size + 1 - len(found))
            shown = found[:page_size]
            places = {each.experiment_id: each.place for each in shown}
            explained = self._explained(connection, places, visible)
            schedulers = self._schedulers_alive(connection)
            at_work = [] if page_token is not None else _waiting_at_work(connection)
        counts = self._run_counts_of([each.id for each, _ in (*explained, *at_work)])

        def status(experiment: Experiment) -> ExperimentStatus | None:
            seen = visible.includes(experiment.project)
            return ExperimentStatus.of(experiment, counts[experiment.id]) if seen else None

        return QueueListing(
            [
                QueueEntry(place.position, place.reason, place.start, seen)
                if (seen := status(experiment))
                else QueueEntry(place.position, OUT_OF_SIGHT, None, None)
                for experiment, place in explained
            ],
            shown[-1].turn.token(shown[-1].experiment_id) if len(found) > page_size else None,
            total,
            [scheduler.name for scheduler in schedulers],
            [
                WaitingAtWork(seen, reason)
                if (seen := status(experiment))
                else WaitingAtWork(None, OUT_OF_SIGHT)
                for experiment, reason in at_work
            ],
        )

    def waiting_for_capacity(self) -> dict[str, int]:
        """Returns how many experiments at work have runs that wait for capacity, by pool."""
        with self.database.read() as connection:
            return Counter(experiment.pool for experiment, _ in _waiting_at_work(connection))

    def position(self, experiment_id: int, visible: Visibility = EVERYTHING) -> QueuePosition:
        """Returns where one waiting experiment stands; raises `NotFound` if it does not wait."""
        with self.database.read() as connection:
            found = connection.execute(statements.experiment_by_id(experiment_id)).one_or_none()
            if found is None or found.state is not ExperimentState.queued:
                raise NotFound("queued experiment", experiment_id)
            its_own = {name: getattr(found, name) for name in ("id", "pool", "owner", "priority", "queued_s")}
            if not self.database.is_sqlite:
                connection.execute(queue_statements.ALONG_THE_INDEX)
            rows = connection.execute(queue_statements.QUEUED_AROUND, its_own)
            waiting = [WaitingOfOwner(*row) for row in rows]
            place = ahead(found.owner, found.priority, waiting, _active_by_owner(connection, found.pool)) + 1
            ((_, position),) = self._explained(connection, {experiment_id: place}, visible)
        return position

    def _explained(
        self, connection: Connection, places: Mapping[int, int], visible: Visibility
    ) -> list[tuple[Experiment, QueuePosition]]:
        """Returns waiting experiments, in the order of their places, each with why it waits and how long."""
        rows = connection.execute(statements.experiments_by_id(places)).mappings().all()
        specs: dict[int, str] = {
            row[0]: row[1] for row in connection.execute(queue_statements.canonical_specs(places)).all()
        }
        references: dict[int, list[models.Reference]] = {}
        for row in connection.execute(statements.references_of(places)).all():
            references.setdefault(row[0], []).append(models.Reference(*row[1:]))
        shares = {
            row.experiment_id: row.reason for row in connection.execute(share_statements.reasons(places))
        }
        now = self.database_time(connection)
        serving = {scheduler.pool for scheduler in self._schedulers_alive(connection)}
        clusters = clusters_in(connection)
        found = {row["id"]: Experiment.from_row(row) for row in rows}
        active = {
            pool: connection.execute(queue_statements.COUNT_ACTIVE, {"pool": pool}).scalar_one()
            for pool in {experiment.pool for experiment in found.values()}
        }
        catalogue = self.settings.catalogue()
        starts = start_forecasts(connection, places, now, visible)
        explained = []
        for id, place in places.items():
            experiment = found[id]
            reason = explain(
                now=now,
                ahead=place - 1,
                not_before_s=experiment.not_before_s,
                no_scheduler=no_scheduler(experiment.pool, serving),
                active=active[experiment.pool],
                max_concurrent=self.settings.max_concurrent_experiments,
                waits_for=models.waits_for(references.get(id, ())),
                missing=_missing(specs.get(id), clusters.get(experiment.pool), catalogue),
                last_failure=experiment.failure_message,
                share=shares.get(id),
            )
            lost = models.hopeless(references.get(id, ()))
            reason = f"{reason}; {lost}" if lost else reason
            explained.append((experiment, QueuePosition(place, reason, starts.get(id))))
        return explained

    @transaction
    def heartbeat(self, connection: Connection, scheduler: str, *, node: str, pid: int) -> None:
        now = self.database_time(connection)
        before = now - FORGOTTEN_AFTER_S
        connection.execute(sa.delete(schema.schedulers).where(_s.heartbeat_s < before))
        unserved = (_c.at_s < before) & (_c.pool != self.pool)
        connection.execute(sa.delete(schema.cluster_snapshots).where(unserved))
        alive = LiveScheduler(storable(scheduler), storable(node), pid, now, now, self.pool)
        connection.execute(
            statements.insert_or_replace(connection, schema.schedulers, ("name",), kept=("started_s",)),
            asdict(alive),
        )

    @transaction
    def leave(self, connection: Connection, scheduler: str) -> None:
        """Notes that a scheduler ended in the ordinary way: it is not waited for."""
        connection.execute(sa.delete(schema.schedulers).where(_s.name == storable(scheduler)))

    def schedulers_alive(self) -> list[LiveScheduler]:
        """Returns schedulers of all pools that gave a heartbeat within the length of a lease."""
        with self.database.read() as connection:
            return self._schedulers_alive(connection)

    def _schedulers_alive(self, connection: Connection) -> list[LiveScheduler]:
        alive = _s.heartbeat_s >= self.database_time(connection) - self.settings.lease_s
        return records(connection, LiveScheduler, sa.select(schema.schedulers).where(alive).order_by(_s.name))

    @transaction
    def put_cluster(self, connection: Connection, snapshot: ClusterSnapshot) -> None:
        document = adapter(ClusterSnapshot).dump_python(snapshot, mode="json")
        connection.execute(
            statements.insert_or_replace(connection, schema.cluster_snapshots, ("pool",)),
            {"pool": self.pool, "at_s": snapshot.at_s, "snapshot": document},
        )

    def cluster(self) -> ClusterSnapshot | None:
        return self.clusters().get(self.pool)

    def clusters(self) -> dict[str, ClusterSnapshot]:
        with self.database.read() as connection:
            return clusters_in(connection)


def pools_of(
    clusters: Mapping[str, ClusterSnapshot], schedulers: Iterable[LiveScheduler], now_s: float
) -> list[Pool]:
    """Returns every known pool, `default` first; `schedulers` are those alive."""
    alive: dict[str, list[str]] = {pool: [] for pool in (DEFAULT_POOL, *clusters)}
    for scheduler in schedulers:
        alive.setdefault(scheduler.pool, []).append(scheduler.name)
    pools = []
    for pool in sorted(alive, key=order_of_pool):
        seen = clusters.get(pool)
        cluster = seen or ClusterSnapshot(now_s, False, None, ())
        pools.append(
            Pool(
                pool,
                tuple(alive[pool]),
                at_s=None if seen is None else seen.at_s,
                age_s=None if seen is None else max(0.0, now_s - seen.at_s),
                reachable=cluster.reachable,
                dashboard_url=cluster.dashboard_url,
                nodes=cluster.nodes,
                totals=cluster.totals,
                to_come=cluster.to_come,
            )
        )
    return pools


def _waiting_at_work(connection: Connection) -> list[tuple[Experiment, str]]:
    """Returns experiments with a driver whose runs wait for capacity, and what for; by pool and priority."""
    reasons: dict[int, list[str]] = {}
    for row in connection.execute(_WAITING_AT_WORK):
        reasons.setdefault(row.id, []).append(row.waits_for)
    found = records(connection, Experiment, statements.experiments_by_id(reasons))
    found.sort(key=lambda each: (order_of_pool(each.pool), -each.priority, each.id))
    return [(each, f"runs wait for {'; and for '.join(reasons[each.id])}") for each in found]


def _owner_and_pool_of(connection: Connection, experiment_id: int) -> tuple[str, str] | None:
    found = connection.execute(statements.experiments_by_id([experiment_id])).one_or_none()
    return None if found is None else (found.owner, found.pool)


def clusters_in(connection: Connection) -> dict[str, ClusterSnapshot]:
    rows = connection.execute(sa.select(_c.pool, _c.snapshot))
    return {row.pool: adapter(ClusterSnapshot).validate_python(row.snapshot) for row in rows}


class _Placed(NamedTuple):
    turn: ClaimTurn
    experiment_id: int
    place: int


def _placed(
    connection: Connection, pool: str, waiting: Sequence[WaitingCount], after: ClaimTurn | None, wanted: int
) -> list[_Placed]:
    """Returns the next `wanted` waiting experiments of a pool after a turn, in the order of claims."""
    if wanted <= 0:
        return []
    # Of each owner, one may stand before `after`.
    owners = 0 if after is None else sum(each.priority == after.priority for each in waiting)
    before, chosen = stretches(waiting, _active_by_owner(connection, pool), after, wanted + owners)
    turns = sorted(
        (turn for stretch in chosen for turn in _turns(connection, pool, stretch)),
        key=lambda found: found[0].key,
    )
    following = [found for found in turns if after is None or found[0].key > after.key]
    first = before + len(turns) - len(following) + 1
    return [_Placed(turn, id, place) for place, (turn, id) in enumerate(following[:wanted], first)]


def _turns(connection: Connection, pool: str, stretch: Stretch) -> Iterator[tuple[ClaimTurn, int]]:
    oldest_first = (
        sa.select(_x.id, _x.queued_s)
        .where(schema.QUEUED, _x.pool == pool, _x.priority == stretch.priority, _x.owner == stretch.owner)
        .order_by(_x.queued_s, _x.id)
        .offset(stretch.skipped)
        .limit(stretch.count)
    )
    for share, row in enumerate(connection.execute(oldest_first), stretch.share):
        yield ClaimTurn(stretch.priority, share, row.queued_s, stretch.owner, pool), row.id


def _active_by_owner(connection: Connection, pool: str) -> dict[str, int]:
    counts = sa.select(_x.owner, sa.func.count()).where(schema.ACTIVE, _x.pool == pool)
    return {row[0]: row[1] for row in connection.execute(counts.group_by(_x.owner))}


def _missing(
    canonical: str | None, cluster: ClusterSnapshot | None, catalogue: Mapping[str, Hardware] = CATALOGUE
) -> str | None:
    """Returns what the cluster lacks for every value of the axes that decide about resources."""
    if canonical is None or cluster is None:
        return None
    spec = read_stored(canonical)
    if any(name.startswith(("hardware", "resources.", "parallel.")) for name in spec.search.fields):
        return None  # Some of its runs may fit; the driver leaves the others queued with their reason.
    return unsatisfiable(spec, cluster, catalogue)


def start_forecasts(
    connection: Connection, experiment_ids: Collection[int], now_s: float, visible: Visibility = EVERYTHING
) -> dict[int, StartForecast]:
    """Returns when waiting experiments will start, by id, as far as a scheduler has forecast that.

    Experiments ahead that the reader does not see are left out.
    """
    starts, experiments = schema.start_forecasts.c, schema.experiments.c
    statement = sa.select(starts.experiment_id, starts.start).where(
        starts.experiment_id.in_(list(experiment_ids)),
        starts.start.is_not(None),
        starts.at_s >= now_s - STALE_AFTER_S,
    )
    found = {
        row.experiment_id: adapter(StartForecast).validate_json(row.start)
        for row in connection.execute(statement)
    }
    ahead = {id for start in found.values() for id in start.ahead}
    if not ahead or visible.projects is None:
        return found
    projects = connection.execute(
        sa.select(experiments.id, experiments.project).where(experiments.id.in_(list(ahead)))
    )
    seen = {row.id for row in projects if visible.includes(row.project)}
    return {
        id: replace(start, ahead=[each for each in start.ahead if each in seen])
        for id, start in found.items()
    }
