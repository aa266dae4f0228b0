"""The store: what people submitted, what became of it, and every figure, in SQL.

`Store` is one object per process, thread-safe. Each module has one aggregate with its statements:
`submission` (experiments come in), `reading` (lists and records), `series` (points, and curves of many runs),
`accounting` (what was used), `requests` (what people ask of experiments, their tags and notes), `removal`;
`drivers` (what the driver of an experiment does to it, and the devices that it holds) and `attempts` (what it
does to the runs), both fenced by attempts; `recording` (batches of points, logs and measurements);
`notifications` (subscriptions and their messages), `process_metrics` (what processes measure of themselves);
`people`, `projects`, `sessions`, `views` and `audit`. `service.scheduling.queue.Queue` claims from the same
database.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from service.config.settings import Settings
from service.db.engine import Database
from service.db.errors import (
    BadPageToken,
    BadValue,
    Conflict,
    FilterError,
    IdempotencyMismatch,
    NotFound,
    OutOfRange,
    StaleAttempt,
    StoreError,
    StoreFull,
    StoreOutage,
    StoreUnavailable,
    Unconfirmed,
    UnusableDatabase,
)
from service.store.attempts import Attempts
from service.store.audit import Audit
from service.store.drivers import DriverWrites, Held, Requests
from service.store.notifications import Notifications
from service.store.people import People
from service.store.process_metrics import MetricRows
from service.store.projects import Projects
from service.store.reading import QueuedRun, Reading
from service.store.recording import AliveRow, CheckpointRow, PointBatch, ProgressRow, RecordBatch, Recording
from service.store.removal import Removal
from service.store.requests import Requesting
from service.store.series import Series
from service.store.sessions import Sessions
from service.store.submission import Keyed, NewExperiment, Submission, body_sha256
from service.store.views import Views

__all__ = [
    "AliveRow",
    "BadPageToken",
    "BadValue",
    "CheckpointRow",
    "Conflict",
    "FilterError",
    "Held",
    "IdempotencyMismatch",
    "Keyed",
    "NewExperiment",
    "NotFound",
    "OutOfRange",
    "PointBatch",
    "ProgressRow",
    "QueuedRun",
    "RecordBatch",
    "Requests",
    "StaleAttempt",
    "Store",
    "StoreError",
    "StoreFull",
    "StoreOutage",
    "StoreUnavailable",
    "Unconfirmed",
    "UnusableDatabase",
    "body_sha256",
]


class Store(
    Submission,
    Reading,
    Series,
    Requesting,
    Removal,
    DriverWrites,
    Attempts,
    Recording,
    People,
    Projects,
    Audit,
    Notifications,
    MetricRows,
    Sessions,
    Views,
):
    """The database of one installation. `clock` replaces all clocks in a simulation."""

    def __init__(
        self, database: Database, settings: Settings, clock: Callable[[], float] | None = None
    ) -> None:
        super().__init__(database, settings, clock)

    @classmethod
    def open(
        cls, settings: Settings, *, migrate: bool = False, clock: Callable[[], float] | None = None
    ) -> Store:
        """Connects, and checks that the database can be used.

        Args:
            migrate: bring the tables up to date first, and create them in an empty database.

        Raises:
            UnusableDatabase: migrations are missing, the file is damaged, or is on a network file system.
        """
        from service.db import migrate as migration

        if migrate:
            migration.upgrade(settings)
        migration.refuse_unusable(settings)
        database = Database(settings.resolved_database_url())
        database.connect()
        return cls(database, settings, clock)

    @property
    def path(self) -> Path | None:
        """The SQLite file; None for PostgreSQL."""
        return self.database.path

    def close(self) -> None:
        self.write_token_uses()
        self.database.close()
