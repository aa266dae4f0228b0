"""The driver's lease renewal, its settings file, and what it does about an error of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from service.config.settings import Settings
from service.domain.states import ExperimentState
from service.driving import driver
from service.driving.driver import lease_renewal
from service.scheduling import driver_settings
from service.scheduling.queue import Queue
from service.specs.models import workspace_of
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


PAUSE = Requests(False, True, frozenset())


def unasked() -> Requests:
    raise AssertionError("the lease is due at every beat, and its renewal answers the requests")


def test_requests_are_read_without_renewing_the_lease() -> None:
    renewed: list[int] = []
    told = threading.Event()

    def renew() -> Requests:
        renewed.append(1)
        return NOTHING

    hear = lambda requests: told.set() if requests == PAUSE else None  # noqa: E731
    with lease_renewal(renew, beating(NOTHING, NOTHING, PAUSE), 3600.0, hear, lambda: None):
        assert told.wait(5)
    assert len(renewed) == 1


def test_requests_are_handed_on() -> None:
    told = threading.Event()
    cancel = Requests(True, False, frozenset())
    hear = lambda requests: told.set() if requests == cancel else None  # noqa: E731
    with lease_renewal(beating(NOTHING, cancel), unasked, 0.0, hear, lambda: None):
        assert told.wait(5)


def test_a_withdrawal_is_handed_on_when_the_request_was_heard_in_part() -> None:
    """The sweep was told to stop before handing the request on failed."""
    stopping: list[bool] = []
    withdrawn = threading.Event()

    def hear(requests: Requests) -> None:
        stopping.append(requests.pause)
        if requests.pause:
            raise ConnectionError("the actor restarts")
        if stopping[:-1]:
            withdrawn.set()

    with lease_renewal(beating(PAUSE, NOTHING), unasked, 0.0, hear, lambda: None):
        assert withdrawn.wait(5)


def test_a_database_that_is_away_does_not_end_the_heartbeat() -> None:
    told = threading.Event()
    beat = beating(StoreUnavailable("locked"), OSError("odd"), PAUSE)
    with lease_renewal(beat, unasked, 0.0, lambda requests: told.set(), lambda: None):
        assert told.wait(5)


def test_a_stale_attempt_is_called_off() -> None:
    lost = threading.Event()
    with lease_renewal(beating(StaleAttempt("over")), unasked, 0.0, lambda requests: None, lost.set):
        assert lost.wait(5)


def test_settings_reach_the_driver_whole_and_private(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, database_url="postgresql://u:secret@h/d", offline=True)
    path = driver_settings.write(settings)
    assert path.stat().st_mode & 0o077 == 0
    read = driver_settings.read(path)
    assert read.resolved_database_url() == "postgresql://u:secret@h/d"
    assert read.offline
    assert read.roots("data") == settings.roots("data")
    assert driver_settings.write(settings) == path


def test_the_cache_is_apart_from_the_shared_folder(tmp_path: Path) -> None:
    shared, scratch = tmp_path / "shared", tmp_path / "scratch"
    read = driver_settings.read(driver_settings.write(Settings(data_dir=shared, cache_dir=scratch)))
    assert workspace_of(read).cache == str(scratch)
    read = driver_settings.read(driver_settings.write(Settings(data_dir=shared)))
    assert workspace_of(read).cache == str(shared / "cache")


def test_settings_that_a_node_does_not_see_are_missed_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match=r"driver-settings.json, .* is not on node .*: STILLHOUSE_DATA_DIR must be"
    ):
        driver_settings.read(tmp_path / "driver-settings.json")


def test_schedulers_of_two_pools_share_a_folder(tmp_path: Path) -> None:
    urls = {"default": "http://a:8265", "gpu": "http://b:8265"}
    paths = [
        driver_settings.write(Settings(data_dir=tmp_path, pool=pool, ray_dashboard_url=url))
        for pool, url in urls.items()
    ]
    found = [driver_settings.read(path) for path in paths]
    assert {each.pool: each.ray_dashboard_url for each in found} == urls


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
        found = store.experiments.get(experiment.id)
        assert found.state is state
        assert found.failure_class == "bug"
        assert "KeyError" in (found.failure_message or "")
