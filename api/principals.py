"""Principals of one application, each read from the store at most once a second.

A token is looked up under its hash. Whatever changes users, members, projects or tokens in this process calls
`forget`; what others change is seen a second later.
"""

import asyncio
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from service.domain.access import Principal, Scope
from service.store import Store


class Via(StrEnum):
    session = "session"
    proxy = "proxy"


@dataclass(frozen=True, slots=True)
class Identity:
    """The user behind a request; what the user may do is decided elsewhere."""

    user: str
    via: Via
    token_sha256: str | None = None
    """Hash of the token that opened the session, and caps what it may do; None = the user's own role."""
    own_token: bool = False  # Whether the installation's own token opened the session
    scope: Scope = Scope.admin  # Most that the request may be used for, where no token sets it
    subject: str | None = None  # `issuer|sub` of the OpenID provider that vouched for the user
    session: str | None = None  # Public id of the browser session


Identify = Callable[[Request], Identity | None]
"""Recognises a request, or returns None; may read the database: call it outside the event loop.

Raises `csrf-failed` for a change that the user's own page did not send.
"""

KEPT_S = 1.0
_MOST_KEPT = 10_000


class Principals:
    """Whom tokens and identities stand for; used from the application's event loop, but for `forget`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[Hashable, tuple[float, Principal]] = {}
        self._pending: dict[Hashable, asyncio.Future[Principal]] = {}

    async def of_token(self, sha256: str) -> Principal:
        def read() -> Principal:
            principal = self._store.people.principal_of_token(sha256)
            if principal.token_id is not None:
                self._store.people.token_used(principal.token_id)
            return principal

        return await self._find(sha256, read)

    async def of_user(self, user: str, scope: Scope) -> Principal:
        """Returns a user who has proved their name otherwise; raises `Refused` if missing or disabled."""
        return await self._find((user, scope), lambda: self._store.people.principal_of_user(user, scope))

    def forget(self) -> None:
        self._kept, self._pending = {}, {}

    async def _find(self, key: Hashable, read: Callable[[], Principal]) -> Principal:
        found = self._kept.get(key)
        if found is not None and time.monotonic() < found[0]:
            return found[1]
        pending = self._pending.get(key)
        if pending is None:
            # Requests that come while it is read wait for the same answer; `forget` leaves it to them alone.
            pending = self._pending[key] = asyncio.ensure_future(self._read(key, read, self._kept))
        return await asyncio.shield(pending)

    async def _read(
        self, key: Hashable, read: Callable[[], Principal], kept: dict[Hashable, tuple[float, Principal]]
    ) -> Principal:
        pending = self._pending
        try:
            principal = await run_in_threadpool(read)
            if len(kept) >= _MOST_KEPT:
                kept.clear()
            kept[key] = (time.monotonic() + KEPT_S, principal)
            return principal
        finally:
            pending.pop(key, None)
