"""Statements about subscriptions, notices and their deliveries."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Select, Update, bindparam, select, update

from service.db.schema import (
    deliveries,
    experiments,
    members,
    notices,
    projects,
    subscriptions,
    users,
)
from service.domain.notices import DeliveryState

_s, _n, _d, _x = subscriptions.c, notices.c, deliveries.c, experiments.c


def unaddressed(limit: int) -> Select[Any]:
    """Notices without deliveries, oldest first, with their experiment; locked against other schedulers.

    SQLite has no row locks and needs none: it has one writer.
    """
    return (
        select(
            notices,
            sa.func.coalesce(_n.project, _x.project).label("of_project"),
            _x.owner.label("experiment_owner"),
            _x.name.label("experiment_name"),
        )
        .select_from(notices.outerjoin(experiments, _x.id == _n.experiment_id))
        .where(_n.addressed_s.is_(None))
        .order_by(_n.id)
        .limit(limit)
        .with_for_update(skip_locked=True, of=notices)
    )


SUBSCRIBED = select(subscriptions).where(
    _s.disabled_s.is_(None),
    sa.or_(
        _s.project == bindparam("project"),
        sa.and_(_s.project.is_(None), _s.owner == bindparam("owner")),
    ),
)
"""Subscriptions to a project, and those of the owner of an experiment."""

SUBSCRIBER = select(users.c.email, users.c.administrator, users.c.disabled_s).where(
    users.c.name == bindparam("user")
)
"""What decides whether a user is told anything."""

PROJECT = select(projects.c.name).where(projects.c.name == bindparam("project"))
"""The project, if there is one."""

SEES = select(projects.c.name).where(
    projects.c.name == bindparam("project"),
    sa.or_(
        projects.c.visible_to_all,
        select(members.c.user)
        .where(members.c.project == projects.c.name, members.c.user == bindparam("user"))
        .exists(),
    ),
)
"""The project, if a user may see it."""

ADDRESSED = update(notices).where(_n.id == bindparam("taken")).values(addressed_s=bindparam("when"))
"""Notes that the deliveries of a notice are written."""


def due(now: float, limit: int) -> Select[Any]:
    """Deliveries whose time has come, the longest due first, that no other scheduler is taking."""
    return (
        select(_d.id)
        .join(subscriptions, _s.id == _d.subscription_id)
        .where(_d.state == DeliveryState.pending, _d.next_s <= now, _s.disabled_s.is_(None))
        .order_by(_d.next_s)
        .limit(limit)
        .with_for_update(skip_locked=True, of=deliveries)
    )


def take(ids: list[int], until_s: float) -> Update:
    """Begins an attempt at deliveries: no one else begins one before `until_s`."""
    return (
        update(deliveries)
        .where(_d.id.in_(ids), _d.state == DeliveryState.pending)
        .values(attempts=_d.attempts + 1, next_s=until_s)
    )


def with_subscriptions(ids: list[int]) -> Select[Any]:
    """Deliveries with the address and the secret of their subscriptions."""
    return (
        select(deliveries, _s.channel, _s.target, _s.secret)
        .join(subscriptions, _s.id == _d.subscription_id)
        .where(_d.id.in_(ids))
        .order_by(_d.id)
    )


def end_attempt(delivery_id: int, attempt: int, **values: Any) -> Update:
    """Notes what came of an attempt, unless it took so long that another has begun."""
    return (
        update(deliveries)
        .where(_d.id == delivery_id, _d.attempts == attempt, _d.state == DeliveryState.pending)
        .values(**values)
    )


def latest(owner: str | None, subscription_id: int | None, limit: int) -> Select[Any]:
    """Returns the newest deliveries, of one owner's subscriptions or of one subscription."""
    statement = select(deliveries).join(subscriptions, _s.id == _d.subscription_id)
    if owner is not None:
        statement = statement.where(_s.owner == owner)
    if subscription_id is not None:
        statement = statement.where(_d.subscription_id == subscription_id)
    return statement.order_by(_d.id.desc()).limit(limit)


def old(before_s: float) -> tuple[sa.Delete, sa.Delete]:
    """Removes deliveries that ended, and notices that were addressed, before a time."""
    return (
        sa.delete(deliveries).where(_d.ended_s < before_s),
        sa.delete(notices).where(_n.addressed_s < before_s),
    )
