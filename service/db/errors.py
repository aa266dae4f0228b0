"""What the store can answer instead of a result: typed errors, one line each."""

from __future__ import annotations


class StoreError(Exception):
    """Base of all errors of the store; the message is one line that says what to do."""


class NotFound(StoreError):
    """Nothing has that id."""

    def __init__(self, kind: str, id: object) -> None:
        self.kind = kind
        self.id = id
        super().__init__(f"no {kind} has the id {id}")


class Conflict(StoreError):
    """The thing is in a state in which the action does not apply."""


class IdempotencyMismatch(StoreError):
    """The idempotency key was used before, for another body."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"idempotency key '{key}' was used for another request; use a new key")


class StaleAttempt(StoreError):
    """The writer's attempt is not the current one: it changed no row and must stop."""


class StoreOutage(StoreError):
    """The database takes nothing at present; the same call can be repeated later."""


class StoreUnavailable(StoreOutage):
    """The database is locked or away; nothing was changed by what is reported so, try again later.

    The one exception: when the connection breaks during the commit itself no one knows. Repeat
    with the same idempotency key, attempt or rows: each write of the store can be repeated.
    """

    retry_after_s = 2


class StoreFull(StoreOutage):
    """The disk of the database is full; nothing was changed."""


class FilterError(StoreError):
    """A filter or order cannot be understood; names the position and the nearest known name."""


class BadPageToken(StoreError):
    """The page token does not belong to this list; start again without one."""

    def __init__(self) -> None:
        super().__init__("the page token does not belong to this list; start again without page_token")


class UnusableDatabase(StoreError):
    """The database cannot be used as it is: migrations, integrity, file system or version."""
