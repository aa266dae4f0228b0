"""PgBouncer between programs and PostgreSQL, lending a server connection for one transaction at a time."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from service.config.settings import Settings
from service.db import backup
from service.db.engine import Database
from service.db.errors import StoreUnavailable, UnusableDatabase
from service.scheduling.queue import Queue
from service.store import NewExperiment, Store
from tests.conformance.building import plans_of

pytestmark = pytest.mark.postgresql
SERVER_CONNECTIONS = 2
SET = sa.text("SELECT name, setting FROM pg_settings WHERE name IN ('jit', 'lock_timeout')")


@pytest.fixture(params=["", "options"])
def pooled_url(request: pytest.FixtureRequest, postgresql_url: str) -> Iterator[str]:
    """Address of a pooler that refuses our settings at connecting, or ignores them."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("install the package pgbouncer")
    folder = sa.make_url(postgresql_url).query["host"]
    assert isinstance(folder, str)
    owner = Path(folder).owner()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    users, settings = Path(folder) / "users.txt", Path(folder) / "pgbouncer.ini"
    users.write_text('"stillhouse" ""\n')
    settings.write_text(
        f"""[databases]
        * = host={folder}
        [pgbouncer]
        listen_addr = 127.0.0.1
        listen_port = {port}
        unix_socket_dir =
        auth_type = trust
        auth_file = {users}
        pool_mode = transaction
        default_pool_size = {SERVER_CONNECTIONS}
        ignore_startup_parameters = {request.param}
        """
    )
    with subprocess.Popen([program, "-q", settings], user=owner if os.geteuid() == 0 else None) as process:
        url = f"postgresql://stillhouse@127.0.0.1:{port}/shared?sslmode=disable"
        deadline = time.monotonic() + 20
        while True:
            try:
                psycopg.connect(url).close()
                break
            except psycopg.OperationalError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
        yield url
        process.kill()


@pytest.fixture
def pooled(pooled_url: str) -> Iterator[Database]:
    with closing(Database(pooled_url)) as database:
        yield database


def test_many_connections_share_two_of_the_server(pooled: Database, postgresql_url: str) -> None:
    def add(number: int) -> int:
        statement = sa.text("INSERT INTO metric_names (name) VALUES (:name)")
        pooled.write(lambda connection: connection.execute(statement, {"name": f"m{number}"}))
        with pooled.read() as connection:  # Often enough that psycopg would prepare the statements.
            return int(connection.execute(sa.text("SELECT count(*) FROM metric_names")).scalar_one())

    with ThreadPoolExecutor(12) as threads:
        assert max(threads.map(add, range(240))) == 240
    with psycopg.connect(postgresql_url.replace("+psycopg", "")) as connection:
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'stillhouse'"
        assert connection.execute(sessions).fetchone() == (SERVER_CONNECTIONS,)


def test_limits_are_set_in_each_transaction_and_not_left_on_the_server(
    pooled: Database, pooled_url: str
) -> None:
    for _ in range(3):
        with pooled.read() as connection:
            assert dict(connection.execute(SET).all()) == {"jit": "off", "lock_timeout": "5000"}
    with psycopg.connect(pooled_url) as stranger:
        assert ("lock_timeout", "0") in stranger.execute(str(SET)).fetchall()


def test_an_experiment_is_claimed_and_driven(pooled_url: str, tmp_path: Path) -> None:
    store = Store.open(Settings(data_dir=tmp_path, database_url=pooled_url))
    queue = Queue(store)
    for _ in range(8):
        spec, plans, text = plans_of(1)
        submitted, _ = store.submissions.submit(NewExperiment(spec, plans, spec_text=text, owner="ada"))
        (claimed,) = queue.claim("one", lease_s=30.0, limit=1)
        assert claimed.id == submitted.id
        store.drivers.started(claimed.id, 1, "node", 1)
        assert not store.drivers.renew_lease(claimed.id, 1, 30.0).pause
    assert len(queue.leases()) == 8
    store.close()


def test_a_restore_waits_for_programs_behind_the_pooler_and_keeps_them_out(
    pooled: Database, pooled_url: str, postgresql_url: str
) -> None:
    with pooled.read():
        pass  # It is connected from now on.
    with closing(Database(postgresql_url, present=False)) as restoring:
        with restoring.alone() as alone:
            assert not alone
        with psycopg.connect(postgresql_url) as connection:  # As when the pooler has closed what is idle.
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'stillhouse'"
            )
        with restoring.alone() as alone, closing(Database(pooled_url)) as newcomer:
            assert alone
            with pytest.raises(StoreUnavailable, match="being restored"), newcomer.read():
                pass


def test_backup_and_restore_want_the_server_itself(pooled_url: str, tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, database_url=pooled_url)
    with pytest.raises(UnusableDatabase, match="STILLHOUSE_DATABASE_URL with its address"):
        backup.back_up(settings, tmp_path / "backup.tar", checkpoints=False)
    with pytest.raises(UnusableDatabase, match="STILLHOUSE_DATABASE_URL with its address"):
        backup.restore(settings, tmp_path / "backup.tar", replace=False)
