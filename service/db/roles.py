"""The database role of drivers: it writes runs, and reads no token, session, secret or audit entry.

Drivers and recorders run on machines where other people's code may run as well, so what their role cannot
do is what matters. Each table is listed with what a driver does to it; a table that is not listed, such as
one that a later release adds, is out of its reach. SQLite has no roles: whoever opens the file reads all.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing

import psycopg
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy import Connection

from service.config.settings import Settings
from service.db import schema
from service.db.engine import Database, driver_connection
from service.db.errors import StoreError, UnusableDatabase
from service.db.migrate import REVISIONS

_READ = ("SELECT",)
_CHANGE = ("SELECT", "UPDATE")
_ADD = ("SELECT", "INSERT")
_WRITE = ("SELECT", "INSERT", "UPDATE")
_REPLACE = ("SELECT", "INSERT", "UPDATE", "DELETE")

DRIVER_GRANTS: Mapping[sa.Table, tuple[str, ...]] = {
    schema.experiments: _CHANGE,  # Leases and transitions.
    schema.experiment_specs: _READ,
    schema.cell_specs: _WRITE,  # A search writes the cells that it chose.
    schema.runs: _CHANGE,
    schema.attempts: _WRITE,
    schema.attempt_usage: _WRITE,
    schema.placements: _WRITE,
    schema.allowances: _READ,
    schema.run_references: _READ,
    schema.run_summaries: _REPLACE,
    schema.metric_names: _ADD,
    schema.points: _WRITE,
    schema.latest_points: _WRITE,
    schema.point_extremes: _WRITE,
    schema.measurements: _WRITE,
    schema.log_lines: _WRITE,
    schema.events: _ADD,
    schema.notices: ("INSERT",),  # That something happened; who is told is not a driver's to know.
    schema.figures: _REPLACE,
    schema.cluster_snapshots: _READ,
    schema.accepted_writers: _READ,
}
"""What a driver does to each table."""


class RoleError(StoreError):
    """The role cannot be made; the message is one line with the fix."""


def make_driver_role(settings: Settings) -> str | None:
    """Creates the role that `driver_database_url` names, or brings its password and grants up to date.

    Returns its name; None where there is nothing to do: no URL, or SQLite.
    """
    if settings.driver_database_url is None:
        return None
    with closing(Database(settings.resolved_database_url())) as database:
        if database.is_sqlite:
            return None
        driver = sa.make_url(settings.driver_database_url)
        _check(driver, database.url)
        try:
            database.write(lambda connection: _make(connection, str(driver.username), driver.password))
        except UnusableDatabase as error:
            if not isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege):
                raise
            raise RoleError(
                f"role {driver.username!r} cannot be made: {error.__cause__.diag.message_primary}; give the "
                f"service's role {database.url.username!r} CREATEROLE, or run this once as a superuser"
            ) from None
        return driver.username


def _check(driver: sa.URL, own: sa.URL) -> None:
    if driver.get_backend_name() != "postgresql" or not driver.username or not driver.password:
        raise RoleError(
            "STILLHOUSE_DRIVER_DATABASE_URL names no role with a password; use "
            "postgresql+psycopg://role:password@host/name"
        )
    if driver.username == own.username:
        raise RoleError(
            f"STILLHOUSE_DRIVER_DATABASE_URL has the service's own role {own.username!r}; use another name"
        )
    if driver.database != own.database:
        raise RoleError(
            f"STILLHOUSE_DRIVER_DATABASE_URL names the database {driver.database!r}, and "
            f"STILLHOUSE_DATABASE_URL {own.database!r}; use the same"
        )


def _make(connection: Connection, role: str, password: str | None) -> None:
    raw = driver_connection(connection)
    exists = connection.execute(
        sa.text("SELECT 1 FROM pg_roles WHERE rolname = :role"), {"role": role}
    ).first()
    # Hashed here: the statement, which the server may log, does not hold the password.
    hashed = raw.pgconn.encrypt_password(str(password).encode(), role.encode(), b"scram-sha-256").decode()
    for statement in _statements(role, hashed, exists=exists is not None):
        raw.execute(statement)


def _statements(role: str, hashed: str, *, exists: bool) -> Iterator[sql.Composable]:
    name = sql.Identifier(role)
    verb = sql.SQL("ALTER" if exists else "CREATE")
    yield sql.SQL("{} ROLE {} WITH LOGIN PASSWORD {}").format(verb, name, sql.Literal(hashed))
    yield sql.SQL("REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {}").format(name)
    yield sql.SQL("REVOKE ALL ON ALL SEQUENCES IN SCHEMA public FROM {}").format(name)
    yield sql.SQL("GRANT USAGE ON SCHEMA public TO {}").format(name)
    yield sql.SQL("GRANT SELECT ON {} TO {}").format(sql.Identifier(REVISIONS), name)
    for table, privileges in DRIVER_GRANTS.items():
        yield sql.SQL("GRANT {} ON {} TO {}").format(
            sql.SQL(", ".join(privileges)), sql.Identifier(table.name), name
        )
        key = table.autoincrement_column
        if "INSERT" in privileges and key is not None:
            yield sql.SQL("GRANT USAGE ON SEQUENCE {} TO {}").format(
                sql.Identifier(f"{table.name}_{key.name}_seq"), name
            )
