"""Saved views: of the list of experiments, and dashboards."""

from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, func, select, update

from service.db import schema, statements
from service.db.errors import BadValue, Conflict, NotFound
from service.domain.access import LOCAL_ACTOR, Actor, Visibility
from service.domain.records import MOST_VIEWS, View, ViewKind, canonical_query
from service.store.audit import note_change
from service.store.base import StorePart, record, records, required, storable, transaction

_v = schema.views.c


class Views(StorePart):
    def visible(self, owner: str, visible: Visibility, kind: ViewKind = ViewKind.list) -> list[View]:
        """Someone's own views, and those that are shared with a project in sight, by name."""
        seen = sa.true() if visible.projects is None else _v.project.in_(sorted(visible.projects))
        views = select(schema.views).where(_v.kind == kind, (_v.owner == owner) | (_v.shared & seen))
        return self.read_records(View, views.order_by(_v.name, _v.owner))

    def get(self, id: int) -> View:
        return required(self.read_record(View, select(schema.views).where(_v.id == id)), "view", id)

    @transaction
    def save(
        self,
        connection: Connection,
        owner: str,
        name: str,
        query: str,
        *,
        kind: ViewKind = ViewKind.list,
        project: str | None = None,
        shared: bool = False,
        within: str | None = None,
        actor: Actor = LOCAL_ACTOR,
    ) -> View:
        """Saves a view, in the place of the owner's view of this kind and name if there is one.

        `query` is what the page's address says; `within` is the only project
        whose views may be replaced, None = any.
        """
        name = " ".join(storable(name).split())
        if not name:
            raise BadValue("name", "it is empty; give the view a name")
        if shared and project is None:
            raise BadValue("project", "null: a shared view needs a project; name one, or set shared to false")
        try:
            query = canonical_query(storable(query), kind)
        except ValueError as error:
            raise BadValue("query", str(error)) from None
        content = {"project": project, "shared": shared, "query": query}
        now = self.clock()
        of_project = select(schema.projects.c.name).where(schema.projects.c.name == project)
        if project is not None and not connection.execute(of_project).all():
            raise NotFound("project", project)
        own = (_v.owner == owner) & (_v.kind == kind) & (_v.name == name)
        replace = update(schema.views).where(own).values(**content).returning(*schema.views.c)
        before = record(connection, View, select(schema.views).where(own))
        if before is not None and within not in (None, before.project):
            raise Conflict(f"{owner} has a view {name!r} outside project {within}; choose another name")
        view = record(connection, View, replace)
        if view is None:
            count = select(func.count()).select_from(schema.views).where(_v.owner == owner)
            if connection.execute(count).scalar_one() >= MOST_VIEWS:
                raise Conflict(f"{owner} has {MOST_VIEWS} views, which is the most; delete one first")
            insert = statements.insert_or_keep(connection, schema.views, ("owner", "kind", "name"))
            connection.execute(
                insert, {"owner": owner, "kind": kind, "name": name, "created_s": now, **content}
            )
            # Read back like this, it is there even if another window saved it at the same moment.
            (view,) = records(connection, View, replace)
        if before != view:
            shown = None if before is None else _shown(before)
            note_change(connection, actor, "view.save", view.id, now, before=shown, after=_shown(view))
        return view

    @transaction
    def delete(self, connection: Connection, id: int, *, actor: Actor = LOCAL_ACTOR) -> None:
        """Removes a view; it is not an error that there is none."""
        view = record(connection, View, select(schema.views).where(_v.id == id))
        if view and connection.execute(sa.delete(schema.views).where(_v.id == id)).rowcount:
            note_change(connection, actor, "view.delete", id, self.clock(), before=_shown(view))


def _shown(view: View) -> dict[str, Any]:
    return {name: getattr(view, name) for name in ("kind", "name", "owner", "project", "shared", "query")}
