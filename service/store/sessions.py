"""Browser sessions and device logins: opened, recognised, and ended at once when their ground goes."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, select, update

from service.db import schema
from service.db.errors import NotFound
from service.domain.access import Action, Actor, Principal, Scope
from service.domain.people import (
    GRANT_LASTS_S,
    GRANT_POLL_EVERY_S,
    SESSION_TOUCH_EVERY_S,
    DeviceGrant,
    OpenSession,
    Session,
    User,
    public_id,
)
from service.store.audit import note_change
from service.store.base import StorePart, required, storable, transaction

_s, _u, _t, _d = schema.sessions.c, schema.users.c, schema.tokens.c, schema.device_grants.c


class Polled(StrEnum):
    """What a poll for a device login that gives no token is answered with; the words are RFC 8628's."""

    pending = "authorization_pending"
    too_fast = "slow_down"
    denied = "access_denied"
    expired = "expired_token"


@dataclass(frozen=True, slots=True)
class Approval:
    user: str
    scope: Scope
    project: str | None  # Only project of its token; None = all of the user's
    token_expires_s: float


@dataclass(frozen=True, slots=True)
class Approved:
    name: str
    user: str
    scope: Scope
    project: str | None
    lasts_s: float


class Sessions(StorePart):
    @transaction
    def begin(
        self,
        connection: Connection,
        sha256: str,
        user: str,
        *,
        csrf: str,
        lasting_s: float,
        idle_s: float,
        token_sha256: str | None,
        agent: str | None,
        replaces: str | None,
        actor: Actor,
    ) -> None:
        """Opens a session, and ends the one that the same browser held before (`replaces`).

        `sha256` is the hash of what the browser holds, `token_sha256` that of the token that opened it;
        sessions that were idle beyond `idle_s` are removed.
        """
        now = self.clock()
        connection.execute(sa.delete(schema.sessions).where(~_is_alive(now, idle_s)))
        if replaces is not None:
            connection.execute(sa.delete(schema.sessions).where(_s.sha256 == replaces))
        connection.execute(
            sa.insert(schema.sessions),
            {
                "sha256": sha256,
                "user": user,
                "created_s": now,
                "last_used_s": now,
                "expires_s": now + lasting_s,
                "csrf": csrf,
                "token_sha256": token_sha256,
                "from_address": actor.address,
                "agent": None if agent is None else storable(agent),
            },
        )
        note_change(connection, actor, "session.begin", public_id(sha256), now, after={"user": user})

    def open(self, sha256: str, idle_s: float, own_token_sha256: str | None) -> OpenSession | None:
        """None if the session is not good any more. `own_token_sha256`: the installation's own token."""
        now = self.clock()
        good = _good_sessions(now, idle_s, own_token_sha256, schema.sessions, _u.subject)
        rows = self.read(good.where(_s.sha256 == sha256))
        if not rows:
            return None
        (row,) = rows
        if row.last_used_s < now - SESSION_TOUCH_EVERY_S:
            older = (_s.sha256 == sha256) & (_s.last_used_s < now)
            touch = update(schema.sessions).where(older).values(last_used_s=now)
            self.database.write(lambda connection: connection.execute(touch).close())
        return OpenSession(Session.from_row(row._mapping), row.csrf, row.token_sha256, row.subject)

    def live(
        self,
        idle_s: float,
        own_token_sha256: str | None,
        user: str | None = None,
        *,
        within: str | None = None,
    ) -> list[Session]:
        """The last used first, of a user or everyone; `within`: opened with a token for this project."""
        statement = _good_sessions(self.clock(), idle_s, own_token_sha256, schema.sessions)
        statement = statement.order_by(_s.last_used_s.desc(), _s.sha256)
        if within is not None:
            statement = statement.where(_t.project == within)
        if user is not None:
            statement = statement.where(_s.user == user)
        return self.read_records(Session, statement)

    @transaction
    def end(self, connection: Connection, sha256: str, actor: Actor) -> None:
        """Ends a session by the hash of what its browser holds; nothing if it has ended."""
        now = self.clock()
        if connection.execute(sa.delete(schema.sessions).where(_s.sha256 == sha256)).rowcount:
            before = {"user": actor.user}
            note_change(connection, actor, "session.end", public_id(sha256), now, before=before)

    @transaction
    def end_by_id(self, connection: Connection, id: str, by: Principal, address: str | None = None) -> None:
        """Ends a session by its public id.

        Raises:
            NotFound: there is none, or it is not theirs: not their user's, or one that may do more than they.
        """
        now = self.clock()
        opened = select(_s.user, _t.scope, _t.project).select_from(
            schema.sessions.outerjoin(schema.tokens, _t.sha256 == _s.token_sha256)
        )
        session = connection.execute(opened.where(_s.sha256.startswith(id, autoescape=True))).one_or_none()
        if session is None or not (session.user == by.user or by.may(Action.administer)):
            raise NotFound("session", id)
        # A session that no token limits does what its user's role allows.
        if not by.reaches(session.project) or not by.scope.includes(session.scope or Scope.admin):
            raise NotFound("session", id)
        connection.execute(sa.delete(schema.sessions).where(_s.sha256.startswith(id, autoescape=True)))
        note_change(connection, by.actor(address), "session.end", id, now, before={"user": session.user})

    @transaction
    def begin_device_login(
        self,
        connection: Connection,
        device_sha256: str,
        user_code: str,
        name: str,
        scope: Scope,
        from_address: str | None,
    ) -> DeviceGrant:
        now = self.clock()
        grant = DeviceGrant(user_code, storable(name), from_address, now, now + GRANT_LASTS_S, scope)
        connection.execute(sa.delete(schema.device_grants).where(_d.expires_s < now - 86400.0))
        connection.execute(sa.insert(schema.device_grants), {"device_sha256": device_sha256, **asdict(grant)})
        return grant

    def pending_device_login(self, user_code: str) -> DeviceGrant:
        """A device login that waits for a decision and has not expired."""
        pending = select(schema.device_grants).where(*_is_pending(user_code, self.clock()))
        return required(self.read_record(DeviceGrant, pending), "waiting device login", user_code)

    @transaction
    def decide_device_login(
        self, connection: Connection, user_code: str, approval: Approval | None, actor: Actor
    ) -> None:
        """Approves a waiting device login, or denies it (None)."""
        now = self.clock()
        granted = None if approval is None else asdict(approval)
        values = {"denied_s": now} if granted is None else {"approved_s": now, **granted}
        action = "device.deny" if granted is None else "device.approve"
        decide = update(schema.device_grants).where(*_is_pending(user_code, now)).values(**values)
        if not connection.execute(decide).rowcount:
            raise NotFound("waiting device login", user_code)
        note_change(connection, actor, action, user_code, now, after=granted)

    @transaction
    def poll_device_login(self, connection: Connection, device_sha256: str) -> Polled | Approved:
        """The token that an approved device login is to be given, or why it is given none yet."""
        now = self.clock()
        grant = select(schema.device_grants).where(_d.device_sha256 == device_sha256)
        row = connection.execute(grant).one_or_none()
        if row is None or (row.expires_s <= now and row.denied_s is None):
            return Polled.expired
        if row.denied_s is not None:
            return Polled.denied
        in_time = (
            update(schema.device_grants)
            .where(_d.device_sha256 == device_sha256)
            .where(sa.or_(_d.last_poll_s.is_(None), _d.last_poll_s <= now - GRANT_POLL_EVERY_S))
            .values(last_poll_s=now)
        )
        if not connection.execute(in_time).rowcount:
            return Polled.too_fast
        if row.approved_s is None:
            return Polled.pending
        return Approved(
            f"{row.name} {row.user_code}", row.user, row.scope, row.project, row.token_expires_s - now
        )

    def user_of_subject(self, subject: str) -> User | None:
        return self.read_record(User, select(schema.users).where(_u.subject == subject))


def _good_sessions(now: float, idle_s: float, own_token_sha256: str | None, *columns: Any) -> sa.Select[Any]:
    """A session ends when it expires, its user is disabled, or the token that opened it does not hold."""
    token_holds = (
        _t.id.is_not(None) & _t.revoked_s.is_(None) & sa.or_(_t.expires_s.is_(None), _t.expires_s > now)
    )
    return (
        select(*columns)
        .select_from(schema.sessions)
        .join(schema.users, _u.name == _s.user)
        .outerjoin(schema.tokens, _t.sha256 == _s.token_sha256)
        .where(
            _is_alive(now, idle_s),
            _u.disabled_s.is_(None),
            sa.or_(_s.token_sha256.is_(None), _s.token_sha256 == own_token_sha256, token_holds),
        )
    )


def _is_pending(user_code: str, now: float) -> tuple[sa.ColumnElement[bool], ...]:
    undecided = (_d.approved_s.is_(None), _d.denied_s.is_(None))
    return (_d.user_code == user_code, _d.expires_s > now, *undecided)


def _is_alive(now: float, idle_s: float) -> sa.ColumnElement[bool]:
    return (_s.expires_s > now) & (_s.last_used_s > now - idle_s)
