"""Users, service accounts and their tokens."""

import hashlib
import logging
import re
import secrets
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, select, update

from service.config.settings import Settings
from service.db import schema, statements
from service.db.engine import Database
from service.db.errors import BadValue, Conflict, StoreError
from service.domain.access import (
    DEFAULT_PROJECT,
    LOCAL_ACTOR,
    TOKEN_PREFIX,
    Actor,
    Principal,
    Role,
    Scope,
    UserKind,
    is_user_name,
)
from service.domain.people import TOKEN_NAME_PATTERN, NewToken, Project, Token, User
from service.store.audit import note_change
from service.store.base import Clocks, StorePart, record, required, transaction
from service.store.notifications import disable_subscriptions_of

_u, _t, _p, _d, _m = (
    schema.users.c,
    schema.tokens.c,
    schema.projects.c,
    schema.device_grants.c,
    schema.members.c,
)

logger = logging.getLogger(__name__)
NOTE_USES_EVERY_S: Final = 60.0  # Time between two writes of when tokens were last used
_TOKEN_BYTES = 32
_SHOWN_CHARACTERS = 10
_TOKEN_NAME = re.compile(TOKEN_NAME_PATTERN)
EMAIL = re.compile(r"[^@\s]{1,64}@[^@\s]{1,190}")
_TOKEN = [_t[name] for name in Token.__dataclass_fields__]
_NOTE_TOKEN_USE = (
    update(schema.tokens)
    .where(
        _t.id == bindparam("token"),
        sa.or_(_t.last_used_s.is_(None), _t.last_used_s < bindparam("at", type_=_t.last_used_s.type)),
    )
    .values(last_used_s=bindparam("at", type_=_t.last_used_s.type))
)
"""Notes when a token was last used; never goes back."""


def new_secret() -> str:
    """Text of a new token: its prefix and 256 random bits."""
    return TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def secret_sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Refused(Exception):
    """A token or user is not accepted; the message says why in one line, and names no user."""


class People(StorePart):
    def __init__(self, database: Database, settings: Settings, clocks: Clocks) -> None:
        super().__init__(database, settings, clocks)
        self._uses: dict[int, float] = {}
        self._uses_written_s = float("-inf")
        self._uses_lock = threading.Lock()

    def users(self) -> list[User]:
        return self.read_records(User, select(schema.users).order_by(_u.name))

    def user(self, name: str) -> User:
        with self.database.read() as connection:
            return read_user(connection, name)

    @transaction
    def add_user(
        self,
        connection: Connection,
        name: str,
        *,
        kind: UserKind = UserKind.person,
        email: str | None = None,
        administrator: bool = False,
        subject: str | None = None,
        actor: Actor = LOCAL_ACTOR,
    ) -> User:
        """Adds a user, who becomes a member of the project `default`.

        `subject` is their identity at an OpenID provider. Raises `Conflict` when the name is taken, or the
        identity is another user's.
        """
        if not is_user_name(name):
            raise BadValue(
                "name", f"{name[:100]!r} is not a user's name; use up to 100 letters, digits and . _ @ -"
            )
        if kind is UserKind.local:
            raise BadValue("kind", "local is whoever uses a service without tokens; use person or service")
        _check_email(email)
        now = self.clock()
        new = User(name, kind, email, administrator, None, now, subject)
        if subject is not None:
            other = connection.execute(select(_u.name).where(_u.subject == subject)).scalar()
            if other is not None:
                raise Conflict(f"the identity {subject} belongs to user {other}")
        keep = statements.insert_or_keep(connection, schema.users, ("name",))
        if connection.execute(keep.values(asdict(new)).returning(schema.users.c.name)).scalar() is None:
            raise Conflict(f"user {name} exists already; choose another name")
        connection.execute(
            statements.insert_or_keep(connection, schema.members, ("project", "user")),
            {"project": DEFAULT_PROJECT, "user": name, "role": Role.member},
        )
        note_change(connection, actor, "user.add", name, now, after=_shown(new))
        return new

    @transaction
    def set_user(
        self,
        connection: Connection,
        name: str,
        *,
        disabled: bool | None = None,
        administrator: bool | None = None,
        email: str | None = None,
        actor: Actor = LOCAL_ACTOR,
    ) -> User:
        """Changes a user; None leaves a field as it is.

        Args:
            disabled: refuse their tokens and sessions; what they submitted stays and runs.
            email: where messages go; empty = nowhere.
        """
        _check_email(email or None)
        now = self.clock()
        before = read_user(connection, name, lock=True)
        values: dict[str, Any] = {}
        if disabled is not None and disabled != (before.disabled_s is not None):
            values["disabled_s"] = now if disabled else None
        if administrator is not None and administrator != before.administrator:
            values["administrator"] = administrator
        if email is not None and (email or None) != before.email:
            values["email"] = email or None
        if not values:
            return before
        connection.execute(update(schema.users).where(_u.name == name).values(**values))
        after = read_user(connection, name)
        verb = ("disable" if disabled else "enable") if values.keys() == {"disabled_s"} else "set"
        note_change(connection, actor, f"user.{verb}", name, now, before=_shown(before), after=_shown(after))
        return after

    def tokens(self, user: str | None = None) -> list[Token]:
        """Tokens of a user, or of everyone, the newest first, revoked ones included."""
        statement = select(*_TOKEN).order_by(_t.id.desc())
        return self.read_records(Token, statement if user is None else statement.where(_t.user == user))

    def token(self, id: int) -> Token:
        with self.database.read() as connection:
            return _read_token(connection, id)

    @transaction
    def create_token(
        self,
        connection: Connection,
        user: str,
        *,
        name: str,
        scope: Scope,
        project: str | None = None,
        lasts_s: float | None = None,
        device_sha256: str | None = None,
        actor: Actor = LOCAL_ACTOR,
    ) -> NewToken:
        """Creates a token, and returns it with its secret, which is stored only as a hash.

        Args:
            name: for people; unique among the working tokens of a user.
            project: the only project that it is for; None = all of the user's.
            lasts_s: seconds until it expires; None = never.
            device_sha256: the approved device login that it is for, which gives one token.

        Raises:
            Conflict: the user is disabled, is not the administrator that scope `admin` needs, or has a token
                of this name; or the device has its token.
        """
        if not _TOKEN_NAME.fullmatch(name):
            raise BadValue(
                "name", f"{name[:100]!r} is not a token's name; use up to 100 letters, digits and . _ @ -"
            )
        now, secret = self.clock(), new_secret()
        expires_s = None if lasts_s is None else now + lasts_s
        if device_sha256 is not None:
            approved = (_d.device_sha256 == device_sha256) & _d.approved_s.is_not(None)
            if not connection.execute(sa.delete(schema.device_grants).where(approved)).rowcount:
                raise Conflict("the login has given its token; begin again")
        owner = read_user(connection, user, lock=True)
        if owner.disabled_s is not None:
            raise Conflict(f"user {user} is disabled; enable them first: stillhouse user enable {user}")
        if scope is Scope.admin and not owner.administrator:
            raise Conflict(f"user {user} is not an administrator; choose scope read, submit or operate")
        if project is not None:
            read_project(connection, project)
        live_token_named = select(_t.id).where(
            _t.user == user,
            _t.name == name,
            _t.revoked_s.is_(None),
            sa.or_(_t.expires_s.is_(None), _t.expires_s > now),
        )
        if connection.execute(live_token_named).scalar() is not None:
            raise Conflict(
                f"user {user} has a token {name!r} already; choose another name, or revoke that one"
            )
        shown = secret[:_SHOWN_CHARACTERS]
        row: dict[str, Any] = {
            "user": user,
            "name": name,
            "scope": scope,
            "project": project,
            "prefix": shown,
            "created_s": now,
            "expires_s": expires_s,
            "revoked_s": None,
            "last_used_s": None,
        }
        insert = sa.insert(schema.tokens).values(**row, sha256=secret_sha256(secret))
        id: int = connection.execute(insert.returning(schema.tokens.c.id)).scalar_one()
        note_change(connection, actor, "token.create", id, now, after=_granted(row))
        return NewToken(id=id, **row, secret=secret)

    @transaction
    def revoke_token(self, connection: Connection, id: int, *, actor: Actor = LOCAL_ACTOR) -> Token:
        """Ends a token, and the subscriptions made with it; one that was revoked before stays as it is."""
        now = self.clock()
        before = _read_token(connection, id, lock=True)
        if before.revoked_s is not None:
            return before
        connection.execute(
            update(schema.tokens).where(_t.id == id, _t.revoked_s.is_(None)).values(revoked_s=now)
        )
        because = f"the token {before.name!r} that it was made with was revoked"
        connection.execute(disable_subscriptions_of(id, now, because))
        note_change(connection, actor, "token.revoke", id, now, before=_granted(asdict(before)))
        return _read_token(connection, id)

    def token_used(self, id: int) -> None:
        """Notes the use of a token; written for all tokens together, at most once a minute."""
        due = self.monotonic() - NOTE_USES_EVERY_S
        with self._uses_lock:
            self._uses[id] = self.clock()
            if self._uses_written_s > due:
                return
            self._uses_written_s = self.monotonic()
        self.write_token_uses()

    def write_token_uses(self) -> None:
        with self._uses_lock:
            uses, self._uses = self._uses, {}
        if not uses:
            return
        rows = [{"token": id, "at": at_s} for id, at_s in sorted(uses.items())]  # In one order: no deadlock.
        try:
            self.database.write(lambda connection: connection.execute(_NOTE_TOKEN_USE, rows))
        except StoreError as error:  # The request that the token came with does not fail for that.
            logger.warning("the last use of %d tokens was not written: %s", len(rows), error)

    def principal_of_token(self, sha256: str) -> Principal:
        """Raises `Refused` when the token is unknown, expired or revoked, or its user is disabled."""
        now = self.clock()
        with self.database.read() as connection:
            token_by_hash = select(
                _t.id, _t.user, _t.name, _t.scope, _t.project, _t.expires_s, _t.revoked_s
            ).where(_t.sha256 == sha256)
            row = connection.execute(token_by_hash).one_or_none()
            if row is None:
                raise Refused("no such token; create one with: stillhouse token create")
            if row.revoked_s is not None:
                raise Refused("the token was revoked; create another with: stillhouse token create")
            if row.expires_s is not None and row.expires_s <= now:
                ended = datetime.fromtimestamp(row.expires_s, UTC)
                raise Refused(
                    f"the token expired on {ended:%Y-%m-%d at %H:%M} UTC; create another with: "
                    "stillhouse token create"
                )
            principal = _principal(connection, row.user, row.scope)
        return replace(principal, restricted_to=row.project, token_id=row.id, token_name=row.name)

    def principal_of_user(self, user: str, scope: Scope = Scope.admin) -> Principal:
        """A user who has proved their name."""
        with self.database.read() as connection:
            return _principal(connection, user, scope)


def read_user(connection: Connection, name: str, *, lock: bool = False) -> User:
    statement = select(schema.users).where(_u.name == name)
    found = record(connection, User, statement.with_for_update() if lock else statement)
    return required(found, "user", name)


def _read_token(connection: Connection, id: int, *, lock: bool = False) -> Token:
    statement = select(*_TOKEN).where(_t.id == id)
    found = record(connection, Token, statement.with_for_update() if lock else statement)
    return required(found, "token", id)


def read_project(connection: Connection, name: str, *, lock: bool = False) -> Project:
    statement = select(schema.projects).where(_p.name == name)
    found = record(connection, Project, statement.with_for_update() if lock else statement)
    return required(found, "project", name)


def _check_email(email: str | None) -> None:
    if email is not None and not EMAIL.fullmatch(email):
        raise BadValue("email", f"{email[:100]!r} is not an e-mail address; write it as ada@example.org")


def _shown(user: User) -> dict[str, Any]:
    return {name: value for name, value in asdict(user).items() if name not in ("name", "created_s")}


def _granted(token: Mapping[str, Any]) -> dict[str, Any]:
    return {name: token[name] for name in ("user", "name", "scope", "project", "prefix", "expires_s")}


def _principal(connection: Connection, user: str, scope: Scope) -> Principal:
    user_by_name = select(_u.kind, _u.administrator, _u.disabled_s).where(_u.name == user)
    row = connection.execute(user_by_name).one_or_none()
    if row is None:
        raise Refused("the account does not exist; ask an administrator to add it")
    if row.disabled_s is not None:
        raise Refused("the account is disabled; ask an administrator to enable it")
    roles = connection.execute(select(_m.project, _m.role).where(_m.user == user))
    open_to_all = connection.execute(select(_p.name).where(_p.visible_to_all == sa.true())).scalars()
    return Principal(
        user,
        row.kind,
        scope,
        {row.project: row.role for row in roles},
        frozenset(open_to_all),
        administrator=bool(row.administrator),
    )
