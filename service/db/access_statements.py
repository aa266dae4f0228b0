"""Statements about users, tokens, projects, members and the audit log, named by intent."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Select, Update, bindparam, select, update
from sqlalchemy.sql.dml import Delete

from service.db.schema import audit, members, projects, tokens, users
from service.domain.people import Member, Project, Token, User

_u, _t, _p, _m, _a = users.c, tokens.c, projects.c, members.c, audit.c

_USER = [_u[name] for name in User.__dataclass_fields__]
_TOKEN = [_t[name] for name in Token.__dataclass_fields__]
_PROJECT = [_p[name] for name in Project.__dataclass_fields__]
_MEMBER = [_m[name] for name in Member.__dataclass_fields__]

USERS = select(*_USER).order_by(_u.name)
"""All users."""
PROJECTS = select(*_PROJECT).order_by(_p.name)
"""All projects."""


def user(name: str, *, lock: bool = False) -> Select[Any]:
    """Returns one user, locked against other changes on request."""
    found = select(*_USER).where(_u.name == name)
    return found.with_for_update() if lock else found  # Left out on SQLite.


def user_of_subject(subject: str) -> Select[Any]:
    """Returns the user with an identity at an OpenID provider."""
    return select(*_USER).where(_u.subject == subject)


def set_user(name: str, **values: Any) -> Update:
    """Sets columns of a user."""
    return update(users).where(_u.name == name).values(**values)


def tokens_of(user: str | None) -> Select[Any]:
    """Returns the tokens of a user, or of everyone, the newest first."""
    found = select(*_TOKEN).order_by(_t.id.desc())
    return found if user is None else found.where(_t.user == user)


def token(id: int, *, lock: bool = False) -> Select[Any]:
    """Returns one token, locked against other changes on request."""
    found = select(*_TOKEN).where(_t.id == id)
    return found.with_for_update() if lock else found


def live_token_named(user: str, name: str, now: float) -> Select[Any]:
    """Returns the id of a user's token of this name that still works."""
    return select(_t.id).where(
        _t.user == user,
        _t.name == name,
        _t.revoked_s.is_(None),
        sa.or_(_t.expires_s.is_(None), _t.expires_s > now),
    )


def revoke_token(id: int, now: float) -> Update:
    """Ends a token."""
    return update(tokens).where(_t.id == id, _t.revoked_s.is_(None)).values(revoked_s=now)


NOTE_TOKEN_USE = (
    update(tokens)
    .where(
        _t.id == bindparam("token"),
        sa.or_(_t.last_used_s.is_(None), _t.last_used_s < bindparam("at", type_=_t.last_used_s.type)),
    )
    .values(last_used_s=bindparam("at", type_=_t.last_used_s.type))
)
"""Notes when a token was last used; never goes back."""


def project(name: str, *, lock: bool = False) -> Select[Any]:
    """Returns one project, locked against other changes on request."""
    found = select(*_PROJECT).where(_p.name == name)
    return found.with_for_update() if lock else found


def archived_of(names: set[str]) -> Select[Any]:
    """(name, when it was archived) of those of these projects that exist, locked as they are."""
    # Locked, so that none is archived between the check and the commit.
    return select(_p.name, _p.archived_s).where(_p.name.in_(sorted(names))).with_for_update(read=True)


def set_project(name: str, **values: Any) -> Update:
    """Sets columns of a project."""
    return update(projects).where(_p.name == name).values(**values)


def members_of(project: str) -> Select[Any]:
    """Returns the members of a project."""
    return select(*_MEMBER).where(_m.project == project).order_by(_m.user)


def role_of(project: str, user: str) -> Select[Any]:
    """Returns the role of a user in a project; no row = none."""
    return select(_m.role).where(_m.project == project, _m.user == user)


def remove_member(project: str, user: str) -> Delete:
    """Takes a user's role in a project away."""
    return sa.delete(members).where(_m.project == project, _m.user == user)


def audit_rows(
    *,
    after: int,
    limit: int,
    since_s: float | None,
    until_s: float | None,
    actor: str | None,
    action: str | None,
    object_kind: str | None,
    object_id: str | None,
) -> Select[Any]:
    """Returns rows of the audit log that follow an id, oldest first.

    Args:
        after, limit: the page.
        since_s, until_s: bounds of when, Unix seconds.
        actor: by whom.
        action: an action, or the part before its dot for all of that kind.
        object_kind, object_id: done to what.
    """
    found = select(audit).where(_a.id > after)
    if since_s is not None:
        found = found.where(_a.at_s >= since_s)
    if until_s is not None:
        found = found.where(_a.at_s < until_s)
    if actor is not None:
        found = found.where(_a.actor == actor)
    if action is not None:
        kind = _a.action.startswith(f"{action}.", autoescape=True)
        found = found.where(sa.or_(_a.action == action, kind))
    if object_kind is not None:
        found = found.where(_a.object_kind == object_kind)
    if object_id is not None:
        found = found.where(_a.object_id == object_id)
    return found.order_by(_a.id).limit(limit)
