"""The store: what people submitted, what became of it, and every figure, in SQL.

`Store` is one object per process, thread-safe, with an object for each aggregate. Each has a module with its
statements. `service.scheduling.queue.Queue` claims from the same database.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Self

from service.config.settings import Settings
from service.db import migrate as migration
from service.db.engine import Database
from service.db.errors import (
    BadValue,
    Conflict,
    NotFound,
    StaleAttempt,
    StoreError,
    StoreOutage,
    StoreUnavailable,
    UnusableDatabase,
)
from service.db.postgresql import POOL_SIZE
from service.store.accounting import Accounting
from service.store.attempts import Attempts
from service.store.audit import Audit
from service.store.base import Clocks, StorePart
from service.store.drivers import Drivers, Held, Requests
from service.store.experiments import Experiments
from service.store.notifications import Notifications
from service.store.people import People
from service.store.process_metrics import ProcessMetrics
from service.store.projects import Projects
from service.store.recording import AliveRow, CheckpointRow, PointBatch, ProgressRow, RecordBatch, Recording
from service.store.removal import Removal
from service.store.requests import Requesting
from service.store.runs import QueuedRun, Runs
from service.store.series import Series
from service.store.sessions import Sessions
from service.store.studies import NewPart, NewStudy, Studies
from service.store.submissions import Keyed, NewExperiment, Submissions, body_sha256
from service.store.views import Views


class Store(StorePart):
    """The database of one installation. `clock` replaces all clocks in a simulation."""

    def __init__(
        self, database: Database, settings: Settings, clock: Callable[[], float] | None = None
    ) -> None:
        clocks = Clocks(clock)
        super().__init__(database, settings, clocks)
        parts = database, settings, clocks
        # Experiments and their runs, as people see them.
        self.submissions = Submissions(*parts)
        self.accounting = Accounting(*parts)
        self.experiments = Experiments(*parts, self.accounting)
        self.runs = Runs(*parts)
        self.series = Series(*parts)
        self.requests = Requesting(*parts)
        self.studies = Studies(*parts, self.submissions, self.experiments)
        self.removal = Removal(*parts)
        # What the driver of an experiment does to it and to its runs, fenced by attempts.
        self.drivers = Drivers(*parts)
        self.attempts = Attempts(*parts)
        self.recording = Recording(*parts)
        # People, and what they see and hear.
        self.people = People(*parts)
        self.projects = Projects(*parts)
        self.sessions = Sessions(*parts)
        self.views = Views(*parts)
        self.notifications = Notifications(*parts)
        self.audit = Audit(*parts)
        self.process_metrics = ProcessMetrics(*parts)

    @classmethod
    def open(
        cls,
        settings: Settings,
        *,
        migrate: bool = False,
        clock: Callable[[], float] | None = None,
        pool_size: int = POOL_SIZE,
    ) -> Self:
        """Connects, and checks that the database can be used.

        Args:
            migrate: bring the tables up to date first, and create them in an empty database.
            pool_size: PostgreSQL connections that are kept open.

        Raises:
            UnusableDatabase: migrations are missing, the file is damaged, or is on a network file system.
        """
        if migrate:
            migration.upgrade(settings)
        database = Database(settings.resolved_database_url(), pool_size=pool_size)
        try:
            migration.refuse_unusable(database)  # Its connection shows `alone` that the database is in use.
        except BaseException:
            database.close()
            raise
        return cls(database, settings, clock)

    @property
    def path(self) -> Path | None:
        """The SQLite file; None for PostgreSQL."""
        return self.database.path

    def close(self) -> None:
        self.people.write_token_uses()
        self.database.close()
