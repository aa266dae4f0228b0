"""Who a request belongs to when it carries no bearer token: a browser session, or a trusted proxy's word."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from fastapi import Request

from service.domain.access import Scope


class Via(StrEnum):
    """How a request without a bearer token was recognised."""

    session = "session"
    """A browser session's cookie."""
    proxy = "proxy"
    """The header of a proxy that the settings trust."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The user behind a request; what the user may do is decided elsewhere."""

    user: str
    via: Via
    token_sha256: str | None = None
    """Hash of the token that opened the session, and caps what it may do; None = the user's own role."""
    own_token: bool = False
    """Whether the installation's own token opened the session."""
    scope: Scope = Scope.admin
    """Most that the request may be used for, where no token says so."""
    subject: str | None = None
    """`issuer|sub` of the OpenID provider that vouched for the user."""
    session: str | None = None
    """Public id of the browser session."""


Identify = Callable[[Request], Identity | None]
"""Recognises a request, or returns None. May read the database: call it outside the event loop.

Raises:
    ProblemError: `csrf-failed` for a change that the user's own page did not send.
"""
