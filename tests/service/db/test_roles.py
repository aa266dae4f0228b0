"""The role of drivers on a real PostgreSQL: what it can do is what a driver does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from benchmarks.postgresql import PostgreSQLServer
from service.config.settings import Settings
from service.db import roles, schema
from service.db.errors import UnusableDatabase
from service.domain.process_metrics import MetricBuffer
from service.domain.records import LogLine, MeasurementRow
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.store import CheckpointRow, NewExperiment, PointBatch, ProgressRow, RecordBatch, Store
from tests.conformance.building import plans_of
from trainers.errors import FailureClass

pytestmark = pytest.mark.postgresql

PASSWORD = "not a secret, but 'quoted\\"


@pytest.fixture
def settings(postgresql_url: str, tmp_path: Path) -> Settings:
    driver = sa.make_url(postgresql_url).set(username="driver", password=PASSWORD)
    return Settings(
        data_dir=tmp_path,
        database_url=postgresql_url,
        driver_database_url=driver.render_as_string(hide_password=False),
    )


@pytest.fixture
def service(settings: Settings) -> Iterator[Store]:
    assert roles.make_driver_role(settings) == "driver"
    store = Store.open(settings)
    yield store
    store.close()


@pytest.fixture
def driver(service: Store, settings: Settings) -> Iterator[Store]:
    """A store as a driver opens it."""
    store = Store.open(settings.model_copy(update={"database_url": settings.driver_database_url}))
    yield store
    store.close()


def test_a_driver_carries_an_experiment_through(service: Store, driver: Store) -> None:
    spec, plans, text = plans_of(3)
    submitted, _ = service.submissions.submit(NewExperiment(spec, plans, spec_text=text, owner="ada"))
    (experiment,) = Queue(service).claim("scheduler", lease_s=60)
    driver.drivers.started(experiment.id, experiment.attempt, "node", 1)
    driver.drivers.renew_lease(experiment.id, experiment.attempt, 60)
    driver.drivers.requests(experiment.id, experiment.attempt)
    driver.drivers.note(experiment.id, experiment.attempt, "a note")
    first, second, third = driver.runs.page(experiment_id=experiment.id).items
    for run in (first, second):
        attempt = driver.attempts.open(run.id, experiment.attempt)
        driver.attempts.run_started(run.id, attempt, total_steps=10, resumed_from_step=0, facts={"a": 1})
        now = time.time()
        stale = driver.recording.record(
            RecordBatch(
                points=[PointBatch(run.id, attempt, "loss", [1, 2], [0.5, 0.4], [now, now])],
                logs=[LogLine(run.id, attempt, 1, now, "info", "trains")],
                measurements=[
                    MeasurementRow(run.id, attempt, "energy_kwh", 0.1, "kWh", "modelled", "run", now, now + 1)
                ],
                progress=[ProgressRow(run.id, attempt, 2, 10, "training")],
                checkpoints=[CheckpointRow(run.id, attempt, 2, "/checkpoints/2")],
            )
        )
        assert not stale
    driver.attempts.finish_run(first.id, 1, RunState.succeeded, summary={"accuracy": 0.9})
    driver.attempts.finish_run(second.id, 1, RunState.failed, failure=(FailureClass.bug, "wrong"))
    buffer = MetricBuffer()
    buffer.observe("stillhouse_commit_seconds", 0.01, process="recorder")
    driver.process_metrics.add(buffer.taken(), source="experiment:1")
    driver.drivers.finish_experiment(submitted.id, experiment.attempt, ExperimentState.succeeded)
    assert service.experiments.get(submitted.id).state is ExperimentState.succeeded
    assert service.runs.get(third.id).state is RunState.stopped
    assert service.notifications.address() == 1


def test_a_driver_reads_nothing_but_its_tables(driver: Store) -> None:
    readable = {table.name for table, grants in roles.DRIVER_GRANTS.items() if "SELECT" in grants}
    secret = {table.name for table in schema.metadata.sorted_tables} - readable
    assert {"users", "tokens", "sessions", "device_grants", "audit", "subscriptions", "deliveries"} <= secret
    for name in secret:
        with pytest.raises(UnusableDatabase, match="permission denied"), driver.database.read() as c:
            c.execute(sa.text(f'SELECT * FROM "{name}"'))


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM experiments",
        "DELETE FROM events",
        "UPDATE events SET message = ''",
        "UPDATE accepted_writers SET newest = 9",
        "INSERT INTO experiment_specs VALUES (9, '', '')",
        "CREATE TABLE mine (id integer)",
        "DROP TABLE points",
    ],
)
def test_a_driver_changes_no_history_and_no_tables(driver: Store, statement: str) -> None:
    with pytest.raises(UnusableDatabase, match=r"permission denied|must be owner"):
        driver.database.write(lambda connection: connection.execute(sa.text(statement)))


def test_making_the_role_again_takes_back_what_it_should_not_have(service: Store, settings: Settings) -> None:
    service.database.write(lambda c: c.execute(sa.text("GRANT SELECT ON subscriptions TO driver")))
    roles.make_driver_role(settings)
    rows = sa.text("SELECT has_table_privilege('driver', 'subscriptions', 'SELECT')")
    with service.database.read() as connection:
        assert connection.execute(rows).scalar() is False


def test_the_server_is_given_no_password(service: Store, settings: Settings) -> None:
    with service.database.read() as connection:
        stored = connection.execute(
            sa.text("SELECT rolpassword FROM pg_authid WHERE rolname = 'driver'")
        ).scalar_one()
    assert stored.startswith("SCRAM-SHA-256$")
    assert PASSWORD not in stored


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"username": None}, "no role with a password"),
        ({"username": "stillhouse"}, "the service's own role"),
        ({"database": "elsewhere"}, "use the same"),
    ],
)
def test_a_wrong_url_is_refused_in_one_line(
    settings: Settings, change: dict[str, str | None], error: str
) -> None:
    wrong = sa.make_url(str(settings.driver_database_url))._replace(**change)
    changed = settings.model_copy(update={"driver_database_url": wrong.render_as_string(hide_password=False)})
    with pytest.raises(roles.RoleError, match=error):
        roles.make_driver_role(changed)


def test_a_service_that_may_not_make_roles_is_told_what_to_do(
    service: Store, settings: Settings, postgresql_server: PostgreSQLServer
) -> None:
    other = str(settings.driver_database_url).replace("driver:", "other:", 1)
    as_driver = settings.model_copy(
        update={"database_url": settings.driver_database_url, "driver_database_url": other}
    )
    with pytest.raises(roles.RoleError, match="as a superuser"):
        roles.make_driver_role(as_driver)


def test_sqlite_has_no_roles(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, driver_database_url="postgresql://driver:p@host/stillhouse")
    assert roles.make_driver_role(settings) is None
