from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from service.domain.access import Role, Scope, UserKind
from service.domain.records import StoredRecord
from service.domain.serialization import Serializable

LONGEST_NOTES = 4_000  # Characters
LONGEST_RUN_NAME = 200
TAG_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,49}$"
MOST_TAGS = 50
TOKEN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9 ._@-]{0,99}$"
SESSION_IDLE_S: Final = 24 * 3600.0  # Longest time between two requests of a session
SESSION_LASTS_S: Final = 14 * 24 * 3600.0  # Longest life of a session, however busy
SESSION_TOUCH_EVERY_S: Final = 300.0
"""How exactly the last use of a session is known: a write per request would cost more than it tells."""
GRANT_LASTS_S: Final = 600.0  # Time in which a device login must be approved
GRANT_POLL_EVERY_S: Final = 5.0  # Shortest time between two polls for a device login
DEVICE_TOKEN_LASTS_S: Final = 90 * 24 * 3600.0
PUBLIC_ID_LENGTH: Final = 16


@dataclass(frozen=True, slots=True)
class User(StoredRecord):
    """A person or a program that submits experiments."""

    name: str  # Name, which experiments have as their owner
    kind: UserKind  # person, or service for a service account
    email: str | None  # Where messages go; null = nowhere
    administrator: bool  # Whether they may do everything
    disabled_s: float | None
    """When they were disabled: their tokens and sessions are refused; null = they are not."""
    created_s: float  # When they were added
    subject: str | None  # Identity at an OpenID provider, `issuer|subject`; null = none


@dataclass(frozen=True, slots=True)
class Token(StoredRecord):
    """A secret that stands for a user, within limits; the secret itself is not kept."""

    id: int  # Number of the token
    user: str  # User that it stands for
    name: str  # Name for people, such as the machine that it is on
    scope: Scope  # What it may be used for; each scope includes those before it: read, submit, operate, admin
    project: str | None  # Only project that it is for; null = all projects of its user
    prefix: str  # First characters of the secret, to recognise it by
    created_s: float  # When it was created
    expires_s: float | None  # When it stops working; null = never
    revoked_s: float | None  # When it was revoked; null = it was not
    last_used_s: float | None  # When it was last used, to within a minute or two; null = never


@dataclass(frozen=True, slots=True)
class NewToken(Token):
    """A token at its creation, the one time that its secret is shown."""

    secret: str  # What a request carries in `Authorization: Bearer`


@dataclass(frozen=True, slots=True)
class Project(StoredRecord):
    """What experiments belong to: its members see and manage them."""

    name: str  # Name, which specs have as `project`
    title: str  # Title for people
    visible_to_all: bool  # Whether every user may see its experiments, or only members
    notes: str  # Notes of people
    archived_s: float | None  # When it was archived: it takes no new experiments; null = it is not
    created_s: float  # When it was created
    settings: dict[str, Any]
    """Weight, priority classes, quotas and budgets, where they differ from the defaults."""


@dataclass(frozen=True, slots=True)
class Member(StoredRecord):
    """A user's role in a project."""

    user: str  # The user
    role: Role  # viewer, member or maintainer; each includes those before it


@dataclass(frozen=True, slots=True)
class ProjectDetail(Project):
    """One project with its members."""

    members: list[Member]  # By name


@dataclass(frozen=True, slots=True)
class AuditRow(StoredRecord):
    """One change: who made it, with what, from where, and what it changed."""

    id: int  # From 1, rising
    at_s: float  # When it was made
    actor: str  # User who made it
    token_id: int | None  # Token that the request carried; null = a session, or none
    address: str | None  # Network address that the request came from; null = not over the network
    action: str  # What was done: the kind of object and a verb, `token.revoke` for instance
    object_kind: str  # user, token, session, device, project, experiment, run, subscription or view
    object_id: str  # Its name or number
    before: dict[str, Any] | None  # Fields that changed, as they were; null = it is new
    after: dict[str, Any] | None  # The same fields, as they are now; null = it is gone


@dataclass(frozen=True, slots=True)
class AuditPage(Serializable):
    """Rows of the audit log, the oldest first unless `newest_first` was asked for."""

    items: list[AuditRow]  # At most `limit` of them
    next_after: int | None  # Give this as `after` for the rows that follow; null = these are the last


@dataclass(frozen=True, slots=True)
class Session(StoredRecord):
    """One browser that is logged in."""

    id: str  # Public id, for ending it; not what the browser holds
    user: str  # Who is logged in
    created_s: float  # When they logged in
    last_used_s: float  # When it was last used, to within five minutes
    expires_s: float  # When it ends, however busy; unused for a day, it ends earlier
    from_address: str | None  # Address that it was opened from
    agent: str | None  # What the browser calls itself

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Self:
        return cls(
            public_id(row["sha256"]), row["user"], row["created_s"], row["last_used_s"], row["expires_s"],
            row["from_address"], row["agent"],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpenSession:
    session: Session
    csrf: str  # What a change must carry besides the cookie
    token_sha256: str | None
    """Hash of the token that it was opened with; None = the user proved their name in another way."""
    subject: str | None  # `issuer|sub` of the OpenID provider that vouched for the user


@dataclass(frozen=True, slots=True)
class DeviceGrant(StoredRecord):
    """A command line that is waiting for approval of its login."""

    user_code: str  # Code that it shows, `WDJB-MJHT` for instance
    name: str  # What it calls itself
    from_address: str | None  # Address that it asks from
    created_s: float  # When it asked
    expires_s: float  # Until when it can be approved
    scope: Scope  # What it asks to be allowed at most


@dataclass(frozen=True, slots=True)
class Whoami(Serializable):
    """Who sends a request, and what limits what they may do."""

    user: str  # Name that their experiments have as owner
    via: str  # `token`, `session`, `proxy`, or `open` on a service that asks no one who they are
    scope: Scope  # Most that this token or session may be used for
    administrator: bool  # Whether they may do everything, within the scope
    roles: dict[str, Role]  # Role by project
    restricted_to: str | None  # Only project that the token is for; null = all of theirs
    token_name: str | None  # Name of the token; null without one
    csrf: str | None
    """What a change made with this session's cookie carries in `Stillhouse-CSRF`; null without a session."""


def public_id(sha256: str) -> str:
    return sha256[:PUBLIC_ID_LENGTH]
