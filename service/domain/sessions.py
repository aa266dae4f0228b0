from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from service.domain.access import Role, Scope
from service.domain.records import StoredRecord
from service.domain.serialization import Serializable

IDLE_S: Final = 24 * 3600.0
"""Longest time between two requests of a session."""
LASTING_S: Final = 14 * 24 * 3600.0
"""Longest life of a session, however busy."""
TOUCH_EVERY_S: Final = 300.0
"""How exactly the last use of a session is known: a write per request would cost more than it tells."""
GRANT_LASTS_S: Final = 600.0
"""Time in which a device login must be approved."""
POLL_EVERY_S: Final = 5.0
"""Shortest time between two polls for a device login."""
DEVICE_TOKEN_LASTS_S: Final = 90 * 24 * 3600.0
"""Life of the token that a device login gives."""
PUBLIC_ID_LENGTH: Final = 16


@dataclass(frozen=True, slots=True)
class Session(StoredRecord):
    """One browser that is logged in."""

    id: str
    """Public id, for ending it; not what the browser holds."""
    user: str
    """Who is logged in."""
    created_s: float
    """When they logged in."""
    last_used_s: float
    """When it was last used, to within five minutes."""
    expires_s: float
    """When it ends, however busy; unused for a day, it ends earlier."""
    from_address: str | None
    """Address that it was opened from."""
    agent: str | None
    """What the browser calls itself."""

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> Self:
        return cls(
            public_id(row["sha256"]), row["user"], row["created_s"], row["last_used_s"], row["expires_s"],
            row["from_address"], row["agent"],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A session that a request belongs to."""

    session: Session
    csrf: str
    """What a change must carry besides the cookie."""
    token_sha256: str | None
    """Hash of the token that it was opened with; None = the user proved their name in another way."""
    subject: str | None
    """`issuer|sub` of the OpenID provider that vouched for the user."""


@dataclass(frozen=True, slots=True)
class DeviceGrant(StoredRecord):
    """A command line that is waiting for approval of its login."""

    user_code: str
    """Code that it shows, `WDJB-MJHT` for instance."""
    name: str
    """What it calls itself."""
    from_address: str | None
    """Address that it asks from."""
    created_s: float
    """When it asked."""
    expires_s: float
    """Until when it can be approved."""
    scope: Scope
    """What it asks to be allowed at most."""


@dataclass(frozen=True, slots=True)
class Whoami(Serializable):
    """Who sends a request, and what limits what they may do."""

    user: str
    """Name that their experiments have as owner."""
    via: str
    """`token`, `session`, `proxy`, or `open` on a service that asks no one who they are."""
    scope: Scope
    """Most that this token or session may be used for."""
    administrator: bool
    """Whether they may do everything, within the scope."""
    roles: dict[str, Role]
    """Role by project."""
    restricted_to: str | None
    """Only project that the token is for; null = all of theirs."""
    token_name: str | None
    """Name of the token; null without one."""
    csrf: str | None
    """What a change made with this session's cookie carries in `Stillhouse-CSRF`; null without a session."""


def public_id(sha256: str) -> str:
    """The name of a session where people see it."""
    return sha256[:PUBLIC_ID_LENGTH]
