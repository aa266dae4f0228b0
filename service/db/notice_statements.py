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
    tokens,
    users,
)
from service.domain.notifications import DeliveryState

_s, _n, _d, _x, _t = subscriptions.c, notices.c, deliveries.c, experiments.c, tokens.c

SUBSCRIPTIONS = select(subscriptions, _t.project.label("limited_to")).select_from(
    subscriptions.outerjoin(tokens, _t.id == _s.token_id)
)
"""All subscriptions, each with the only project of the token that it was made with."""
NEWEST_NOTICE = select(sa.func.coalesce(sa.func.max(_n.id), 0))
"""Number of the newest notice, 0 = there is none."""


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


SUBSCRIBED = SUBSCRIPTIONS.where(
    _s.disabled_s.is_(None),
    _s.after_notice < bindparam("notice"),
    sa.or_(_t.project.is_(None), _t.project == bindparam("project")),
    sa.or_(
        _s.project == bindparam("project"),
        sa.and_(_s.project.is_(None), _s.owner == bindparam("owner")),
    ),
)
"""Subscriptions to a project, and those of the owner of an experiment, that a notice is not older than."""


def disable_subscriptions_of(token_id: int, now: float, because: str) -> Update:
    """Ends the subscriptions that were made with a token."""
    return (
        update(subscriptions)
        .where(_s.token_id == token_id, _s.disabled_s.is_(None))
        .values(disabled_s=now, disabled_because=because)
    )


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
    """Deliveries with the address, the secret and the owner of their subscriptions."""
    return (
        select(deliveries, _s.channel, _s.target, _s.secret, _s.owner)
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


def latest(owner: str | None, subscription_id: int | None, within: str | None, limit: int) -> Select[Any]:
    """Returns the newest deliveries, of one owner's subscriptions, of one of them, or within a project."""
    statement = select(deliveries).join(subscriptions, _s.id == _d.subscription_id)
    if owner is not None:
        statement = statement.where(_s.owner == owner)
    if within is not None:
        of_token = statement.outerjoin(tokens, _t.id == _s.token_id)
        statement = of_token.where(sa.func.coalesce(_s.project, _t.project) == within)
    if subscription_id is not None:
        statement = statement.where(_d.subscription_id == subscription_id)
    return statement.order_by(_d.id.desc()).limit(limit)


def old(before_s: float) -> tuple[sa.Delete, sa.Delete]:
    """Removes deliveries that ended, and notices that were addressed, before a time."""
    return (
        sa.delete(deliveries).where(_d.ended_s < before_s),
        sa.delete(notices).where(_n.addressed_s < before_s),
    )
