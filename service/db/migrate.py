"""Brings the database up to date, and lists what is wrong with it: at start and on the command line."""

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from service.config.settings import Settings
from service.db import postgresql, sqlite, writers
from service.db.engine import Database, driver_connection, has_room, translated
from service.db.errors import StoreError, UnusableDatabase
from service.db.schema import TRIGGERS, Document, WordOf, metadata

logger = logging.getLogger(__name__)

REVISIONS = "alembic_version"  # Alembic's table, with the revision of all others
UPGRADE_LOCK = 7305410  # PostgreSQL advisory lock: one process migrates at a time
UPGRADE_TIMEOUT_S = 60.0  # How long a process waits while another migrates
MIGRATIONS = Path(__file__).with_name("migrations")
"""Alembic's folder: `env.py`, and under `versions` one module per revision, named `<revision>_<what>.py`."""


def upgrade(settings: Settings) -> None:
    """Creates the tables, or brings them to the newest form; does nothing when they have it.

    Processes that start at once take turns; the step is one transaction, so that a process that dies in it
    leaves the old form.
    """
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    url = settings.resolved_database_url()
    with closing(Database(url, statement_timeout_s=None)) as database, translated(database.path):
        if database.lock is not None and database.path is not None:
            database.path.parent.mkdir(parents=True, exist_ok=True)
            sqlite.refuse_unsafe_place(database.path)
            with database.lock.held(UPGRADE_TIMEOUT_S):
                if (damage := sqlite.log_damage(database.path)) is not None:
                    logger.error("%s", damage)
                with database.writers.connect() as connection:
                    # A table is changed by copying it, which foreign keys would take for a deletion.
                    driver_connection(connection).execute("PRAGMA foreign_keys = OFF")
                    with connection.begin():
                        _run_migrations(connection)
                    driver_connection(connection).execute("PRAGMA foreign_keys = ON")
        else:
            with database.writers.connect() as connection, connection.begin():
                connection.execute(sa.text(f"SET LOCAL lock_timeout = {int(UPGRADE_TIMEOUT_S * 1000)}"))
                connection.execute(sa.text(f"SELECT pg_advisory_xact_lock({UPGRADE_LOCK})"))
                _run_migrations(connection)
                postgresql.flush_early(connection)


def _run_migrations(connection: Connection) -> None:
    current = revision_of(connection)
    if current == newest_revision():
        return
    if current is not None and is_newer(current):
        raise UnusableDatabase(
            f"the tables are at revision {current}, which is newer than this program; use a newer Stillhouse"
        )
    from alembic import command  # Imported here: every process checks the tables, and would keep it.
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def check(settings: Settings) -> list[str]:
    """Everything that is wrong with the database. Reads all of a SQLite file."""
    problems: list[str] = []
    url = settings.resolved_database_url()
    try:
        with closing(Database(url, statement_timeout_s=None)) as database, translated(database.path):
            if database.path is not None:
                if not database.path.exists():
                    return [f"{database.path} does not exist; run: stillhouse db upgrade"]
                place = sqlite.file_system_problem(database.path)
                problems += [place] if place else []
            with database.readers.connect() as connection:
                if database.is_sqlite:
                    problems += sqlite.integrity_problems(driver_connection(connection))
                problems += _form_problems(connection)
    except StoreError as error:
        problems.append(str(error))
    return problems


def readiness_problems(database: Database) -> list[str]:
    """Why the database cannot serve now, found in moments; `check` looks at everything."""
    with database.read() as connection:
        problems = _revision_problems(connection)
        if database.path is None and connection.execute(sa.text("SELECT pg_is_in_recovery()")).scalar():
            problems.append("the server is a standby, which takes no writes; use the primary's address")
    if database.path is not None and not has_room(database.path):
        problems.append(f"the disk of {database.path} is full; free space")
    return problems


def differences(connection: Connection) -> list[Any]:
    """What the tables in the database have and `service.db.schema` has not, or the reverse."""
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    context = MigrationContext.configure(connection, opts={"compare_type": same_type})
    return list(compare_metadata(context, metadata))


def refuse_unusable(database: Database) -> None:
    """Raises `UnusableDatabase` for what can be checked in moments at start; `check` does the rest."""
    problems: list[str] = []
    with translated(database.path):
        if database.lock is not None and database.path is not None:
            if not database.path.exists():
                raise UnusableDatabase(f"{database.path} does not exist; run: stillhouse db upgrade")
            sqlite.refuse_unsafe_place(database.path)
            warning = sqlite.version_warning()
            if warning is not None:
                logger.warning(warning)
            with database.lock.held():
                if (damage := sqlite.log_damage(database.path)) is not None:
                    logger.error("%s", damage)
        with database.readers.connect() as connection:
            if database.path is not None and database.path.stat().st_size <= sqlite.LARGEST_QUICK_CHECK_BYTES:
                problems += sqlite.integrity_problems(driver_connection(connection))
            problems += _revision_problems(connection)
    if problems:
        raise UnusableDatabase(problems[0])


def newest_revision() -> str:
    return max(_revisions())


def _revisions() -> set[str]:
    return {path.stem.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py")}


def same_type(
    context: object, inspected: object, declared: object, inspected_type: Any, declared_type: Any
) -> bool | None:
    """Whether a column's type differs, for Alembic; our decorators are compared by what they store."""
    if isinstance(declared_type, WordOf | Document):
        return not isinstance(inspected_type, sa.String)
    return None


def _form_problems(connection: Connection) -> list[str]:
    problems = _revision_problems(connection)
    if not problems and revision_of(connection) == newest_revision():
        problems += [
            f"the tables differ from this program's schema: {difference}"
            for difference in differences(connection)
        ]
        problems += [
            f"the trigger {name} is missing; restore a backup" for name in missing_triggers(connection)
        ]
    return problems


def missing_triggers(connection: Connection) -> list[str]:
    names = {
        "sqlite": "SELECT name FROM sqlite_master WHERE type = 'trigger'",
        "postgresql": "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal AND tgenabled <> 'D'",
    }[connection.dialect.name]
    return sorted(TRIGGERS - set(connection.execute(sa.text(names)).scalars()))


def _revision_problems(connection: Connection) -> list[str]:
    current, newest = revision_of(connection), newest_revision()
    if current is None:
        return ["the database has no tables; run: stillhouse db upgrade"]
    if current == newest or is_newer(current):
        refusal = writers.refusal(connection)
        return [] if refusal is None else [refusal]
    return [f"the tables are at revision {current}, this program needs {newest}; run: stillhouse db upgrade"]


def is_newer(revision: str) -> bool:
    """Whether a revision is unknown to this program, which knows all earlier ones."""
    return revision not in _revisions()


def revision_of(connection: Connection) -> str | None:
    """Revision of the tables in a database; None = it has none."""
    if not connection.dialect.has_table(connection, REVISIONS):
        return None
    revision: str | None = connection.execute(sa.text(f"SELECT version_num FROM {REVISIONS}")).scalar()
    return revision
