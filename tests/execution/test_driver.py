"""The driver's lease renewal, its settings, and what it does about an error of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from service.config.settings import Settings
from service.domain.states import ExperimentState
from service.driving import driver
from service.driving.driver import lease_renewal
from service.local.local_ray import LocalRay
from service.scheduling import driver_settings
from service.scheduling.queue import Queue
from service.scheduling.ray_jobs import DashboardRayJobs
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


def handed_over(settings: Settings) -> Settings:
    return driver_settings.read(driver_settings.document(settings))


def test_settings_reach_the_driver_whole(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, database_url="postgresql://u:secret@h/d", offline=True)
    read = handed_over(settings)
    assert read.resolved_database_url() == "postgresql://u:secret@h/d"
    assert read.offline
    assert read.roots("data") == settings.roots("data")


def test_the_cache_is_apart_from_the_shared_folder(tmp_path: Path) -> None:
    shared, scratch = tmp_path / "shared", tmp_path / "scratch"
    read = handed_over(Settings(data_dir=shared, cache_dir=scratch))
    assert workspace_of(read).cache == str(scratch)
    assert workspace_of(handed_over(Settings(data_dir=shared))).cache == str(shared / "cache")


def test_what_the_schedulers_folder_declares_reaches_a_driver_that_does_not_see_it(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, pool="cold")
    hour_by_hour = ["hour,carbon_kg_per_kwh", *(f"{hour},0.{hour:02}" for hour in range(24))]
    (tmp_path / "carbon.csv").write_text("\n".join(hour_by_hour))
    (tmp_path / "sites.yaml").write_text(
        "cold: {pue: 1.2, pue_source: meter, carbon_kg_per_kwh: carbon.csv, carbon_source: grid}"
    )
    (tmp_path / "hardware.yaml").write_text(
        "A100: {device: cpu, precisions: [fp32], tdp_w: 100.0, price_usd_per_hour: 9.0, "
        "price_date: '2026-01-01', price_source: a test}"
    )
    catalogue, site = settings.catalogue(), settings.site("cold")
    content = driver_settings.document(settings)
    for file in tmp_path.iterdir():
        file.unlink()
    read = driver_settings.read(content)
    assert (read.catalogue(), read.site("cold")) == (catalogue, site)
    assert read.catalogue()["A100"].price_usd_per_hour == 9.0
    assert read.site("default") == Settings().site("default")


def test_settings_do_not_depend_on_the_readers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = driver_settings.document(Settings(data_dir=tmp_path))
    monkeypatch.setenv("STILLHOUSE_DATABASE_URL", "postgresql://elsewhere/d")
    database = f"sqlite:///{tmp_path / 'stillhouse.db'}"
    assert driver_settings.read(content).resolved_database_url() == database


@pytest.mark.ray
def test_settings_are_taken_once(
    tmp_path: Path, local_ray: LocalRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data_dir=tmp_path, driver_database_url="postgresql://driver:secret@h/d")
    jobs = DashboardRayJobs(local_ray.dashboard_url)
    monkeypatch.setenv("RAY_ADDRESS", local_ray.address)
    content = driver_settings.document(settings)
    token, other = jobs.hand_over(content), jobs.hand_over(content)
    assert driver_settings.take(token).resolved_database_url() == settings.driver_database_url
    for used_up in (token, "guessed.zip"):
        with pytest.raises(SystemExit, match="have expired or were taken before") as refused:
            driver_settings.take(used_up)
        assert "secret" not in str(refused.value)
    driver_settings.take(other)


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
