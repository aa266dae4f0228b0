"""What decides about who a request comes from and what they may do: tokens, users and their projects."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Select, select

from service.db.schema import members, projects, tokens, users
from service.domain.access import Role

_t, _u, _m, _p = tokens.c, users.c, members.c, projects.c


def token_by_hash(sha256: str) -> Select[Any]:
    """Returns a token."""
    return select(_t.id, _t.user, _t.name, _t.scope, _t.project, _t.expires_s, _t.revoked_s).where(
        _t.sha256 == sha256
    )


def user_by_name(name: str) -> Select[Any]:
    """Returns what a user is."""
    return select(_u.kind, _u.administrator, _u.disabled_s).where(_u.name == name)


def roles_of(user: str) -> Select[Any]:
    """(project, role) of a user."""
    return select(_m.project, _m.role).where(_m.user == user)


def maintainers_of(project: str) -> Select[Any]:
    """Names of a project's maintainers who are not disabled."""
    return (
        select(_m.user)
        .join(users, _u.name == _m.user)
        .where(_m.project == project, _m.role == Role.maintainer, _u.disabled_s.is_(None))
        .order_by(_m.user)
    )


OPEN_PROJECTS = select(_p.name).where(_p.visible_to_all == sa.true())
"""Projects that every user may see."""

PROJECTS = select(_p.name, _p.archived_s.is_not(None).label("archived"), _p.settings)
"""(name, whether it is archived, its limits) of all projects."""
