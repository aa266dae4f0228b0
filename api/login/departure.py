"""A login at an OpenID provider, from here and back: what the browser keeps, and what can come of it."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass
from typing import Self

CALLBACK = "/login/oidc/callback"
LOGIN_LASTS_S = 600.0
"""Time in which someone who left for the provider must be back."""


class ProviderError(Exception):
    """A login at the provider failed; the message is for the server's log."""

    problem = "provider-refused"
    """What the login page is told."""


class ProviderUnavailable(ProviderError):
    """The provider does not answer, or answers what is not OpenID Connect."""

    problem = "provider-unavailable"


@dataclass(frozen=True, slots=True)
class Departure:
    """A login that has left for the provider, as the browser keeps it in a cookie until it is back."""

    state: str
    nonce: str
    verifier: str
    return_to: str

    def packed(self) -> str:
        """Returns it as the value of a cookie."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode().rstrip("=")

    @classmethod
    def unpacked(cls, text: str) -> Self | None:
        """Returns the inverse of `packed`; None for anything else."""
        try:
            fields = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            departure = cls(**fields)
        except (ValueError, TypeError):
            return None
        return departure if all(isinstance(value, str) for value in asdict(departure).values()) else None


@dataclass(frozen=True, slots=True)
class Person:
    """Whom the provider vouches for."""

    subject: str
    """`issuer|sub`: the only claim that never means somebody else."""
    name: str
    """Name to suggest for the user."""
    email: str | None
    groups: frozenset[str]
