"""One conformance suite for the real jobs of a cluster and for those in memory."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from service.local.local_ray import LocalRay
from service.scheduling.cluster import ClusterNode
from service.scheduling.ray_jobs import (
    DashboardRayJobs,
    JobRefused,
    JobState,
    RayUnavailable,
    RayUnreachable,
    wait_until_ended,
)
from tests.fake_ray_jobs import FakeRayJobs

_numbers = itertools.count()
TIMEOUT_S = 90.0

Finish = Callable[[str], None]


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.ray)])
def jobs(request: pytest.FixtureRequest) -> DashboardRayJobs:
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
def finish(jobs: DashboardRayJobs, gate: Path) -> Finish:
    """Let a job's process end with code 0, having printed `hello`."""

    def finish(submission_id: str) -> None:
        if isinstance(jobs, FakeRayJobs):
            jobs.end(submission_id, output="hello\n")
        else:
            gate.touch()

    return finish


def entrypoint(gate: Path) -> str:
    return f"echo hello; while [ ! -e {gate} ]; do sleep 0.1; done"


def wait_until(jobs: DashboardRayJobs, submission_id: str, state: JobState) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while (job := jobs.status(submission_id)) is None or job.state is not state:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_job_runs_once_however_often_it_is_submitted(
    jobs: DashboardRayJobs, name: str, gate: Path, finish: Finish
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


def test_stop_ends_a_job_and_may_be_repeated(jobs: DashboardRayJobs, name: str, gate: Path) -> None:
    jobs.submit(name, entrypoint(gate), metadata={})
    wait_until(jobs, name, JobState.running)
    jobs.stop(name)
    job = wait_until_ended(jobs, name, TIMEOUT_S)
    assert job is not None
    assert job.state is JobState.stopped
    jobs.stop(name)


def test_an_unknown_job_is_none_and_can_be_stopped(jobs: DashboardRayJobs) -> None:
    assert jobs.status("never-submitted") is None
    jobs.stop("never-submitted")
    assert jobs.logs("never-submitted") == ""


def test_many_jobs_are_looked_at_together(
    jobs: DashboardRayJobs, name: str, gate: Path, finish: Finish
) -> None:
    jobs.submit(name, entrypoint(gate), metadata={"owner": "ada"})
    wait_until(jobs, name, JobState.running)
    unknown = [f"{name}-{number}" for number in range(20)]
    for ids in ([name], [*unknown, name]):
        (job,) = jobs.known(ids).values()
        assert (job.submission_id, job.state, job.metadata) == (name, JobState.running, {"owner": "ada"})
    finish(name)


def test_the_cluster_is_seen(jobs: DashboardRayJobs) -> None:
    snapshot = jobs.cluster(12.0)
    assert (snapshot.at_s, snapshot.reachable) == (12.0, True)
    assert snapshot.totals["CPU"] == 2.0


RESERVE = """
import pathlib, ray, time
from ray.util.placement_group import placement_group
ray.init()
ray.get(placement_group([{"CPU": 1}]).ready())
while not pathlib.Path("GATE").exists():
    time.sleep(0.1)
"""


@pytest.mark.ray
def test_what_is_reserved_is_not_free(
    local_ray: LocalRay, name: str, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = DashboardRayJobs(local_ray.dashboard_url)
    jobs.submit(name, shlex.join([sys.executable, "-c", RESERVE.replace("GATE", str(gate))]), metadata={})
    deadline = time.monotonic() + TIMEOUT_S
    while (node := jobs.cluster(0.0).nodes[0]).devices != {"CPU": (2.0, 1.0)}:
        assert time.monotonic() < deadline, (node, jobs.logs(name))
        time.sleep(0.1)
    assert not node.idle
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    (node,) = DashboardRayJobs(local_ray.dashboard_url).cluster(0.0).nodes
    assert (node.available, node.devices) == ({}, {"CPU": (2.0, 2.0)}), "nothing is known without the GCS"
    gate.touch()
    wait_until_ended(jobs, name, TIMEOUT_S)


def test_an_absent_ray_is_said_to_be_absent() -> None:
    for jobs in (FakeRayJobs(), DashboardRayJobs("http://127.0.0.1:9")):
        if isinstance(jobs, FakeRayJobs):
            jobs.unreachable = True
        calls: list[Callable[[], object]] = [
            lambda jobs=jobs: jobs.submit("x", "true", metadata={}),  # type: ignore[misc]
            lambda jobs=jobs: jobs.status("x"),  # type: ignore[misc]
            lambda jobs=jobs: jobs.known(["x"] * 20),  # type: ignore[misc]
            lambda jobs=jobs: jobs.stop("x"),  # type: ignore[misc]
            lambda jobs=jobs: jobs.logs("x"),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(RayUnreachable):
                call()
        assert not jobs.cluster(0.0).reachable


class Dashboard(HTTPServer):
    """A dashboard that gives one answer to everything but the question for its version."""

    status, text = 200, "{}"

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}  # Answers of their own, by the path's beginning
        self.calls: list[str] = []
        super().__init__(("127.0.0.1", 0), _Answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Dashboard

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/version":
            import ray

            version = {"version": "4", "ray_version": ray.__version__, "ray_commit": ""}
            self._answer(200, json.dumps(version))
        else:
            self.server.calls.append(self.path)
            own = (text for path, text in self.server.texts.items() if self.path.startswith(path))
            self._answer(self.server.status, next(own, self.server.text))

    do_POST = do_GET

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


@pytest.fixture
def dashboard() -> Iterator[Dashboard]:
    with Dashboard() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


NO_AGENT = "No available agent to submit job, please try again later."
RELAYED = "Traceback:\nRuntimeError: Request failed with status code {}: Traceback:\n{}."


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (400, "ValueError: entrypoint", JobRefused),
        (422, "entrypoint", JobRefused),
        (500, RELAYED.format(400, "ValueError: entrypoint"), JobRefused),
        (500, NO_AGENT, RayUnavailable),
        (400, NO_AGENT, RayUnavailable),
        (500, RELAYED.format(500, "OSError: no space left on device"), RayUnavailable),
        (404, "no such route", RayUnavailable),
        (429, "slow down", RayUnavailable),
        (502, "bad gateway", RayUnavailable),
        (503, "starting", RayUnavailable),
    ],
)
def test_only_400_and_422_refuse_a_job(
    dashboard: Dashboard, status: int, text: str, error: type[Exception]
) -> None:
    dashboard.status, dashboard.text = status, text
    with pytest.raises(error):
        DashboardRayJobs(dashboard.url).submit("x", "true", metadata={})


def test_a_job_that_ray_has_already_counts_as_submitted(dashboard: Dashboard) -> None:
    dashboard.status = 500
    dashboard.text = RELAYED.format(400, "ValueError: Job with submission_id x already exists.")
    DashboardRayJobs(dashboard.url).submit("x", "true", metadata={})


def test_a_thousand_jobs_are_one_call(dashboard: Dashboard) -> None:
    job = {"type": "SUBMISSION", "status": "RUNNING", "entrypoint": "true", "message": "runs"}
    names = [f"job-{number}" for number in range(1_000)]
    dashboard.text = json.dumps(
        [{**job, "submission_id": name} for name in names]
        + [{**job, "type": "DRIVER", "job_id": "01000000", "submission_id": None}]
    )
    jobs = DashboardRayJobs(dashboard.url)
    assert list(jobs.known([*names, "lost"])) == names
    assert dashboard.calls == ["/api/jobs/"]


def test_a_job_of_a_lost_node_has_failed_whatever_a_new_head_still_says_of_it(dashboard: Dashboard) -> None:
    """With its state kept elsewhere, a head shows the jobs of the one before it as running."""
    node = {"node_ip": "127.0.0.1", "node_name": "", "is_head_node": True, "resources_total": {}}
    job = {"type": "SUBMISSION", "status": "RUNNING", "entrypoint": "true", "submission_id": "x"}
    dashboard.texts = {
        "/api/v0/nodes": json.dumps(
            {"data": {"result": {"result": [
                {**node, "node_id": "old", "state": "DEAD"}, {**node, "node_id": "new", "state": "ALIVE"},
            ]}}}
        ),
        "/api/jobs/": json.dumps({**job, "driver_node_id": "old"}),
    }  # fmt: skip
    jobs = DashboardRayJobs(dashboard.url)
    assert (found := jobs.status("x")) is not None and found.state is JobState.running
    assert jobs.cluster(0.0).reachable
    assert (found := jobs.status("x")) is not None
    assert (found.state, found.message) == (JobState.failed, "its node was lost")
    dashboard.texts["/api/jobs/"] = json.dumps({**job, "driver_node_id": "new"})
    assert (found := jobs.status("x")) is not None and found.state is JobState.running


def test_a_node_that_was_meant_to_end_is_not_lost(dashboard: Dashboard) -> None:
    node = {"node_ip": "127.0.0.1", "node_name": "", "is_head_node": False, "resources_total": {}}
    messages = {
        "Terminated due to preemption: maintenance": "drained",
        "Terminated due to idle (no Ray activity)": "drained",
        "Expected termination: received SIGTERM": "drained",
        "Unexpected termination: health check failed due to missing too many heartbeats": "lost",
    }
    nodes = [{**node, "node_id": text, "state": "DEAD", "state_message": text} for text in messages]
    dashboard.texts = {"/api/v0/nodes": json.dumps({"data": {"result": {"result": nodes}}})}
    found = DashboardRayJobs(dashboard.url).cluster(0.0).nodes
    assert {node.id: node.state for node in found} == messages


def test_a_list_that_ray_cannot_give_tells_nothing_about_jobs(dashboard: Dashboard) -> None:
    dashboard.status, dashboard.text = 500, "starting"
    with pytest.raises(RayUnavailable):
        DashboardRayJobs(dashboard.url).known(["x"] * 20)
