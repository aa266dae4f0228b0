"""Who asks: the one place where tokens are checked, and where users and roles will be.

With a token configured every request but `/healthz` carries it; without one the server listens
on loopback only and whoever can reach it is the service's own user.
"""

from __future__ import annotations

import getpass
import hmac
import re
from dataclasses import dataclass
from functools import lru_cache

from fastapi import Request

from api.problems import ProblemError
from service.config.settings import Settings
from service.domain import access

OWNER_HEADER = "Stillhouse-Owner"
MIN_TOKEN_LENGTH = 32
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")


@dataclass(frozen=True, slots=True)
class Principal:
    """Whoever sent the request."""

    owner: str
    """Name that experiments are submitted under."""
    scopes: frozenset[str]
    """What they may do: `read`, `write`."""

    @property
    def principal(self) -> access.Principal:
        """Them, as the rules see them: everything is allowed."""
        return access.local(self.owner)

    @property
    def actor(self) -> access.Actor:
        """Them, as the author of a change."""
        return access.Actor(self.owner)


async def current_user(request: Request) -> Principal:
    """Returns the principal of a request.

    Raises:
        ProblemError: `unauthenticated` without the configured token, `invalid-parameter` for an
            owner that is no name.
    """
    settings: Settings = request.app.state.settings
    everything = frozenset({"read", "write"})
    if settings.token is not None:
        if not bears(request, settings.token.get_secret_value()):
            raise ProblemError(
                "unauthenticated",
                "this server requires a token; send Authorization: Bearer <token>",
                headers={"WWW-Authenticate": 'Bearer realm="stillhouse"'},
            )
        return Principal(own_name(), everything)
    name = request.headers.get(OWNER_HEADER)
    if name is not None and not _OWNER.fullmatch(name):
        raise ProblemError(
            "invalid-parameter",
            f"header {OWNER_HEADER} takes up to 100 letters, digits and . _ @ -, starting with a letter "
            "or digit",
        )
    return Principal(name or own_name(), everything)


def bears(request: Request, token: str) -> bool:
    """Returns whether the request carries the token; takes as long whatever it carries."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return hmac.compare_digest(given.strip().encode(), token.encode()) and scheme.lower() == "bearer"


@lru_cache(maxsize=1)
def own_name() -> str:
    """Returns the name of the operating system's user that the service runs as, or `local`."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return "local"
    return name if _OWNER.fullmatch(name) else "local"
