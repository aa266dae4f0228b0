"""PostgreSQL's own dangers: a server that vanishes without a word, statements that never end, standbys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from service.config.settings import Settings
from service.db import migrate, postgresql
from service.db.engine import Database
from service.db.errors import (
    StoreError,
    StoreFull,
    StoreUnavailable,
    Unconfirmed,
    UnusableDatabase,
    kind_of_sqlite_error,
    kind_of_sqlstate,
)
from tests.silent_proxy import SilentProxy

ADD = sa.text("INSERT INTO metric_names (name) VALUES (:name)")


@pytest.fixture
def proxy(postgresql_url: str) -> Iterator[SilentProxy]:
    """Between the client and a server."""
    folder = sa.make_url(postgresql_url).query["host"]
    assert isinstance(folder, str)
    with SilentProxy(Path(folder) / ".s.PGSQL.5432") as proxy:
        yield proxy


@pytest.fixture
def database(proxy: SilentProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """A database behind the proxy that gives up soon."""
    monkeypatch.setattr(postgresql, "_GRACE_S", 0.1)
    database = Database(
        f"postgresql://stillhouse@127.0.0.1:{proxy.port}/shared?sslmode=disable", statement_timeout_s=0.3
    )
    yield database
    database.close()


def ends(call: Callable[[], Any]) -> Any:
    """What a call returns or raises; fails if it hangs."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append(call())
        except Exception as error:
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20.0)
    assert done, "the call hangs"
    if isinstance(done[0], Exception):
        raise done[0]
    return done[0]


def add(database: Database, name: str) -> None:
    database.write(lambda connection: connection.execute(ADD, {"name": name}))


def names(database: Database) -> list[str]:
    with database.read() as connection:
        return list(connection.execute(sa.text("SELECT name FROM metric_names ORDER BY id")).scalars())


@pytest.mark.postgresql
def test_a_write_on_a_silent_connection_is_repeated_on_another(
    database: Database, proxy: SilentProxy
) -> None:
    add(database, "a")
    proxy.fall_silent()
    ends(lambda: add(database, "b"))
    assert names(database) == ["a", "b"]


@pytest.mark.postgresql
def test_a_commit_without_an_answer_is_not_repeated(database: Database, proxy: SilentProxy) -> None:
    tries: list[int] = []

    def body(connection: sa.Connection) -> None:
        tries.append(1)
        connection.execute(ADD, {"name": "a"})

    proxy.fall_silent_after(b"COMMIT")
    with pytest.raises(Unconfirmed, match="during the commit; the change may be stored"):
        ends(lambda: database.write(body))
    assert tries == [1]
    assert names(database) == ["a"]  # Only the answer was lost.


@pytest.mark.postgresql
def test_a_read_on_a_silent_connection_ends_and_the_next_one_works(
    database: Database, proxy: SilentProxy
) -> None:
    add(database, "a")
    proxy.fall_silent()
    with pytest.raises(StoreUnavailable, match="has not answered for"):
        ends(lambda: names(database))
    assert ends(lambda: names(database)) == ["a"]


@pytest.mark.postgresql
def test_idle_connections_are_tried_before_use(
    database: Database, proxy: SilentProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(database, "a")
    monkeypatch.setattr(postgresql, "_IDLE_S", 0.0)
    monkeypatch.setattr(postgresql, "_PING_TIMEOUT_S", 0.1)
    assert names(database) == ["a"]
    assert proxy.accepted == 1
    proxy.fall_silent()
    assert ends(lambda: names(database)) == ["a"]
    assert proxy.accepted == 2


@pytest.mark.postgresql
def test_a_statement_that_does_not_end_is_cancelled(database: Database) -> None:
    with pytest.raises(StoreUnavailable, match="statement timeout"):
        ends(lambda: database.write(lambda connection: connection.execute(sa.text("SELECT pg_sleep(60)"))))


@pytest.mark.postgresql
def test_maintenance_has_no_time_limit(postgresql_url: str) -> None:
    database = Database(postgresql_url, statement_timeout_s=None)
    with database.read() as connection:
        assert connection.execute(sa.text("SHOW statement_timeout")).scalar() == "0"
    database.close()


@pytest.mark.postgresql
def test_evicted_pages_are_flushed_early_unless_an_operator_says_otherwise(empty_postgresql_url: str) -> None:
    def setting() -> object:
        database = Database(empty_postgresql_url)
        with closing(database), database.read() as connection:
            return connection.execute(sa.text("SHOW backend_flush_after")).scalar()

    settings = Settings(database_url=empty_postgresql_url)
    assert setting() == "0"
    migrate.upgrade(settings)
    assert setting() == "256kB"
    with psycopg.connect(empty_postgresql_url, autocommit=True) as operator:
        name = operator.info.dbname
        operator.execute(f"ALTER DATABASE \"{name}\" SET backend_flush_after = '1MB'")
    migrate.upgrade(settings)
    assert setting() == "1MB"


@pytest.mark.postgresql
def test_a_user_who_does_not_own_the_database_leaves_its_settings(empty_postgresql_url: str) -> None:
    with psycopg.connect(empty_postgresql_url, autocommit=True) as owner:
        name = owner.info.dbname
        owner.execute(f'CREATE ROLE "{name}" LOGIN')
        owner.execute(f'GRANT CREATE ON SCHEMA public TO "{name}"')
    try:
        migrate.upgrade(Settings(database_url=empty_postgresql_url.replace("stillhouse@", f"{name}@")))
        with psycopg.connect(empty_postgresql_url) as owner:
            (setting,) = owner.execute("SHOW backend_flush_after").fetchone() or ()
        assert setting == "0"
    finally:
        with psycopg.connect(empty_postgresql_url, autocommit=True) as owner:
            owner.execute(f'DROP OWNED BY "{name}"')
            owner.execute(f'DROP ROLE "{name}"')


@pytest.mark.postgresql
def test_a_server_that_became_a_standby_is_unavailable(postgresql_url: str) -> None:
    def body(connection: sa.Connection) -> None:
        connection.execute(sa.text("SET TRANSACTION READ ONLY"))
        connection.execute(ADD, {"name": "a"})

    database = Database(postgresql_url)
    with pytest.raises(StoreUnavailable, match="read-only transaction"):
        database.write(body)
    database.close()


@pytest.mark.parametrize(
    ("sqlstate", "kind"),
    [
        ("08006", StoreUnavailable),
        ("25006", StoreUnavailable),
        ("40P01", StoreUnavailable),
        ("53100", StoreFull),
        ("53300", StoreUnavailable),
        ("55P03", StoreUnavailable),
        ("57P01", StoreUnavailable),
        ("58030", StoreUnavailable),
        ("XX001", UnusableDatabase),
        ("42P01", UnusableDatabase),
        ("42601", None),  # A syntax error is ours.
        ("22P02", None),  # These are the rows'.
        ("23502", None),
    ],
)
def test_classes_of_sqlstate_mean_one_thing(sqlstate: str, kind: type[StoreError] | None) -> None:
    assert kind_of_sqlstate(sqlstate) is kind


@pytest.mark.parametrize(
    ("name", "message", "kind"),
    [
        ("SQLITE_FULL", "database or disk is full", StoreFull),
        ("SQLITE_BUSY_SNAPSHOT", "database is locked", StoreUnavailable),
        ("SQLITE_IOERR_WRITE", "disk I/O error", StoreUnavailable),
        ("SQLITE_CORRUPT_INDEX", "database disk image is malformed", UnusableDatabase),
        ("SQLITE_NOTADB", "file is not a database", UnusableDatabase),
        ("SQLITE_ERROR", "no such table: runs", UnusableDatabase),
        ("SQLITE_ERROR", 'near "SELEC": syntax error', None),
        ("SQLITE_CONSTRAINT_NOTNULL", "NOT NULL constraint failed: points.at_s", None),
    ],
)
def test_codes_of_sqlite_mean_one_thing(name: str, message: str, kind: type[StoreError] | None) -> None:
    assert kind_of_sqlite_error(name, message) is kind


@pytest.mark.postgresql
def test_a_resting_database_holds_no_connection_but_those_in_use(postgresql_url: str) -> None:
    with closing(Database(postgresql_url)) as database, psycopg.connect(postgresql_url) as observer:
        observer.autocommit = True

        def sessions() -> int:
            others = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'stillhouse'"
            row = observer.execute(others).fetchone()
            assert row is not None
            return int(row[0])

        def settles_at(count: int) -> bool:
            deadline = time.monotonic() + 10
            while sessions() != count and time.monotonic() < deadline:
                time.sleep(0.02)  # The server notices a closed connection a moment later.
            return sessions() == count

        with database.read() as used:
            names(database)
            assert sessions() == 2
            database.rest()
            assert settles_at(1)
            assert used.execute(sa.text("SELECT 1")).scalar_one() == 1
        add(database, "again")
        database.rest()
        assert settles_at(0)


@pytest.mark.postgresql
def test_a_pool_of_one_takes_turns_and_opens_another_where_waiting_takes_long(postgresql_url: str) -> None:
    with closing(Database(postgresql_url, pool_size=1)) as database:
        threads = [threading.Thread(target=add, args=(database, f"m{n}")) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(names(database)) == 8
        with database.read():
            assert len(names(database)) == 8
        assert isinstance(database.writers.pool, sa.QueuePool)
        assert database.writers.pool.checkedin() == 1
