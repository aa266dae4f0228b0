"""Claims: which scheduler gets which of the waiting experiments.

`serve` answers several claims in one transaction, as if they had come one after the other: claims share out
places within their limits, then the next experiments in the order of claims are taken for these places. What
can no longer be taken is passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from service.db import queue_statements, schema
from service.domain.records import Experiment

_x = schema.experiments.c


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    scheduler: str
    lease_s: float
    limit: int  # Most experiments that it gets
    max_active: int | None  # Most that may be starting or running in the pool; None = no such limit
    job: str | None  # Ray job that carries their drivers; None = each gets one of its own
    among: tuple[int, ...] | None  # Only these, in this order; None = any, in the order of claims


def serve(
    connection: Connection, pool: str, claims: Sequence[ClaimRequest], now: float, at_s: float
) -> list[list[Experiment]]:
    """Returns what each claim gets; `now` is by the database's clock, `at_s` dates the events."""
    places = _places(connection, pool, claims)
    answers: list[list[Experiment]] = [[] for _ in claims]
    for place in [place for place in places if claims[place].among is not None]:
        answers[place] += _claim_among(connection, pool, claims[place], now, at_s)
    places = [place for place in places if claims[place].among is None]
    passed_over: set[int] = set()
    below = 1 << 30
    while places:
        wanted = {"pool": pool, "below": below, "now": now, "count": len(places)}
        found = connection.execute(
            queue_statements.next_to_claim(connection), wanted | {"passed_over": list(passed_over)}
        ).all()
        if not found:
            break
        chosen = dict(zip((row.id for row in found if row.id is not None), places, strict=False))
        if len(chosen) < len(places):
            below = found[0].priority  # Nothing is left to claim at this one.
        claimed = _take(connection, {id: claims[place] for id, place in chosen.items()}, now, at_s)
        unserved = places[len(chosen) :]
        for id, place in chosen.items():
            if id in claimed:
                answers[place].append(claimed[id])
            else:
                passed_over.add(id)
                unserved.append(place)
        places = sorted(unserved)
    return answers


def _claim_among(
    connection: Connection, pool: str, claim: ClaimRequest, now: float, at_s: float
) -> list[Experiment]:
    assert claim.among is not None
    due = (schema.QUEUED, _x.pool == pool, _x.not_before_s <= now)
    rows = connection.execute(sa.select(_x.id).where(_x.id.in_(claim.among), *due))
    claimable = set(rows.scalars())
    for id in filter(claimable.__contains__, claim.among):
        if claimed := _take(connection, {id: claim}, now, at_s):
            return list(claimed.values())
    return []


def _places(connection: Connection, pool: str, claims: Sequence[ClaimRequest]) -> list[int]:
    """Returns which claim gets the first experiment, which the next: positions in `claims`, ascending."""
    active = 0
    if any(claim.max_active is not None for claim in claims):
        active = connection.execute(queue_statements.COUNT_ACTIVE, {"pool": pool}).scalar_one()
    places: list[int] = []
    for place, claim in enumerate(claims):
        room = claim.limit if claim.max_active is None else claim.max_active - active - len(places)
        places += [place] * min(claim.limit, room)
    return places


def _take(
    connection: Connection, chosen: Mapping[int, ClaimRequest], now: float, at_s: float
) -> dict[int, Experiment]:
    """queued -> starting for each experiment and its claim; leaves out those that can no longer be taken."""
    leases: dict[tuple[str, float, str | None], list[int]] = {}
    for id, claim in chosen.items():
        leases.setdefault((claim.scheduler, claim.lease_s, claim.job), []).append(id)
    claimed: dict[int, Experiment] = {}
    one_statement = connection.dialect.name == "postgresql"
    for (scheduler, lease_s, job), ids in leases.items():
        lease = {"scheduler": scheduler, "until": now + lease_s, "lease": lease_s, "job": job}
        rows = connection.execute(
            queue_statements.CLAIM_AND_NOTE if one_statement else queue_statements.CLAIM,
            {"ids": ids, "now": at_s, **lease},
        ).mappings()
        claimed.update((row["id"], Experiment.from_row(row)) for row in rows)
    if claimed and not one_statement:
        connection.execute(queue_statements.NOTE_CLAIMS, {"ids": list(claimed), "now": at_s})
    return claimed
