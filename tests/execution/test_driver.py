"""The driver's lease renewal, its settings file, and what it does about an error of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from service.config.settings import Settings
from service.domain.states import ExperimentState
from service.driving import driver
from service.driving.driver import LeaseRenewal
from service.scheduling import driver_settings
from service.scheduling.queue import Queue
from service.store import Requests, StaleAttempt, Store, StoreUnavailable
from tests.execution.conftest import Submit

NOTHING = Requests(False, False, frozenset())


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "BEAT_S", 0.01)


def beating(*answers: Requests | Exception) -> Callable[[], Requests]:
    """Answers in turn; the last one for good."""
    left = list(answers)

    def beat() -> Requests:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return beat


def unasked() -> Requests:
    raise AssertionError("the lease is due at every beat, and its renewal answers the requests")


def test_requests_are_read_without_renewing_the_lease() -> None:
    renewed: list[int] = []
    told = threading.Event()

    def renew() -> Requests:
        renewed.append(1)
        return NOTHING

    cancel = Requests(True, False, frozenset())
    renewal = LeaseRenewal(
        renew, beating(NOTHING, NOTHING, cancel), 3600.0, lambda requests: told.set(), lambda: None
    )
    renewal.start()
    assert told.wait(5)
    renewal.stop()
    assert len(renewed) == 1


def test_requests_are_passed_on() -> None:
    heard: list[Requests] = []
    told = threading.Event()

    def hear(requests: Requests) -> None:
        heard.append(requests)
        told.set()

    cancel = Requests(True, False, frozenset())
    renewal = LeaseRenewal(beating(NOTHING, cancel), unasked, 0.0, hear, lambda: None)
    renewal.start()
    assert told.wait(5)
    renewal.stop()
    assert heard[0] == cancel


def test_a_request_that_could_not_be_passed_on_is_passed_on_later() -> None:
    tries: list[int] = []
    told = threading.Event()

    def hear(requests: Requests) -> None:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("the actor restarts")
        told.set()

    renewal = LeaseRenewal(beating(Requests(False, True, frozenset())), unasked, 0.0, hear, lambda: None)
    renewal.start()
    assert told.wait(5)
    renewal.stop()


def test_a_database_that_is_away_does_not_end_the_heartbeat() -> None:
    told = threading.Event()
    renewal = LeaseRenewal(
        beating(StoreUnavailable("locked"), OSError("odd"), Requests(True, False, frozenset())),
        unasked,
        0.0,
        lambda requests: told.set(),
        lambda: None,
    )
    renewal.start()
    assert told.wait(5)
    renewal.stop()


def test_a_stale_attempt_is_called_off() -> None:
    lost = threading.Event()
    renewal = LeaseRenewal(beating(StaleAttempt("over")), unasked, 0.0, lambda requests: None, lost.set)
    renewal.start()
    assert lost.wait(5)
    renewal.stop()


def test_settings_reach_the_driver_whole_and_private(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, database_url="postgresql://u:secret@h/d", offline=True)
    path = driver_settings.write(settings)
    assert path.stat().st_mode & 0o077 == 0
    read = driver_settings.read(path)
    assert read.resolved_database_url() == "postgresql://u:secret@h/d"
    assert read.offline
    assert read.roots("data") == settings.roots("data")
    assert driver_settings.write(settings) == path


def test_settings_do_not_depend_on_the_readers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = driver_settings.write(Settings(data_dir=tmp_path))
    monkeypatch.setenv("STILLHOUSE_DATABASE_URL", "postgresql://elsewhere/d")
    assert driver_settings.read(path).resolved_database_url() == f"sqlite:///{tmp_path / 'stillhouse.db'}"


def test_an_error_of_the_driver_is_tried_again_and_then_fails(
    store: Store, queue: Queue, submit: Submit, clock: Callable[[], float]
) -> None:
    experiment = submit(max_restarts=1)
    for attempt, state in ((1, ExperimentState.queued), (2, ExperimentState.failed)):
        clock.forward(10)  # type: ignore[attr-defined]
        assert queue.claim("s", lease_s=60)
        driver.end_failed_attempt(store, experiment.id, attempt, KeyError("odd"))
        found = store.experiment(experiment.id)
        assert found.state is state
        assert found.failure_class == "bug"
        assert "KeyError" in (found.failure_message or "")
