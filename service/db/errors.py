"""What the store can answer instead of a result: typed errors, one line each."""


class StoreError(Exception):
    """Base of all errors of the store; the message is one line that says what to do."""


class NotFound(StoreError):
    """Nothing has that id."""

    def __init__(self, kind: str, id: object) -> None:
        self.kind = kind
        self.id = id
        super().__init__(
            f"no {kind} has the id {id}" if isinstance(id, int) else f"there is no {kind} {str(id)[:100]}"
        )


class OutOfRange(NotFound):
    """A number is beyond what a column holds: nothing can have it as its id."""

    def __init__(self) -> None:
        super().__init__("record", "beyond 64 bits")


class BadValue(StoreError):
    """A value that a person gave is not one that the field takes."""

    def __init__(self, field: str, message: str) -> None:
        self.field = field
        self.message = message
        super().__init__(f"{field}: {message}")


class Conflict(StoreError):
    """The thing is in a state in which the action does not apply."""


class IdempotencyMismatch(StoreError):
    """The idempotency key was used before, for another body."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"idempotency key '{key}' was used for another request; use a new key")


class ReplayOfDeleted(Conflict):
    """The idempotency key was used for an experiment that has been deleted since."""

    def __init__(self, key: str, experiment_id: int) -> None:
        super().__init__(
            f"idempotency key '{key}' was used for experiment {experiment_id}, which has been deleted; use a "
            "new key to submit it again"
        )


class StaleAttempt(StoreError):
    """The writer's attempt is not the current one: it changed no row and must stop."""


class StoreOutage(StoreError):
    """The database takes nothing at present; the same call can be repeated later."""


class StoreUnavailable(StoreOutage):
    """The database is locked or unavailable; nothing was changed, try again later."""

    retry_after_s = 2


class Unconfirmed(StoreUnavailable):
    """The database was lost during the commit, or before its result could be read: it may be stored.

    A caller that repeats it does so with the same idempotency key, attempt or rows.
    """


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


# Classes of SQLSTATE (first two digits) that are not about the statement: repeated later, it can succeed.
# The others are errors of a statement or of its values, and stay the driver's own.
_BY_SQLSTATE_CLASS: dict[str, type[StoreError]] = {
    "08": StoreUnavailable,  # connection exception
    "25": StoreUnavailable,  # invalid transaction state: the server has become a standby
    "28": StoreUnavailable,  # invalid authorization: a role or password is being changed
    "3D": StoreUnavailable,  # invalid catalog name: the database is being restored
    "40": StoreUnavailable,  # transaction rollback: deadlocks
    "53": StoreUnavailable,  # insufficient resources
    "55": StoreUnavailable,  # object not in prerequisite state: locks
    "57": StoreUnavailable,  # operator intervention: shutdown, statement timeout
    "58": StoreUnavailable,  # system error: input and output
    "F0": StoreUnavailable,  # configuration file error
    "XX": UnusableDatabase,  # internal error: damaged data or index
}
_BY_SQLSTATE: dict[str, type[StoreError]] = {
    "53100": StoreFull,  # disk full
    "42501": UnusableDatabase,  # insufficient privilege
    "42P01": UnusableDatabase,  # undefined table: of another version of the program
    "42703": UnusableDatabase,  # undefined column
}
_BY_SQLITE_CODE: dict[str, type[StoreError]] = {
    "FULL": StoreFull,
    **dict.fromkeys(
        ("BUSY", "LOCKED", "CANTOPEN", "IOERR", "READONLY", "PERM", "AUTH", "PROTOCOL", "NOMEM", "INTERRUPT"),
        StoreUnavailable,
    ),
    **dict.fromkeys(("CORRUPT", "NOTADB"), UnusableDatabase),
}


def kind_of_sqlstate(sqlstate: str) -> type[StoreError] | None:
    """None = the statement or its values are wrong."""
    return _BY_SQLSTATE.get(sqlstate) or _BY_SQLSTATE_CLASS.get(sqlstate[:2])


def leaves_commit_open(name: str) -> bool:
    """Whether a COMMIT that failed with this extended result code may be found in SQLite's log after a crash.

    The log's last frame was written by then. Errors of the writing itself come before that.
    """
    return name.startswith(("SQLITE_IOERR", "SQLITE_NOMEM")) and name != "SQLITE_IOERR_WRITE"


def kind_of_sqlite_error(name: str, message: str) -> type[StoreError] | None:
    """None = the statement or its values are wrong. `name` is the extended result code."""
    if name == "SQLITE_ERROR" and message.startswith(("no such table", "no such column")):
        return UnusableDatabase  # Tables of another version of the program.
    return _BY_SQLITE_CODE.get(name.removeprefix("SQLITE_").partition("_")[0])
