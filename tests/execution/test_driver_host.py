"""The host of drivers, with processes in memory: which it starts, and what follows when one ends."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import dataclass

import pytest

from service.domain.records import Experiment
from service.domain.states import ExperimentState
from service.driving import host as host_module
from service.driving.host import DriverHost
from service.scheduling.queue import Queue
from service.store import Store
from tests.execution.conftest import Submit


@dataclass
class Driver:
    experiment: Experiment
    exitcode: int | None = None

    def kill(self) -> None:
        self.exitcode = -9


@pytest.fixture
def drivers() -> list[Driver]:
    return []


@pytest.fixture
def host(store: Store, drivers: list[Driver]) -> DriverHost:
    def start(experiment: Experiment) -> Driver:
        drivers.append(Driver(experiment))
        return drivers[-1]

    return DriverHost(store, "ours", start)


def test_a_host_starts_a_driver_for_each_of_its_experiments_once(
    host: DriverHost, drivers: list[Driver], queue: Queue, submit: Submit
) -> None:
    first, _, third = submit(), submit(), submit()
    for job in ("ours", "theirs", "ours"):
        queue.claim("s", lease_s=60, job=job)
    for _ in range(2):
        host.run_once()
    assert {driver.experiment.id for driver in drivers} == {first.id, third.id}
    assert len(drivers) == 2


def test_a_driver_that_dies_is_replaced_under_another_attempt_and_its_neighbour_stays(
    host: DriverHost, drivers: list[Driver], queue: Queue, store: Store, submit: Submit
) -> None:
    died, stays = submit(), submit()
    queue.claim("s", lease_s=60, job="ours", limit=2)
    host.run_once()
    for driver in drivers:
        store.drivers.started(driver.experiment.id, 1, "node", 1)
    next(driver for driver in drivers if driver.experiment.id == died.id).kill()
    host.run_once()
    released = store.experiments.get(died.id)
    assert released.state is ExperimentState.queued
    assert "exit code -9" in (released.failure_message or "")
    assert store.experiments.get(stays.id).state is ExperimentState.running
    assert queue.claim("s", lease_s=60, job="ours", among=[died.id]) == []  # Not before its delay.


def test_a_driver_that_ended_in_order_is_not_counted_as_lost(
    host: DriverHost, drivers: list[Driver], queue: Queue, store: Store, submit: Submit
) -> None:
    experiment = submit()
    queue.claim("s", lease_s=60, job="ours")
    host.run_once()
    store.drivers.started(experiment.id, 1, "node", 1)
    store.requests.cancel(experiment.id)
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.cancelled)
    drivers[0].exitcode = 0
    host.run_once()
    assert [event.kind for event in store.experiments.events(experiment.id)][-1] == "experiment.cancelled"


def test_a_driver_whose_attempt_was_ended_by_others_is_killed(
    host: DriverHost,
    drivers: list[Driver],
    queue: Queue,
    store: Store,
    submit: Submit,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    experiment = submit()
    queue.claim("s", lease_s=60, job="ours")
    host.run_once()
    store.drivers.release_experiment(experiment.id, 1, delay_s=0.0)
    host.run_once()
    assert drivers[0].exitcode is None  # It may be about to end.
    monkeypatch.setattr(host_module, "LEAVE_S", -1.0)
    host.run_once()
    assert drivers[0].exitcode == -9


PR_GET_MEMORY_MERGE = 68
FORKED = f"""
import ctypes, os
import service.driving.preloaded
if os.fork():
    os.wait()
else:
    print("merges:", ctypes.CDLL(None).prctl({PR_GET_MEMORY_MERGE}, 0, 0, 0, 0))
"""


@pytest.mark.skipif(
    ctypes.CDLL(None).prctl(PR_GET_MEMORY_MERGE, 0, 0, 0, 0) < 0, reason="this kernel cannot merge pages"
)
def test_equal_pages_of_drivers_may_be_merged() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True)
    assert done.stdout == "merges: 1\n", done.stderr
