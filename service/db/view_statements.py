"""Statements about saved views of the list of experiments, named by intent."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Delete, Select, Update, func, select, update

from service.db.schema import projects, views
from service.domain.access import Visibility
from service.domain.records import View

_v = views.c
_VIEW = [_v[name] for name in View.__dataclass_fields__]


def visible_views(owner: str, visible: Visibility) -> Select[Any]:
    """Returns the views of an owner, and those of others that are shared with a project in sight."""
    seen = sa.true() if visible.projects is None else _v.project.in_(sorted(visible.projects))
    return select(*_VIEW).where((_v.owner == owner) | (_v.shared & seen)).order_by(_v.name, _v.owner)


def view(id: int) -> Select[Any]:
    """Returns one view."""
    return select(*_VIEW).where(_v.id == id)


def view_named(owner: str, name: str) -> Select[Any]:
    """Returns the owner's view of a name."""
    return select(*_VIEW).where(_v.owner == owner, _v.name == name)


def views_of(owner: str) -> Select[Any]:
    """Returns how many views an owner has."""
    return select(func.count()).select_from(views).where(_v.owner == owner)


def replace_view(owner: str, name: str, **values: Any) -> Update:
    """Gives the owner's view of a name another content."""
    return update(views).where(_v.owner == owner, _v.name == name).values(**values).returning(*_VIEW)


def remove_view(id: int) -> Delete:
    """Removes a view."""
    return sa.delete(views).where(_v.id == id)


def project_exists(name: str) -> Select[Any]:
    """Returns a row if there is such a project."""
    return select(projects.c.name).where(projects.c.name == name)
