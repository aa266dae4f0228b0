"""Leases: whose clock they go by, what renewing one writes, and what is read without writing."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from service.config.settings import Settings
from service.db import schema
from service.db.clock import database_time
from service.local.doctor import Finding, FindingHealth, examine
from service.scheduling.queue import Queue
from service.scheduling.scheduler import Scheduler
from service.store import StaleAttempt, Store
from tests.conformance.building import Submit
from tests.fake_ray_jobs import FakeRayJobs

Running = Callable[..., Any]


@pytest.fixture
def host_is_ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock of this host, and not that of the database."""
    really = time.time

    def by(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: really() + seconds)

    return by


def row_of(store: Store, experiment_id: int) -> dict[str, Any]:
    with store.database.read() as connection:
        found = connection.execute(
            sa.select(schema.experiments).where(schema.experiments.c.id == experiment_id)
        )
        return dict(found.mappings().one())


def test_the_databases_clock_shows_unix_seconds(store: Store) -> None:
    with store.database.read() as connection:
        assert database_time(connection) == pytest.approx(time.time(), abs=5)


@pytest.mark.parametrize("ahead_s", [-3600.0, 31.0, 3600.0])
def test_leases_go_by_the_databases_clock(
    store: Store,
    queue: Queue,
    settings: Settings,
    submit: Submit,
    host_is_ahead: Callable[[float], None],
    ahead_s: float,
) -> None:
    with store.database.read() as connection:
        now = database_time(connection)
    host_is_ahead(ahead_s)
    id = submit().id
    (claimed,) = queue.claim("s", lease_s=60)
    assert claimed.lease_until_s == pytest.approx(now + 60, abs=10)
    store.drivers.started(id, 1, "node", 1)
    assert store.experiments.get(id).lease_until_s == pytest.approx(now + settings.lease_s, abs=10)
    store.drivers.renew_lease(id, 1, 90)
    assert store.experiments.get(id).lease_until_s == pytest.approx(now + 90, abs=10)
    assert not queue.adopt(id, 1, "s2", 30)
    queue.heartbeat("s", node="n", pid=1)
    assert [alive.name for alive in queue.schedulers_alive()] == ["s"]


def test_delays_before_another_attempt_go_by_the_databases_clock(
    store: Store, queue: Queue, submit: Submit, host_is_ahead: Callable[[float], None]
) -> None:
    id = submit().id
    queue.claim("s", lease_s=30)
    host_is_ahead(-3600)
    store.drivers.release_experiment(id, 1, delay_s=60)
    host_is_ahead(0)
    assert queue.claim("s", lease_s=30) == []
    host_is_ahead(3600)
    assert queue.claim("s", lease_s=30) == []


def test_a_scheduler_whose_host_is_ahead_leaves_a_healthy_driver_alone(
    store: Store, queue: Queue, settings: Settings, running: Running, host_is_ahead: Callable[[float], None]
) -> None:
    experiment, _ = running()
    jobs = FakeRayJobs()
    jobs.submit(experiment.submission_id, "true", metadata={})
    host_is_ahead(31)
    scheduler = Scheduler(store, queue, jobs, settings, name="ahead")
    for _ in range(3):
        did = scheduler.run_once()
        assert (did.adopted, did.stopped) == ((), ())


def test_requests_are_read_without_a_write(
    store: Store, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, runs = running(2)
    store.attempts.open(runs[1].id, 1)
    store.requests.pause(experiment.id)
    store.requests.cancel_run(runs[1].id)

    def refuse(body: object) -> None:
        raise AssertionError("nothing is to be written")

    with monkeypatch.context() as patched:
        patched.setattr(store.database, "write", refuse)
        asked = store.drivers.requests(experiment.id, 1)
    assert (asked.cancel, asked.pause, asked.cancel_attempts) == (False, True, {(runs[1].id, 1)})
    assert store.drivers.renew_lease(experiment.id, 1, 30) == asked
    with pytest.raises(StaleAttempt):
        store.drivers.requests(experiment.id, 2)


def test_no_index_has_a_column_that_a_renewal_changes(store: Store, running: Running) -> None:
    experiment, _ = running()
    before = row_of(store, experiment.id)
    store.drivers.renew_lease(experiment.id, 1, 77)
    after = row_of(store, experiment.id)
    changed = {name for name, value in after.items() if value != before[name]}
    assert changed == {"lease_until_s", "lease_s"}
    indexed = {
        column.name
        for index in schema.experiments.indexes
        for column in index.columns
        if column.table is schema.experiments
    }
    assert indexed.isdisjoint({*changed, "silent_since_s"})


def test_the_doctor_warns_of_a_clock_that_differs_from_the_databases(
    settings: Settings, host_is_ahead: Callable[[float], None]
) -> None:
    def clock() -> Finding | None:
        findings = itertools.takewhile(lambda found: found.subject != "compiler", examine(settings))
        return next((found for found in findings if found.subject == "clock"), None)

    if settings.resolved_database_url().startswith("sqlite"):
        host_is_ahead(3600)
        assert clock() is None  # The database is on this machine.
        return
    found = clock()
    assert found is not None
    assert found.health is FindingHealth.ok
    for ahead_s, word in ((31.0, "ahead of"), (-3600.0, "behind")):
        host_is_ahead(ahead_s)
        found = clock()
        assert found is not None
        said = re.match(rf"(\d+\.\d) s {word} the database's", found.detail)
        assert said is not None
        assert float(said[1]) == pytest.approx(abs(ahead_s), abs=5)
        assert found.health is FindingHealth.note


def test_a_lease_renewed_while_it_is_judged_has_not_lapsed(
    store: Store, queue: Queue, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, _ = running()

    def renewed_meanwhile(connection: sa.Connection) -> float:
        return database_time(connection) - 1

    monkeypatch.setattr(store, "database_time", renewed_meanwhile)
    assert [lease.lapsed for lease in queue.leases()] == [False]
    assert not queue.adopt(experiment.id, 1, "s2", 30)
