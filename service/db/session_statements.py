"""Statements about browser sessions and device logins, named by intent."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Select, Update, delete, or_, select, update
from sqlalchemy.sql.dml import Delete

from service.db.schema import device_grants, sessions, tokens, users

_s, _d, _t, _u = sessions.c, device_grants.c, tokens.c, users.c


def open_session(sha256: str, now: float, idle_s: float, own_token_sha256: str | None) -> Select[Any]:
    """Returns a session that is still good, with its user's subject."""
    return _good_sessions(now, idle_s, own_token_sha256, sessions, _u.subject).where(_s.sha256 == sha256)


def live_sessions(
    now: float, idle_s: float, own_token_sha256: str | None, user: str | None, within: str | None
) -> Select[Any]:
    """Returns all sessions that are still good, of a user, within a project, the last used first."""
    statement = _good_sessions(now, idle_s, own_token_sha256, sessions)
    statement = statement.order_by(_s.last_used_s.desc(), _s.sha256)
    if within is not None:
        statement = statement.where(_t.project == within)
    return statement if user is None else statement.where(_s.user == user)


def _good_sessions(now: float, idle_s: float, own_token_sha256: str | None, *columns: Any) -> Select[Any]:
    """A session ends when it expires, its user is disabled, or the token that opened it does not hold."""
    token_holds = (
        _t.id.is_not(None) & _t.revoked_s.is_(None) & or_(_t.expires_s.is_(None), _t.expires_s > now)
    )
    return (
        select(*columns)
        .select_from(sessions)
        .join(users, _u.name == _s.user)
        .outerjoin(tokens, _t.sha256 == _s.token_sha256)
        .where(
            _is_alive(now, idle_s),
            _u.disabled_s.is_(None),
            or_(_s.token_sha256.is_(None), _s.token_sha256 == own_token_sha256, token_holds),
        )
    )


def _is_alive(now: float, idle_s: float) -> sa.ColumnElement[bool]:
    return (_s.expires_s > now) & (_s.last_used_s > now - idle_s)


def touch_session(sha256: str, now: float) -> Update:
    """Notes that a session is in use."""
    return update(sessions).where(_s.sha256 == sha256, _s.last_used_s < now).values(last_used_s=now)


def end_session(sha256: str) -> Delete:
    """Ends the session that a browser holds."""
    return delete(sessions).where(_s.sha256 == sha256)


def end_session_by_id(id: str) -> Delete:
    """Ends a session by its public id."""
    return delete(sessions).where(_s.sha256.startswith(id, autoescape=True))


def session_by_id(id: str) -> Select[Any]:
    """Returns whose session has this public id, with what limits it: scope and project of its token."""
    opened = select(_s.user, _t.scope, _t.project).select_from(
        sessions.outerjoin(tokens, _t.sha256 == _s.token_sha256)
    )
    return opened.where(_s.sha256.startswith(id, autoescape=True))


def forget_expired_sessions(now: float, idle_s: float) -> Delete:
    """Removes sessions that have ended by themselves."""
    return delete(sessions).where(~_is_alive(now, idle_s))


def forget_expired_grants(now: float) -> Delete:
    """Removes device logins that were never fetched; a day later, so that a late poll learns why."""
    return delete(device_grants).where(_d.expires_s < now - 86400.0)


def pending_grant(user_code: str, now: float) -> Select[Any]:
    """Returns a device login that waits for a decision."""
    return select(device_grants).where(
        _d.user_code == user_code, _d.expires_s > now, _d.approved_s.is_(None), _d.denied_s.is_(None)
    )


def decide_grant(user_code: str, now: float, values: dict[str, Any]) -> Update:
    """Approves or denies a device login that waits for a decision; at most one decision counts."""
    return (
        update(device_grants)
        .where(_d.user_code == user_code, _d.expires_s > now)
        .where(_d.approved_s.is_(None), _d.denied_s.is_(None))
        .values(**values)
    )


def grant(device_sha256: str) -> Select[Any]:
    """Returns a device login by the code that the device holds."""
    return select(device_grants).where(_d.device_sha256 == device_sha256)


def note_poll(device_sha256: str, now: float, poll_every_s: float) -> Update:
    """Notes a poll that did not come too early."""
    return (
        update(device_grants)
        .where(_d.device_sha256 == device_sha256)
        .where(or_(_d.last_poll_s.is_(None), _d.last_poll_s <= now - poll_every_s))
        .values(last_poll_s=now)
    )


def take_grant(device_sha256: str) -> Delete:
    """Removes a device login that was approved: the token is given once."""
    return delete(device_grants).where(_d.device_sha256 == device_sha256, _d.approved_s.is_not(None))


def user_of_subject(subject: str) -> Select[Any]:
    """Returns the user with an identity at an OpenID provider."""
    return select(users).where(_u.subject == subject)
