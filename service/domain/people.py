"""Users, tokens, projects and the audit log, as they are stored and sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from service.domain.access import Role, Scope, UserKind
from service.domain.records import StoredRecord
from service.domain.serialization import Serializable

LONGEST_NOTES = 4_000
"""Characters of notes at most, of a project or an experiment."""
TAG_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,49}$"
"""Tags of an experiment."""
MOST_TAGS = 50
"""Tags of an experiment at most."""
TOKEN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9 ._@-]{0,99}$"
"""Names of tokens."""


@dataclass(frozen=True, slots=True)
class User(StoredRecord):
    """A person or a program that submits experiments."""

    name: str
    """Name, which experiments have as their owner."""
    kind: UserKind
    """person, or service for a service account."""
    email: str | None
    """Where messages go; null = nowhere."""
    administrator: bool
    """Whether they may do everything."""
    disabled_s: float | None
    """When they were disabled: their tokens and sessions are refused; null = they are not."""
    created_s: float
    """When they were added."""
    subject: str | None
    """Identity at an OpenID provider, `issuer|subject`; null = none."""


@dataclass(frozen=True, slots=True)
class Token(StoredRecord):
    """A secret that stands for a user, within limits; the secret itself is not kept."""

    id: int
    """Number of the token."""
    user: str
    """User that it stands for."""
    name: str
    """Name for people, such as the machine that it is on."""
    scope: Scope
    """What it may be used for; each scope includes those before it: read, submit, operate, admin."""
    project: str | None
    """Only project that it is for; null = all projects of its user."""
    prefix: str
    """First characters of the secret, to recognise it by."""
    created_s: float
    """When it was created."""
    expires_s: float | None
    """When it stops working; null = never."""
    revoked_s: float | None
    """When it was revoked; null = it was not."""
    last_used_s: float | None
    """When it was last used, to within a minute or two; null = never."""


@dataclass(frozen=True, slots=True)
class NewToken(Token):
    """A token at its creation, the one time that its secret is shown."""

    secret: str
    """What a request carries in `Authorization: Bearer`."""


@dataclass(frozen=True, slots=True)
class Project(StoredRecord):
    """What experiments belong to: its members see and steer them."""

    name: str
    """Name, which specs have as `project`."""
    title: str
    """Title for people."""
    visible_to_all: bool
    """Whether every user may see its experiments, or only members."""
    notes: str
    """Notes of people."""
    archived_s: float | None
    """When it was archived: it takes no new experiments; null = it is not."""
    created_s: float
    """When it was created."""
    settings: dict[str, Any]
    """Weight, priority classes, quotas and budgets, where they differ from the defaults."""


@dataclass(frozen=True, slots=True)
class Member(StoredRecord):
    """A user's role in a project."""

    user: str
    """The user."""
    role: Role
    """viewer, member or maintainer; each includes those before it."""


@dataclass(frozen=True, slots=True)
class ProjectDetail(Project):
    """One project with its members."""

    members: list[Member]
    """By name."""


@dataclass(frozen=True, slots=True)
class AuditRow(StoredRecord):
    """One change: who made it, with what, from where, and what it changed."""

    id: int
    """From 1, rising."""
    at_s: float
    """When it was made."""
    actor: str
    """User who made it."""
    token_id: int | None
    """Token that the request carried; null = a session, or none."""
    address: str | None
    """Network address that the request came from; null = not over the network."""
    action: str
    """What was done: the kind of object and a verb, `token.revoke` for instance."""
    object_kind: str
    """user, token, session, device, project, experiment, run, subscription or view."""
    object_id: str
    """Its name or number."""
    before: dict[str, Any] | None
    """Fields that changed, as they were; null = it is new."""
    after: dict[str, Any] | None
    """The same fields, as they are now; null = it is gone."""


@dataclass(frozen=True, slots=True)
class AuditPage(Serializable):
    """Rows of the audit log, the oldest first."""

    items: list[AuditRow]
    """At most `limit` of them."""
    next_after: int | None
    """Give this as `after` for the rows that follow; null = these are the last."""
