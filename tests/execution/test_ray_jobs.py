"""One conformance suite for the real jobs of a cluster and for those in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from service.local.local_ray import LocalRay
from service.scheduling.cluster import ClusterNode
from service.scheduling.fake_ray_jobs import FakeRayJobs
from service.scheduling.ray_jobs import (
    DashboardRayJobs,
    JobState,
    RayJobs,
    RayUnreachable,
    wait_until_ended,
)

_numbers = itertools.count()
TIMEOUT_S = 90.0

Finish = Callable[[str], None]


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.ray)])
def jobs(request: pytest.FixtureRequest) -> RayJobs:
    if request.param == "fake":
        return FakeRayJobs((ClusterNode("a", "a", True, {"CPU": 2.0}, {"CPU": 2.0}),))
    local_ray: LocalRay = request.getfixturevalue("local_ray")
    return DashboardRayJobs(local_ray.dashboard_url)


@pytest.fixture
def name() -> str:
    return f"conformance-{next(_numbers)}"


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A job ends when this file exists."""
    return tmp_path / "gate"


@pytest.fixture
def finish(jobs: RayJobs, gate: Path) -> Finish:
    """Let a job's process end with code 0, having printed `hello`."""

    def finish(submission_id: str) -> None:
        if isinstance(jobs, FakeRayJobs):
            jobs.end(submission_id, output="hello\n")
        else:
            gate.touch()

    return finish


def entrypoint(gate: Path) -> str:
    return f"echo hello; while [ ! -e {gate} ]; do sleep 0.1; done"


def wait_until(jobs: RayJobs, submission_id: str, state: JobState) -> None:
    import time

    deadline = time.monotonic() + TIMEOUT_S
    while (job := jobs.status(submission_id)) is None or job.state is not state:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_job_runs_once_however_often_it_is_submitted(
    jobs: RayJobs, name: str, gate: Path, finish: Finish
) -> None:
    jobs.submit(name, entrypoint(gate), metadata={"job_name": "n", "owner": "ada"})
    jobs.submit(name, entrypoint(gate), metadata={"job_name": "other"})
    wait_until(jobs, name, JobState.running)
    finish(name)
    job = wait_until_ended(jobs, name, TIMEOUT_S)
    assert job is not None
    assert job.state is JobState.succeeded
    assert job.metadata["job_name"] == "n"
    assert jobs.logs(name).count("hello\n") == 1
    jobs.submit(name, entrypoint(gate), metadata={})  # Ended long ago: still not a second time.
    again = jobs.status(name)
    assert again is not None
    assert again.state is JobState.succeeded


def test_stop_ends_a_job_and_may_be_repeated(jobs: RayJobs, name: str, gate: Path) -> None:
    jobs.submit(name, entrypoint(gate), metadata={})
    wait_until(jobs, name, JobState.running)
    jobs.stop(name)
    job = wait_until_ended(jobs, name, TIMEOUT_S)
    assert job is not None
    assert job.state is JobState.stopped
    jobs.stop(name)


def test_an_unknown_job_is_none_and_can_be_stopped(jobs: RayJobs) -> None:
    assert jobs.status("never-submitted") is None
    jobs.stop("never-submitted")
    assert jobs.logs("never-submitted") == ""


def test_the_cluster_is_seen(jobs: RayJobs) -> None:
    snapshot = jobs.cluster(12.0)
    assert (snapshot.at_s, snapshot.reachable) == (12.0, True)
    assert snapshot.totals["CPU"] == 2.0


def test_an_absent_ray_is_said_to_be_absent() -> None:
    for jobs in (FakeRayJobs(), DashboardRayJobs("http://127.0.0.1:9")):
        if isinstance(jobs, FakeRayJobs):
            jobs.unreachable = True
        calls: list[Callable[[], object]] = [
            lambda jobs=jobs: jobs.submit("x", "true", metadata={}),  # type: ignore[misc]
            lambda jobs=jobs: jobs.status("x"),  # type: ignore[misc]
            lambda jobs=jobs: jobs.stop("x"),  # type: ignore[misc]
            lambda jobs=jobs: jobs.logs("x"),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(RayUnreachable):
                call()
        assert not jobs.cluster(0.0).reachable
