"""The audit log: who changed what, written in the transaction of the change; it only grows."""

from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, select

from service.db import schema
from service.domain.access import Actor
from service.domain.people import AuditPage, AuditRow
from service.store.base import StorePart, storable

_a = schema.audit.c

ROWS_AT_A_TIME = 1_000  # Rows that an export reads at a time


def note_change(
    connection: Connection,
    actor: Actor,
    action: str,
    object_id: object,
    now: float,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Adds a row to the audit log, in the transaction of the change.

    `action` is the kind of the object and a verb, such as `token.revoke`. Fields that are the same before and
    after are left out; `before` None = it is new, `after` None = it is gone.
    """
    if before is not None and after is not None:
        changed = [name for name in after if name not in before or before[name] != after[name]]
        before = {name: before[name] for name in changed if name in before}
        after = {name: after[name] for name in changed}
    connection.execute(
        sa.insert(schema.audit).values(
            at_s=now,
            actor=storable(actor.user),
            token_id=actor.token_id,
            address=actor.address,
            action=action,
            object_kind=action.partition(".")[0],
            object_id=str(object_id),
            before=before,
            after=after,
        )
    )


class Audit(StorePart):
    def page(
        self,
        *,
        after: int = 0,
        newest_first: bool = False,
        limit: int = 500,
        since_s: float | None = None,
        until_s: float | None = None,
        actor: str | None = None,
        action: str | None = None,
        object_kind: str | None = None,
        object_id: str | None = None,
    ) -> AuditPage:
        """Rows of the audit log, the oldest or the newest first, that follow the id `after` in that order.

        `action` is an action, or the part before its dot for all of that kind.
        """
        statement = select(schema.audit)
        if after:
            statement = statement.where(_a.id < after if newest_first else _a.id > after)
        if since_s is not None:
            statement = statement.where(_a.at_s >= since_s)
        if until_s is not None:
            statement = statement.where(_a.at_s < until_s)
        equal = ((_a.actor, actor), (_a.object_kind, object_kind), (_a.object_id, object_id))
        statement = statement.where(*(column == value for column, value in equal if value is not None))
        if action is not None:
            of_kind = _a.action.startswith(f"{action}.", autoescape=True)
            statement = statement.where(sa.or_(_a.action == action, of_kind))
        order = _a.id.desc() if newest_first else _a.id.asc()
        rows = self.read_records(AuditRow, statement.order_by(order).limit(limit + 1))
        page = rows[:limit]
        return AuditPage(page, page[-1].id if len(rows) > limit else None)

    def rows(self, **chosen: Any) -> Iterator[AuditRow]:
        """Yields all rows that `audit` would return for these arguments."""
        after: int | None = 0
        while after is not None:
            page = self.page(after=after, limit=ROWS_AT_A_TIME, **chosen)
            yield from page.items
            after = page.next_after
