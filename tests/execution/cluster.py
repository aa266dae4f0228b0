"""One Ray cluster for the whole test session, and a service on top of it for each test."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from benchmarks.drains import Head, environment
from benchmarks.local_sweeps import start_node
from service.config.settings import Settings
from service.domain.records import Experiment, Run
from service.domain.states import ExperimentState, RunState
from service.local.local_ray import LocalRay
from service.scheduling.queue import Queue
from service.scheduling.ray_jobs import DashboardRayJobs, wait_until_ended
from service.scheduling.scheduler import Scheduler
from service.specs.experiment import validate
from service.specs.reuse import Reuse, reusable
from service.store import NewExperiment, Store
from trainers.data.synthetic import write_corpus

_tests = itertools.count(1)
RESTING = {"succeeded", "failed", "cancelled", "paused"}
"""States in which an experiment has no driver."""
WAIT_S = 600.0
"""Longest wait for anything; a loaded machine needs most of it for starting processes."""


@contextlib.contextmanager
def ray_head() -> Iterator[LocalRay]:
    """A Ray head with 2 CPUs and its dashboard, which takes the jobs."""
    before = os.environ.pop("RAY_ADDRESS", None)
    with LocalRay.start(Settings(), num_cpus=2) as ray:
        yield ray
    if before is not None:
        os.environ["RAY_ADDRESS"] = before


@contextlib.contextmanager
def served_by(head: Head, variables: Mapping[str, str] = MappingProxyType({})) -> Iterator[LocalRay]:
    """A head that is not the session's, while it runs; all processes of the test have the variables."""
    with environment({**variables, **head.variables}), head, own_token():
        yield LocalRay(head.address, head.dashboard_url, head.variables, head.token, _folder=head.folder)


@contextlib.contextmanager
def own_token() -> Iterator[None]:
    """Ray remembers the first token that a process has used."""
    from ray._raylet import AuthenticationTokenLoader

    AuthenticationTokenLoader.instance().reset_cache()
    yield
    AuthenticationTokenLoader.instance().reset_cache()


@pytest.fixture(scope="session")
def local_ray() -> Iterator[LocalRay]:
    """The head of the whole session."""
    with ray_head() as ray:
        yield ray


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small labelled text set."""
    folder = tmp_path_factory.mktemp("texts")
    write_corpus(folder, train=128, test=32, seed=0)
    return folder


class Running:
    """A store and a scheduler on the session's Ray.

    Attributes:
        store: the database.
        settings: of the installation.
        jobs: the cluster's jobs.
        texts: a small data set.
    """

    def __init__(self, settings: Settings, texts: Path, local_ray: LocalRay) -> None:
        self.settings = settings
        self.store = Store.open(settings)
        self.queue = Queue(self.store)
        self.jobs = DashboardRayJobs(settings.ray_dashboard_url)
        self.local_ray = local_ray
        self.texts = texts
        self._stop = threading.Event()
        scheduler = Scheduler(self.store, self.queue, self.jobs, settings)
        self._thread = threading.Thread(target=scheduler.run, args=(self._stop,))
        self._thread.start()

    def submit(self, *, owner: str = "ada", **fields: Any) -> Experiment:
        """Submit a tiny experiment; fields override the spec's."""
        document: dict[str, Any] = {
            "name": "tiny",
            "task": {"name": "imdb", "path": str(self.texts), "max_length": 16},
            "model": {"name": "tiny"},
            "batch": {"global_size": 4},
            "length": {"steps": 4},
            **fields,
        }
        catalogue = self.settings.catalogue()
        spec = validate(json.loads(json.dumps(document)), catalogue)
        plans = list(spec.runs(catalogue))
        reuse = reusable(plans, self.settings, catalogue, self.store.runs.equal) if spec.reuse else Reuse()
        text = spec.canonical_json()
        return self.store.submissions.submit(
            NewExperiment(spec, plans, spec_text=text, owner=owner, reuse=reuse)
        )[0]

    def runs(self, experiment: Experiment) -> list[Run]:
        """Its runs in grid order."""
        return self.store.runs.page(experiment_id=experiment.id).items

    def wait_for(self, condition: Callable[[], object], timeout_s: float = WAIT_S) -> float:
        """Wait until the condition holds; returns how long that took, in seconds."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < timeout_s, self.story()
            time.sleep(0.05)
        return time.monotonic() - began

    def wait_until_ended(self, experiment: Experiment) -> ExperimentState:
        """Wait until the experiment rests, and say in which state."""
        self.wait_for(lambda: self.store.experiments.get(experiment.id).state in RESTING)
        return self.store.experiments.get(experiment.id).state

    def wait_until_training(self, run_id: int, *, beyond_step: int = 0) -> int:
        """Wait until the run has a point beyond a step; returns its worker's process id."""
        self.wait_for(
            lambda: (
                any(point.step > beyond_step for point in self.store.series.latest_points(run_id))
                and self.store.runs.get(run_id).state is RunState.running
            )
        )
        facts = self.store.runs.attempts(run_id)[-1].facts
        assert facts is not None
        return int(facts["worker_pid"])

    def story(self) -> str:
        """All events and the ends of the jobs' logs, for a test that failed."""
        lines = []
        for experiment in self.store.experiments.page().items:
            lines += [
                f"{event.at_s:.2f} {event.kind} run={event.run_id} {event.message}"
                for event in self.store.experiments.events(experiment.id)
            ]
            if experiment.submission_id:
                lines.append(self.jobs.logs(experiment.submission_id)[-3000:])
            lines += [path.read_text(errors="replace")[-3000:] for path in self.driver_logs(experiment)]
        return "\n".join(lines)

    def driver_logs(self, experiment: Experiment) -> list[Path]:
        """The log of each of its drivers, in the order of attempts."""
        logs = self.local_ray._folder / "session_latest" / "logs"
        return sorted(logs.glob(f"job-driver-stillhouse-{experiment.id}-*.log"), key=os.path.getmtime)

    def drivers(self) -> list[dict[str, Any]]:
        """Drivers that run, as the dashboard lists them; each is a job of its own."""
        return [
            job
            for job in self.dashboard("/api/jobs/")
            if job["type"] == "DRIVER"
            and job["status"] == "RUNNING"
            and "service.driving.driver" in job["entrypoint"]
        ]

    def dashboard(self, path: str) -> Any:
        """What the dashboard answers."""
        headers = {"Authorization": f"Bearer {self.local_ray.token}"}
        return httpx.get(self.settings.ray_dashboard_url + path, headers=headers, timeout=10).json()

    def close(self) -> None:
        """End the scheduler and the jobs that a failed test has left, and see that Ray has everything back.

        A driver whose experiment has ended is left alone until it has exited by itself.
        """
        self._stop.set()
        self._thread.join()
        experiments = self.store.experiments.page().items
        if all(experiment.state in RESTING for experiment in experiments):
            with contextlib.suppress(AssertionError):
                self.wait_for(lambda: not self.drivers(), timeout_s=180.0)
        for job in {each.submission_id for each in experiments if each.submission_id}:
            self.jobs.stop(job)
            with contextlib.suppress(TimeoutError):
                wait_until_ended(self.jobs, job, timeout_s=180.0)
        self.store.close()
        self._wait_until_idle()

    def _wait_until_idle(self) -> None:
        """What a test leaves reserved would be missing in all tests after it."""
        began = time.monotonic()
        while not all(node.idle for node in self.jobs.cluster(time.time()).nodes if node.alive):
            if time.monotonic() - began > 60.0:
                groups = self.dashboard("/api/v0/placement_groups?detail=1")
                actors = self.dashboard(
                    "/api/v0/actors?detail=1&filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"
                )
                raise AssertionError(f"CPUs are still reserved: placement groups {groups}, actors {actors}")
            time.sleep(0.2)


@pytest.fixture(scope="session")
def storage_url() -> str | None:
    """Where runs keep their checkpoints; a module may have its own."""
    return None


@pytest.fixture
def running(
    tmp_path: Path, sqlite_template: Path, texts: Path, local_ray: LocalRay, storage_url: str | None
) -> Iterator[Running]:
    """A service with an empty SQLite store."""
    database = tmp_path / "stillhouse.db"
    shutil.copy(sqlite_template, database)
    # All tests share one Ray, which knows jobs by the experiment's id: ids must not come twice.
    connection = sqlite3.connect(database)
    connection.execute(
        "INSERT INTO sqlite_sequence (name, seq) VALUES ('experiments', ?)", [next(_tests) * 100]
    )
    connection.commit()
    connection.close()
    settings = Settings(
        data_dir=tmp_path,
        storage_url=storage_url,
        data_roots=str(texts.parent),
        ray_dashboard_url=local_ray.dashboard_url,
        lease_s=20.0,
        offline=True,
    )
    service = Running(settings, texts, local_ray)
    yield service
    service.close()


AddNode = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def add_node(running: Running) -> Iterator[AddNode]:
    """Let a node with one CPU, a label and an address of its own join the session's Ray."""
    started: list[subprocess.Popen[bytes]] = []

    def add(kind: str, address: str = "127.0.0.1", *, within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        nodes = len(nodes_of(running, kind))
        options = ("--labels", f"kind={kind}")
        process = start_node(running.local_ray.address, address, *options, within=within)
        started.append(process)
        running.wait_for(lambda: len(nodes_of(running, kind)) > nodes)
        return process

    yield add
    for process in started:
        end(process)
    running.wait_for(lambda: not kinds(running))


WITH_NAMESPACES = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode != 0,
    reason="this user may not mount a folder of its own",
)


def with_own_folder(path: Path) -> tuple[str, ...]:
    """Begins the command of a process that sees an empty folder of its own in the place of a shared one."""
    return ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(path))


def kinds(running: Running) -> set[str]:
    """Labels of the live nodes."""
    return {
        node.labels["kind"]
        for node in running.jobs.cluster(0.0).nodes
        if node.alive and "kind" in node.labels
    }


def nodes_of(running: Running, kind: str) -> set[str]:
    """Ray's ids of the live nodes with a label."""
    return {
        node.id for node in running.jobs.cluster(0.0).nodes if node.alive and node.labels.get("kind") == kind
    }


def end(process: subprocess.Popen[bytes]) -> None:
    """The node goes away, as a machine would."""
    if process.poll() is None:
        os.killpg(process.pid, 9)
    process.wait()
