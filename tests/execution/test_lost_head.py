"""A head that is lost and comes back with what its GCS knew, kept in a Redis or in a folder: RocksDB."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.drains import Head
from service.domain.events import EventKind
from service.domain.states import ExperimentState, RunState
from service.local.local_ray import LocalRay, free_ports
from service.scheduling.ray_jobs import JobState
from tests.execution.cluster import AddNode, Running, nodes_of, served_by
from tests.execution.test_two_nodes import write_catalogue
from trainers.errors import FailureClass

STEPS = 400
EVERY = 50
"""Steps between checkpoints: a worker whose driver is gone waits before the next."""


@contextmanager
def redis(folder: Path) -> Iterator[tuple[tuple[str, ...], Mapping[str, str]]]:
    """Options and variables of a head whose state is in a Redis, while this one runs."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed; install the package redis-server")
    (port,), password = free_ports(1), secrets.token_hex(16)
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--requirepass", password]
    command += ["--dir", str(folder), "--save", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield (
            ("--redis-username", "default", "--redis-password", password),
            {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}", "RAY_external_storage_namespace": "research"},
        )
    finally:
        server.kill()
        server.wait()


@contextmanager
def rocksdb(folder: Path) -> Iterator[tuple[tuple[str, ...], Mapping[str, str]]]:
    """Variables of a head whose state is in a folder."""
    yield (), {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(folder / "gcs")}


@pytest.fixture(params=[redis, rocksdb], ids=["redis", "rocksdb"])
def head(request: pytest.FixtureRequest) -> Iterator[Head]:
    """A head without CPUs that keeps its state; not the session's."""
    with (
        tempfile.TemporaryDirectory(prefix="sh-", dir="/tmp") as short,
        request.param(Path(short)) as (options, variables),
    ):
        yield Head(Path(short, "ray"), *options, environment=variables)


@pytest.fixture
def local_ray(head: Head) -> Iterator[LocalRay]:
    with served_by(head, {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}) as ray:
        yield ray


@pytest.mark.slow
@pytest.mark.ray
def test_a_node_rejoins_the_next_head_and_its_run_continues_under_another_driver(
    head: Head, running: Running, add_node: AddNode
) -> None:
    write_catalogue(running.settings.data_dir)
    node = add_node("T4", "127.0.0.2")
    before = nodes_of(running, "T4")
    experiment = running.submit(
        hardware="T4", max_restarts=0, length={"steps": STEPS}, checkpoint={"every_steps": EVERY}
    )
    (run,) = running.runs(experiment)
    running.wait_until_training(run.id, beyond_step=2 * EVERY)
    job = running.store.experiments.get(experiment.id).submission_id
    assert job is not None

    head.kill()
    head.start()
    assert running.wait_until_ended(experiment) is ExperimentState.succeeded, running.story()
    assert node.poll() is None, "the node ended, and was not started again"
    assert nodes_of(running, "T4") == before

    lost, following = running.store.runs.attempts(run.id)
    assert (lost.failure_class, lost.ended_s is not None) == (FailureClass.lost, True), running.story()
    assert (following.resumed_from_step or 0) >= 2 * EVERY, running.story()
    run = running.store.runs.get(run.id)
    # With `max_restarts: 0`; the count of failures of machines bounds crash loops alone.
    assert (run.state, run.own_failures, run.infrastructure_failures) == (RunState.succeeded, 0, 1)
    losses = running.store.series.points(run.id, ["loss"])["loss"]
    assert [point.step for point in losses] == list(range(1, STEPS + 1))
    old = running.jobs.status(job)
    assert old is not None and old.state is JobState.failed
    events = running.store.experiments.events(experiment.id)
    (released,) = [event.message for event in events if event.kind == EventKind.experiment_released]
    assert "its node was lost" in released, "Ray itself shows the old job as running until it gets another"
