"""Saved views of the list of experiments."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, func, select, update

from service.db import schema, statements
from service.db.errors import BadValue, Conflict, NotFound
from service.domain.access import LOCAL_ACTOR, Actor, Visibility
from service.domain.records import MOST_VIEWS, View, canonical_query
from service.store.audit import note_change
from service.store.base import StorePart, storable

_v = schema.views.c


_VIEW = [_v[name] for name in View.__dataclass_fields__]


class Views(StorePart):
    def visible(self, owner: str, visible: Visibility) -> list[View]:
        """Someone's own views, and those that are shared with a project in sight, by name."""
        with self.database.read() as connection:
            seen = sa.true() if visible.projects is None else _v.project.in_(sorted(visible.projects))
            visible_views = (
                select(*_VIEW).where((_v.owner == owner) | (_v.shared & seen)).order_by(_v.name, _v.owner)
            )
            rows = connection.execute(visible_views).mappings()
            return [View.from_row(row) for row in rows]

    def get(self, id: int) -> View:
        with self.database.read() as connection:
            row = connection.execute(_view(id)).mappings().one_or_none()
        if row is None:
            raise NotFound("view", id)
        return View.from_row(row)

    def save(
        self,
        owner: str,
        name: str,
        query: str,
        *,
        project: str | None = None,
        shared: bool = False,
        within: str | None = None,
        actor: Actor = LOCAL_ACTOR,
    ) -> View:
        """Saves a view, in the place of the owner's view of this name if there is one.

        `query` is filter, state, order and columns as in the list's address; `within` is the only project
        whose views may be replaced, None = any.
        """
        name = " ".join(storable(name).split())
        if not name:
            raise BadValue("name", "it is empty; give the view a name")
        if shared and project is None:
            raise BadValue("project", "null: a shared view needs a project; name one, or set shared to false")
        try:
            query = canonical_query(storable(query))
        except ValueError as error:
            raise BadValue("query", str(error)) from None
        content = {"project": project, "shared": shared, "query": query}
        now = self.clock()
        values = {"owner": owner, "name": name, "created_s": now, **content}

        def body(connection: Connection) -> View:
            of_project = select(schema.projects.c.name).where(schema.projects.c.name == project)
            if project is not None and not connection.execute(of_project).all():
                raise NotFound("project", project)
            replace = _replace(owner, name, **content)
            row = (
                connection.execute(select(*_VIEW).where(_v.owner == owner, _v.name == name))
                .mappings()
                .one_or_none()
            )
            before = None if row is None else View.from_row(row)
            if before is not None and within not in (None, before.project):
                raise Conflict(f"{owner} has a view {name!r} outside project {within}; choose another name")
            saved = connection.execute(replace).mappings().one_or_none()
            if saved is None:
                count = select(func.count()).select_from(schema.views).where(_v.owner == owner)
                if connection.execute(count).scalar_one() >= MOST_VIEWS:
                    raise Conflict(f"{owner} has {MOST_VIEWS} views, which is the most; delete one first")
                insert = statements.insert_or_keep(connection, schema.views, ("owner", "name"))
                connection.execute(insert, values)
                # Read back like this, it is there even if another window saved it at the same moment.
                saved = connection.execute(replace).mappings().one()
            view = View.from_row(saved)
            if before != view:
                shown = None if before is None else _shown(before)
                note_change(connection, actor, "view.save", view.id, now, before=shown, after=_shown(view))
            return view

        return self.database.write(body)

    def delete(self, id: int, *, actor: Actor = LOCAL_ACTOR) -> None:
        """Removes a view; it is not an error that there is none."""
        now = self.clock()

        def body(connection: Connection) -> None:
            row = connection.execute(_view(id)).mappings().one_or_none()
            if row is not None and connection.execute(sa.delete(schema.views).where(_v.id == id)).rowcount:
                before = _shown(View.from_row(row))
                note_change(connection, actor, "view.delete", id, now, before=before)

        self.database.write(body)


def _shown(view: View) -> dict[str, Any]:
    return {name: getattr(view, name) for name in ("name", "owner", "project", "shared", "query")}


def _view(id: int) -> sa.Select[Any]:
    return select(*_VIEW).where(_v.id == id)


def _replace(owner: str, name: str, **values: Any) -> sa.Update:
    return update(schema.views).where(_v.owner == owner, _v.name == name).values(**values).returning(*_VIEW)
