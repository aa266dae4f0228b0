"""What the login pages and the command line send and read."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from service.domain.people import Session
from service.domain.serialization import Serializable


class PastedToken(BaseModel):
    """A token to open a session with."""

    model_config = ConfigDict(extra="forbid")

    token: str = Field(min_length=1, max_length=1_000, description="The token, as it was shown once.")


class Decision(BaseModel):
    """What becomes of a device login."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"approve": True}})

    approve: bool = Field(strict=True, description="true lets the device in; false turns it away.")


@dataclass(frozen=True, slots=True)
class LoginOptions(Serializable):
    """How one can log in here."""

    required: bool
    """Whether requests must show whom they come from at all."""
    provider: str | None
    """Host of the OpenID provider; null = none is set."""


@dataclass(frozen=True, slots=True)
class ListedSession(Session):
    """A session, and whether it is the one that asks."""

    current: bool
    """Whether this request came with it."""


@dataclass(frozen=True, slots=True)
class Sessions(Serializable):
    """Browsers that are logged in."""

    items: list[ListedSession]
    """The last used first."""
