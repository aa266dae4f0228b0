"""Browser sessions and device logins: opened, recognised, and ended at once when their ground goes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

import sqlalchemy as sa
from sqlalchemy import Connection

from service.db import schema, session_statements
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
from service.store.base import StorePart, storable


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
    project: str | None
    """Only project of its token; None = all of the user's."""
    token_expires_s: float


@dataclass(frozen=True, slots=True)
class Approved:
    name: str
    user: str
    scope: Scope
    project: str | None
    lasts_s: float


class Sessions(StorePart):
    def begin_session(
        self,
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

        def body(connection: Connection) -> None:
            connection.execute(session_statements.forget_expired_sessions(now, idle_s))
            if replaces is not None:
                connection.execute(session_statements.end_session(replaces))
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

        self.database.write(body)

    def open_session(self, sha256: str, idle_s: float, own_token_sha256: str | None) -> OpenSession | None:
        """None if the session is not good any more. `own_token_sha256`: the installation's own token."""
        now = self.clock()
        with self.database.read() as connection:
            row = (
                connection.execute(session_statements.open_session(sha256, now, idle_s, own_token_sha256))
                .mappings()
                .one_or_none()
            )
        if row is None:
            return None
        if row["last_used_s"] < now - SESSION_TOUCH_EVERY_S:
            touch = session_statements.touch_session(sha256, now)
            self.database.write(lambda connection: connection.execute(touch).close())
        return OpenSession(Session.from_row(row), row["csrf"], row["token_sha256"], row["subject"])

    def live_sessions(
        self,
        idle_s: float,
        own_token_sha256: str | None,
        user: str | None = None,
        *,
        within: str | None = None,
    ) -> list[Session]:
        """The last used first, of a user or everyone; `within`: opened with a token for this project."""
        statement = session_statements.live_sessions(self.clock(), idle_s, own_token_sha256, user, within)
        with self.database.read() as connection:
            return [Session.from_row(row) for row in connection.execute(statement).mappings()]

    def end_session(self, sha256: str, actor: Actor) -> None:
        """Ends a session by the hash of what its browser holds; nothing if it has ended."""
        now = self.clock()

        def body(connection: Connection) -> None:
            if connection.execute(session_statements.end_session(sha256)).rowcount:
                before = {"user": actor.user}
                note_change(connection, actor, "session.end", public_id(sha256), now, before=before)

        self.database.write(body)

    def end_session_by_id(self, id: str, by: Principal, address: str | None = None) -> None:
        """Ends a session by its public id.

        Raises:
            NotFound: there is none, or it is not theirs: not their user's, or one that may do more than they.
        """
        now = self.clock()

        def body(connection: Connection) -> None:
            found = connection.execute(session_statements.session_by_id(id)).one_or_none()
            if found is None or not (found.user == by.user or by.may(Action.administer)):
                raise NotFound("session", id)
            # A session that no token limits does what its user's role allows.
            if not by.reaches(found.project) or not by.scope.includes(found.scope or Scope.admin):
                raise NotFound("session", id)
            connection.execute(session_statements.end_session_by_id(id))
            note_change(connection, by.actor(address), "session.end", id, now, before={"user": found.user})

        self.database.write(body)

    def begin_device_login(
        self, device_sha256: str, user_code: str, name: str, scope: Scope, from_address: str | None
    ) -> DeviceGrant:
        now, name = self.clock(), storable(name)
        row = {
            "device_sha256": device_sha256,
            "user_code": user_code,
            "created_s": now,
            "expires_s": now + GRANT_LASTS_S,
            "name": name,
            "from_address": from_address,
            "scope": scope,
        }

        def body(connection: Connection) -> None:
            connection.execute(session_statements.forget_expired_grants(now))
            connection.execute(sa.insert(schema.device_grants), row)

        self.database.write(body)
        return DeviceGrant(user_code, name, from_address, now, now + GRANT_LASTS_S, scope)

    def pending_device_login(self, user_code: str) -> DeviceGrant:
        """A device login that waits for a decision and has not expired."""
        with self.database.read() as connection:
            row = (
                connection.execute(session_statements.pending_grant(user_code, self.clock()))
                .mappings()
                .one_or_none()
            )
        if row is None:
            raise NotFound("waiting device login", user_code)
        return DeviceGrant.from_row(row)

    def decide_device_login(self, user_code: str, approval: Approval | None, actor: Actor) -> None:
        """Approves a waiting device login, or denies it (None)."""
        now = self.clock()
        granted = None if approval is None else asdict(approval)
        values = {"denied_s": now} if granted is None else {"approved_s": now, **granted}
        action = "device.deny" if granted is None else "device.approve"

        def body(connection: Connection) -> None:
            decided = connection.execute(session_statements.decide_grant(user_code, now, values))
            if decided.rowcount == 0:
                raise NotFound("waiting device login", user_code)
            note_change(connection, actor, action, user_code, now, after=granted)

        self.database.write(body)

    def poll_device_login(self, device_sha256: str) -> Polled | Approved:
        """The token that an approved device login is to be given, or why it is given none yet."""
        now = self.clock()

        def body(connection: Connection) -> Polled | Approved:
            row = connection.execute(session_statements.grant(device_sha256)).one_or_none()
            if row is None or (row.expires_s <= now and row.denied_s is None):
                return Polled.expired
            if row.denied_s is not None:
                return Polled.denied
            in_time = session_statements.note_poll(device_sha256, now, GRANT_POLL_EVERY_S)
            if not connection.execute(in_time).rowcount:
                return Polled.too_fast
            if row.approved_s is None:
                return Polled.pending
            return Approved(
                f"{row.name} {row.user_code}", row.user, row.scope, row.project, row.token_expires_s - now
            )

        return self.database.write(body)

    def user_of_subject(self, subject: str) -> User | None:
        """The user with this identity at an OpenID provider."""
        with self.database.read() as connection:
            row = connection.execute(session_statements.user_of_subject(subject)).mappings().one_or_none()
        return None if row is None else User.from_row(row)
