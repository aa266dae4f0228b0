"""The statements of the queue: what is next, claims, leases, schedulers, and the cluster's snapshot."""

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Select, bindparam, func, select, update
from sqlalchemy.sql.dml import ReturningUpdate

from service.db.clock import DatabaseNow
from service.db.schema import ACTIVE, QUEUED, Real, events, experiment_specs, experiments
from service.db.statements import EXPERIMENT_COLUMNS, EXPERIMENTS, lapsed
from service.domain.events import EventKind
from service.domain.states import ExperimentState

_x = experiments.c

_WAITING = """
      waiting (priority, owner) AS (
        SELECT levels.priority, (
          SELECT min(first.owner) FROM experiments AS first
          WHERE first.state = 'queued' AND first.pool = :pool AND first.priority = levels.priority
        )
        FROM levels {where}
        UNION ALL
        SELECT waiting.priority, (
          SELECT min(following.owner) FROM experiments AS following
          WHERE following.state = 'queued' AND following.pool = :pool
            AND following.priority = waiting.priority
            AND following.owner > waiting.owner
        )
        FROM waiting WHERE waiting.owner IS NOT NULL
      )"""
"""Each owner who has something queued in a pool at each of the `levels`; at last NULL."""
_NEXT_TO_CLAIM = f"""
    WITH RECURSIVE
      levels (priority) AS (
        SELECT priority FROM experiments
        WHERE state = 'queued' AND pool = :pool AND priority < :below
        ORDER BY priority DESC LIMIT 1
      ),
      {_WAITING.format(where="")},
      busy (owner, active) AS (
        SELECT owner, count(*) FROM experiments
        WHERE state IN ('starting', 'running') AND pool = :pool GROUP BY owner
      )
    SELECT priority, id
    FROM (
      SELECT waiting.priority, waiting.owner, head.id, head.queued_s,
        coalesce(busy.active, 0)
        + row_number() OVER (PARTITION BY waiting.owner ORDER BY head.queued_s, head.id) AS share
      FROM waiting
        LEFT JOIN busy ON busy.owner = waiting.owner
        LEFT JOIN {{heads}}
      WHERE waiting.owner IS NOT NULL
    ) AS claimable
    ORDER BY id IS NULL, share, queued_s, owner
    LIMIT :count
"""
# It counts, because PostgreSQL would turn NOT EXISTS into a join, and might read all runs for it.
_OLDEST = """
    SELECT {columns} FROM experiments AS oldest
    WHERE oldest.state = 'queued' AND oldest.pool = :pool AND oldest.priority = waiting.priority
      AND oldest.owner = waiting.owner AND oldest.not_before_s <= :now {further}
      AND (
        SELECT count(*) FROM run_references AS reference JOIN runs AS source ON source.id = reference.run_id
        WHERE reference.experiment_id = oldest.id
          AND source.state NOT IN ('succeeded', 'failed', 'cancelled', 'stopped')
      ) = 0
    ORDER BY oldest.queued_s, oldest.id LIMIT :count
"""
_next_sqlite = sa.text(
    _NEXT_TO_CLAIM.format(
        heads=f"experiments AS head ON head.id IN ({_OLDEST.format(columns='oldest.id', further='')})"
    )
)
_oldest_postgresql = _OLDEST.format(
    columns="oldest.id, oldest.queued_s", further="AND oldest.id <> ALL(CAST(:passed_over AS bigint[]))"
)
_next_postgresql = sa.text(_NEXT_TO_CLAIM.format(heads=f"LATERAL ({_oldest_postgresql}) AS head ON true"))


def next_to_claim(connection: sa.Connection) -> sa.TextClause:
    """Up to `count` experiments of a `pool` at the highest priority under `below`, in the order of claims.

    Rows are (priority, id); id is NULL in a row of an owner who has nothing that can be claimed `now`.
    Walks the index from owner to owner, so that its cost grows with owners and `count`, not with
    what is queued. The ids `passed_over` are left out, on PostgreSQL only: on SQLite no one else is
    changing a row.
    """
    return _next_sqlite if connection.dialect.name == "sqlite" else _next_postgresql


_OWNERS_AT_LEVELS = f"""
      levels (priority) AS (
        SELECT max(priority) FROM experiments WHERE state = 'queued' AND pool = :pool
        UNION ALL
        SELECT (
          SELECT max(lower.priority) FROM experiments AS lower
          WHERE lower.state = 'queued' AND lower.pool = :pool AND lower.priority < levels.priority
        )
        FROM levels WHERE levels.priority > :priority
      ),
      {_WAITING.format(where="WHERE levels.priority >= :priority")}
"""
"""Each priority of a pool from `:priority` upwards, with each owner who has something queued there."""

_AT_LEVEL = """(
        SELECT count(*) FROM experiments AS other
        WHERE other.state = 'queued' AND other.pool = :pool AND other.priority = ties.priority
          AND other.owner = ties.owner AND {}
      )"""
QUEUED_AROUND = sa.text(
    f"""
    WITH RECURSIVE {_OWNERS_AT_LEVELS},
      ties (priority, owner, tie) AS (
        SELECT priority, owner, CASE
          WHEN owner < :owner THEN 9223372036854775807 WHEN owner = :owner THEN :id ELSE 0
        END
        FROM waiting WHERE owner IS NOT NULL
      )
    SELECT priority, owner,
      {_AT_LEVEL.format("other.queued_s < :queued_s")}
      + {_AT_LEVEL.format("other.queued_s = :queued_s AND other.id < ties.tie")} AS older,
      {_AT_LEVEL.format("other.queued_s > :queued_s")}
      + {_AT_LEVEL.format("other.queued_s = :queued_s AND other.id >= ties.tie")} AS younger
    FROM ties
    """
)
"""(priority, owner, older, younger): how many wait at each priority from one experiment's own upwards.

`older` joined the queue before that experiment; where both did at the same time, owners and ids decide as
in the order of claims. Each count is one range of the index, without a condition on its rows.
"""

WAITING_COUNTS = sa.text(
    f"""
    WITH RECURSIVE {_OWNERS_AT_LEVELS}
    SELECT priority, owner, (
      SELECT count(*) FROM experiments AS queued
      WHERE queued.state = 'queued' AND queued.pool = :pool AND queued.priority = waiting.priority
        AND queued.owner = waiting.owner
    )
    FROM waiting WHERE owner IS NOT NULL
    """
).bindparams(priority=-(1 << 31))
"""(priority, owner, count) of everything queued in a pool; each count is one range of the index."""

POOLS_WITH_WAITING = sa.text(
    """
    WITH RECURSIVE pools (pool) AS (
      SELECT min(pool) FROM experiments WHERE state = 'queued'
      UNION ALL
      SELECT (
        SELECT min(following.pool) FROM experiments AS following
        WHERE following.state = 'queued' AND following.pool > pools.pool
      )
      FROM pools WHERE pools.pool IS NOT NULL
    )
    SELECT pool FROM pools WHERE pool IS NOT NULL
    """
)
"""Pools in which something is queued; one look at the index for each."""

ALONG_THE_INDEX = sa.text(
    "SELECT set_config('enable_bitmapscan', 'off', true), set_config('enable_seqscan', 'off', true)"
)
"""PostgreSQL: count ranges of an index in the index itself, for the rest of the transaction."""


def _claim(chosen: sa.ColumnElement[bool]) -> ReturningUpdate[Any]:
    """No row for an experiment that is not queued any more, or that another transaction is changing."""
    mine = select(_x.id).where(chosen, QUEUED).with_for_update(skip_locked=True)  # Left out on SQLite.
    return (
        update(experiments)
        .where(_x.id.in_(mine))
        .values(
            state=ExperimentState.starting,
            attempt=_x.attempt + 1,
            submission_id=func.coalesce(
                bindparam("job", type_=sa.Text),
                sa.literal("stillhouse-")
                .concat(sa.cast(_x.id, sa.Text))
                .concat("-")
                .concat(sa.cast(_x.attempt + 1, sa.Text)),
            ),
            lease_owner=bindparam("scheduler"),
            lease_until_s=bindparam("until"),
            lease_s=bindparam("lease"),
            silent_since_s=None,
            event_count=_x.event_count + 1,
            changed_s=DatabaseNow(),
            failure_class=None,
            failure_message=None,
        )
        .returning(*EXPERIMENT_COLUMNS, _x.event_count)
    )


def _claim_events(c: Any) -> Select[Any]:
    number = sa.cast(c.attempt, sa.Text)
    message = sa.literal("claimed by ").concat(c.lease_owner).concat(", attempt ").concat(number)
    document = sa.literal('{"submission_id":"').concat(c.submission_id).concat('"}')
    kind = sa.literal(str(EventKind.experiment_claimed))
    return select(c.id, c.event_count, c.attempt, bindparam("now", type_=Real), kind, message, document)


_CLAIM_EVENT_COLUMNS = ["experiment_id", "number", "attempt", "at_s", "kind", "message", "data"]
CLAIM = _claim(_x.id.in_(bindparam("ids", expanding=True)))  # SQLite: claim chosen experiments

NOTE_CLAIMS = sa.insert(events).from_select(
    _CLAIM_EVENT_COLUMNS, _claim_events(_x).where(_x.id.in_(bindparam("ids", expanding=True)))
)
"""SQLite: the events of experiments that were claimed in this transaction."""

_claimed = _claim(_x.id == sa.any_(bindparam("ids", type_=sa.ARRAY(sa.BigInteger)))).cte("claimed")
CLAIM_AND_NOTE = select(_claimed).add_cte(
    sa.insert(events).from_select(_CLAIM_EVENT_COLUMNS, _claim_events(_claimed.c)).cte("noted")
)
"""PostgreSQL: claim chosen experiments and note it, in one statement."""

COUNT_ACTIVE = select(func.count()).select_from(experiments).where(ACTIVE, _x.pool == bindparam("pool"))
"""How many experiments of a pool are starting or running."""

CLAIMS_IN_TURN = sa.text(
    "SELECT pg_advisory_xact_lock(7305411), set_config('plan_cache_mode', 'force_generic_plan', true), "
    "set_config('enable_sort', 'off', true)"
)
"""PostgreSQL: who claims counts what is active, by owner and in all; not two at the same time.

Planning `next_to_claim` takes longer than running it, so that it is planned once, and in the one way
that does not depend on how much is queued: along the index, whose order is the order of claims.
"""


def active_experiments(pool: str | sa.BindParameter[str]) -> Select[Any]:
    """Experiments of a pool that are starting or running, oldest lease first."""
    return EXPERIMENTS.where(ACTIVE, _x.pool == pool).order_by(_x.lease_until_s, _x.id)


_now = bindparam("now", type_=Real)
LEASES = active_experiments(bindparam("in_pool")).add_columns(
    _x.lease_until_s.is_(None).label("withdrawn"),
    func.coalesce(lapsed(_now), sa.false()).label("lapsed"),
    (_now - _x.silent_since_s).label("silent_s"),
)
"""Experiments of a pool that are starting or running, oldest lease first, with how their leases stand."""


def canonical_specs(experiment_ids: Iterable[int]) -> Select[Any]:
    c = experiment_specs.c
    return select(c.experiment_id, c.canonical).where(c.experiment_id.in_(list(experiment_ids)))
