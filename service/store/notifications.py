"""Subscriptions, and the messages to their subscribers.

A notification is written in the transaction of what happened (`insert_events`), so it exists exactly if that
does. A scheduler turns it into one delivery per subscription and marks it, in one transaction as well: a
scheduler that dies leaves all or nothing. A cursor over events would need an order of commits, which no
column has: a transaction that commits late would put its events behind the cursor.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, select, update

from service.db import schema, statements
from service.db.errors import NotFound
from service.domain.access import LOCAL_ACTOR, Actor
from service.domain.events import Topic
from service.domain.notifications import PAUSED, TEST, TOPICS, Delivery, DeliveryState, Subscription
from service.domain.people import User
from service.store.audit import note_change
from service.store.base import StorePart, record, required, storable, transaction

_n, _x, _d, _s = schema.notices.c, schema.experiments.c, schema.deliveries.c, schema.subscriptions.c
_t, _u, _p, _m = schema.tokens.c, schema.users.c, schema.projects.c, schema.members.c

_GROUP = 100  # Notices that are addressed in one transaction
_LONGEST_ANSWER = 300
_IN_USE: Mapping[str, None] = {"disabled_s": None, "disabled_because": None}
_OUT_OF_SIGHT = "not sent: the subscriber can no longer see the project, or is disabled"

_SUBSCRIPTIONS = select(schema.subscriptions, _t.project.label("limited_to")).select_from(
    schema.subscriptions.outerjoin(schema.tokens, _t.id == _s.token_id)
)
"""All subscriptions, each with the only project of the token that it was made with."""
_SUBSCRIBED = _SUBSCRIPTIONS.where(
    _s.disabled_s.is_(None),
    _s.after_notice < bindparam("notice"),
    sa.or_(_t.project.is_(None), _t.project == bindparam("project")),
    sa.or_(_s.project == bindparam("project"), sa.and_(_s.project.is_(None), _s.owner == bindparam("owner"))),
)
"""Subscriptions to a project, and of the experiment's or study's owner, that a notice is not older than."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A delivery that this process is to attempt. Receivers drop what comes twice by `message_id`."""

    id: int
    subscription_id: int
    message_id: str
    attempt: int
    body: str
    channel: str
    target: str
    secret: str | None


class Notifications(StorePart):
    @transaction
    def subscribe(
        self,
        connection: Connection,
        owner: str,
        channel: str,
        target: str,
        topics: Sequence[Topic],
        *,
        project: str | None = None,
        secret: str | None = None,
        actor: Actor = LOCAL_ACTOR,
    ) -> Subscription:
        """Stores a subscription to the events that follow.

        Args:
            project: all experiments of it; None = the owner's own.
            secret: signs the messages.
            actor: the subscription covers what their token may see, and ends when that is revoked.
        """
        now = self.clock()
        values = {
            "owner": owner,
            "project": project,
            "topics": ",".join(sorted(set(topics))),
            "channel": channel,
            "target": storable(target),
            "secret": secret,
            "created_s": now,
            "token_id": actor.token_id,
        }
        newest = connection.execute(select(func.coalesce(func.max(_n.id), 0))).scalar_one()
        statement = sa.insert(schema.subscriptions).returning(_s.id)
        id = connection.execute(statement, values | {"after_notice": newest}).scalar_one()
        made = _read(connection, id)
        note_change(connection, actor, "subscription.add", id, now, after=_shown(made))
        return made

    def subscriptions(self, owner: str | None = None) -> list[Subscription]:
        statement = _SUBSCRIPTIONS.order_by(_s.id)
        if owner is not None:
            statement = statement.where(_s.owner == owner)
        return self.read_records(Subscription, statement)

    def subscription(self, id: int) -> Subscription:
        with self.database.read() as connection:
            return _read(connection, id)

    @transaction
    def unsubscribe(self, connection: Connection, id: int, *, actor: Actor = LOCAL_ACTOR) -> None:
        """Removes a subscription with the log of its deliveries; pending ones are not sent."""
        before = _read(connection, id)
        connection.execute(sa.delete(schema.deliveries).where(_d.subscription_id == id))
        gone = connection.execute(sa.delete(schema.subscriptions).where(_s.id == id))
        if not gone.rowcount:
            raise NotFound("subscription", id)  # Another request was first.
        note_change(connection, actor, "subscription.remove", id, self.clock(), before=_shown(before))

    @transaction
    def pause_subscription(
        self, connection: Connection, id: int, *, paused: bool, actor: Actor = LOCAL_ACTOR
    ) -> Subscription:
        """Pauses a subscription or resumes it; one that its receiver or a token ended stays as it is.

        Nothing is sent of what happens meanwhile; what was waiting is sent once it is resumed.
        """
        before, now = _read(connection, id), self.clock()
        if paused != (before.disabled_s is not None) and before.disabled_because in (None, PAUSED):
            values = {"disabled_s": now, "disabled_because": PAUSED} if paused else _IN_USE
            connection.execute(pause(id, before.disabled_because, **values))
            action = "subscription.pause" if paused else "subscription.resume"
            note_change(connection, actor, action, id, now, before=_shown(before))
        return _read(connection, id)

    @transaction
    def notice(
        self, connection: Connection, key: str, kind: str, project: str, message: str, data: Mapping[str, Any]
    ) -> bool:
        """Writes a notification about a project, once; False when one of that key was written before.

        `key` names the occurrence, `budget:nlp:2026-11:usd:80` for instance; `kind` is one of
        `service.domain.notifications.TOPICS`.
        """
        values = {
            "key": key,
            "kind": kind,
            "at_s": self.clock(),
            "project": project,
            "message": storable(message),
            "data": dict(data),
        }
        known = select(schema.notices.c.id).where(schema.notices.c.key == key)
        if connection.execute(known).first() is not None:
            return False
        insert = statements.insert_or_keep(connection, schema.notices, ("key",))
        return bool(connection.execute(insert, values).rowcount)

    def subscriber(self, owner: str) -> User | None:
        return self.read_record(User, select(schema.users).where(_u.name == owner))

    def sees_project(self, owner: str, project: str) -> bool:
        """Whether a user may be told of a project, which exists."""
        with self.database.read() as connection:
            exists = connection.execute(select(_p.name).where(_p.name == project)).first() is not None
            return exists and _may_be_told(connection, owner, project)

    @transaction
    def address(self, connection: Connection) -> int:
        """Writes the deliveries of notifications that have none yet; returns the number of notifications.

        Several processes may do this at once: each notification is taken by one.
        """
        now = self.clock()
        unaddressed = (
            select(
                schema.notices,
                func.coalesce(_n.project, _x.project).label("of_project"),
                _x.owner.label("experiment_owner"),
                _x.name.label("experiment_name"),
            )
            .select_from(schema.notices.outerjoin(schema.experiments, _x.id == _n.experiment_id))
            .where(_n.addressed_s.is_(None))
            .order_by(_n.id)
            .limit(_GROUP)
            .with_for_update(skip_locked=True, of=schema.notices)
        )
        rows = connection.execute(unaddressed).mappings().all()
        due_s = self.database_time(connection)
        for row in rows:
            data = row["data"] or {}
            about = data.get("study") or data.get("experiment") or {}
            owner = row["experiment_owner"] or about.get("owner")
            subscribed = connection.execute(
                _SUBSCRIBED, {"project": row["of_project"], "owner": owner, "notice": row["id"]}
            ).mappings()
            new = [
                _delivery(subscription["id"], row["id"], _body(row), now, due_s)
                for subscription in subscribed
                if TOPICS.get(row["kind"], frozenset()) & set(subscription["topics"].split(","))
                and _may_be_told(connection, subscription["owner"], row["of_project"])
            ]
            if new:
                connection.execute(sa.insert(schema.deliveries), new)
        if rows:
            addressed = _n.id.in_([row["id"] for row in rows])
            connection.execute(update(schema.notices).where(addressed).values(addressed_s=now))
        return len(rows)

    @transaction
    def test_subscription(self, connection: Connection, id: int) -> Delivery:
        now = self.clock()
        subscription = _read(connection, id)
        message = f"a test of subscription {id}, for the topics {', '.join(subscription.topics)}"
        text = _message(TEST, now, {"message": message, "project": subscription.project})
        values = _delivery(id, None, text, now, self.database_time(connection))
        statement = sa.insert(schema.deliveries).returning(*schema.deliveries.c)
        return Delivery.from_row(connection.execute(statement, values).mappings().one())

    @transaction
    def take_deliveries(self, connection: Connection, limit: int, for_s: float) -> list[Outgoing]:
        """Begins an attempt at deliveries whose time has come; no other process begins one for `for_s`.

        The attempt is counted before anything is sent: a process that dies while it sends leaves the message
        to the next one, and the receiver may get it twice, under the same id. A message fails whose
        subscriber has lost sight of its project since it was written.
        """
        ended_s = self.clock()
        now = self.database_time(connection)
        due = (
            select(_d.id)
            .join(schema.subscriptions, _s.id == _d.subscription_id)
            .where(_d.state == DeliveryState.pending, _d.next_s <= now, _s.disabled_s.is_(None))
            .order_by(_d.next_s)
            .limit(limit)
            .with_for_update(skip_locked=True, of=schema.deliveries)
        )
        ids = list(connection.execute(due).scalars())
        if not ids:
            return []
        connection.execute(take(ids, now + for_s))
        outgoing: list[Outgoing] = []
        with_subscriptions = (
            select(schema.deliveries, _s.channel, _s.target, _s.secret, _s.owner)
            .join(schema.subscriptions, _s.id == _d.subscription_id)
            .where(_d.id.in_(ids))
            .order_by(_d.id)
        )
        for row in connection.execute(with_subscriptions).mappings().all():
            if _may_be_told(connection, row["owner"], json.loads(row["body"])["data"]["project"]):
                names = Outgoing.__dataclass_fields__.keys() - {"attempt"}
                outgoing.append(Outgoing(attempt=row["attempts"], **{name: row[name] for name in names}))
            else:
                values = {"state": DeliveryState.failed, "ended_s": ended_s, "answer": _OUT_OF_SIGHT}
                connection.execute(end_attempt(row["id"], row["attempts"], **values))
        return outgoing

    @transaction
    def delivered(self, connection: Connection, outgoing: Outgoing, answer: str) -> None:
        _end(connection, outgoing, answer, state=DeliveryState.delivered, ended_s=self.clock())

    @transaction
    def not_delivered(
        self, connection: Connection, outgoing: Outgoing, why: str, retry_in_s: float | None
    ) -> None:
        """Notes that an attempt failed; `retry_in_s` None = there is no other."""
        if retry_in_s is None:
            _end(connection, outgoing, why, state=DeliveryState.failed, ended_s=self.clock())
        else:
            _end(connection, outgoing, why, next_s=self.database_time(connection) + retry_in_s)

    @transaction
    def disable_subscription(self, connection: Connection, outgoing: Outgoing, why: str) -> None:
        """Ends a subscription whose receiver wants no more messages, and fails the delivery."""
        now = self.clock()
        connection.execute(
            update(schema.subscriptions)
            .where(_s.id == outgoing.subscription_id)
            .values(disabled_s=now, disabled_because=_line(why))
        )
        _end(connection, outgoing, why, state=DeliveryState.failed, ended_s=now)

    def deliveries(
        self,
        *,
        owner: str | None = None,
        subscription_id: int | None = None,
        within: str | None = None,
        limit: int = 50,
    ) -> list[Delivery]:
        statement = select(schema.deliveries).join(schema.subscriptions, _s.id == _d.subscription_id)
        if owner is not None:
            statement = statement.where(_s.owner == owner)
        if within is not None:
            of_token = statement.outerjoin(schema.tokens, _t.id == _s.token_id)
            statement = of_token.where(func.coalesce(_s.project, _t.project) == within)
        if subscription_id is not None:
            statement = statement.where(_d.subscription_id == subscription_id)
        return self.read_records(Delivery, statement.order_by(_d.id.desc()).limit(limit))

    @transaction
    def forget_deliveries(self, connection: Connection, older_than_s: float) -> None:
        before_s = self.clock() - older_than_s
        connection.execute(sa.delete(schema.deliveries).where(_d.ended_s < before_s))
        connection.execute(sa.delete(schema.notices).where(_n.addressed_s < before_s))


def _read(connection: Connection, id: int) -> Subscription:
    return required(record(connection, Subscription, _SUBSCRIPTIONS.where(_s.id == id)), "subscription", id)


def _may_be_told(connection: Connection, owner: str, project: str | None) -> bool:
    """Whether a subscriber still sees a project: memberships end, subscriptions stay.

    A name without an account belongs to someone who works without accounts.
    """
    user = record(connection, User, select(schema.users).where(_u.name == owner))
    if user is None or user.disabled_s is not None:
        return user is None
    if project is None or user.administrator:
        return True
    member = select(_m.user).where(_m.project == _p.name, _m.user == owner).exists()
    seen = select(_p.name).where(_p.name == project, _p.visible_to_all | member)
    return connection.execute(seen).first() is not None


def _shown(subscription: Subscription) -> dict[str, Any]:
    """For the audit log: of a URL only its host, as the path may be a secret."""
    names = ("owner", "project", "channel", "limited_to")
    shown = {name: getattr(subscription, name) for name in names}
    host = urlsplit(subscription.target).hostname
    return {**shown, "topics": list(subscription.topics), "target": host or subscription.target}


def _delivery(
    subscription_id: int, notice_id: int | None, body: str, now: float, due_s: float
) -> dict[str, Any]:
    return {
        "subscription_id": subscription_id,
        "notice_id": notice_id,
        "message_id": f"msg_{secrets.token_hex(12)}",
        "body": body,
        "state": DeliveryState.pending,
        "attempts": 0,
        "next_s": due_s,
        "created_s": now,
    }


def _body(notice: Mapping[Any, Any]) -> str:
    data = {"message": notice["message"], "project": notice["of_project"], **(notice["data"] or {})}
    if notice["experiment_id"] is not None:
        data["experiment"] = {
            "id": notice["experiment_id"],
            "name": notice["experiment_name"],
            "owner": notice["experiment_owner"],
        }
    return _message(notice["kind"], notice["at_s"], data)


def _message(kind: str, at_s: float, data: Mapping[str, Any]) -> str:
    """The text that is sent: type, time and data, as Standard Webhooks has them."""
    timestamp = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"type": kind, "timestamp": timestamp, "data": data}, separators=(",", ":"))


def _end(connection: Connection, outgoing: Outgoing, answer: str, **values: Any) -> None:
    connection.execute(end_attempt(outgoing.id, outgoing.attempt, answer=_line(answer), **values))


def _line(text: str) -> str:
    return storable((text.strip().splitlines() or [""])[0][:_LONGEST_ANSWER])


def take(ids: list[int], until_s: float) -> sa.Update:
    """Begins an attempt at deliveries: no one else begins one before `until_s`."""
    return (
        update(schema.deliveries)
        .where(_d.id.in_(ids), _d.state == DeliveryState.pending)
        .values(attempts=_d.attempts + 1, next_s=until_s)
    )


def disable_subscriptions_of(token_id: int, now: float, because: str) -> sa.Update:
    return (
        update(schema.subscriptions)
        .where(_s.token_id == token_id, _s.disabled_s.is_(None))
        .values(disabled_s=now, disabled_because=because)
    )


def pause(id: int, because: str | None, **values: Any) -> sa.Update:
    """Pauses or resumes a subscription, unless something else has ended it meanwhile."""
    same = _s.disabled_because.is_not_distinct_from(because)
    return update(schema.subscriptions).where(_s.id == id, same).values(**values)


def end_attempt(delivery_id: int, attempt: int, **values: Any) -> sa.Update:
    """Notes the result of an attempt, unless it took so long that another has begun."""
    return (
        update(schema.deliveries)
        .where(_d.id == delivery_id, _d.attempts == attempt, _d.state == DeliveryState.pending)
        .values(**values)
    )
