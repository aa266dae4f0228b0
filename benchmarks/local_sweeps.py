"""A real service on this machine for benchmarks: a database, a scheduler, and Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.config.settings import Settings
from service.domain.records import Experiment
from service.domain.states import TERMINAL_EXPERIMENT_STATES, ExperimentState
from service.local.local_ray import LocalRay
from service.scheduling.queue import Queue
from service.scheduling.ray_jobs import DashboardRayJobs
from service.scheduling.scheduler import Scheduler
from service.specs.experiment import validate
from service.store import NewExperiment, Store
from trainers.data.synthetic import write_corpus

_TIMEOUT_S = 480.0
_TINY: Mapping[str, Any] = {
    "name": "benchmark",
    "model": {"name": "tiny"},
    "batch": {"global_size": 4},
    "length": {"steps": 4},
}


@dataclass(frozen=True, slots=True)
class LocalSweeps:
    """Submits sweeps on a small corpus.

    Attributes:
        store: the database.
        texts: folder of the corpus.
        address: of the Ray head.
        jobs: its jobs: the drivers of the experiments.
    """

    store: Store
    texts: Path
    address: str
    jobs: DashboardRayJobs

    def submit(self, fields: Mapping[str, Any]) -> Experiment:
        """Submits a sweep of tiny runs; fields replace the spec's."""
        task = {"name": "imdb", "path": str(self.texts), "max_length": 16, "overlap": "allow"}
        spec = validate({**_TINY, **fields, "task": {**task, **fields.get("task", {})}})
        plans = list(spec.runs())
        return self.store.submissions.submit(
            NewExperiment(spec, plans, spec_text=spec.canonical_json(), owner="benchmark")
        )[0]

    def wait(self, experiment: Experiment) -> Experiment:
        """Waits until an experiment has succeeded.

        Raises:
            SystemExit: it did not; with its events and the end of its driver's log.
        """
        in_time = self.wait_for(
            lambda: self.store.experiments.get(experiment.id).state in TERMINAL_EXPERIMENT_STATES
        )
        ended = self.store.experiments.get(experiment.id)
        if in_time and ended.state is ExperimentState.succeeded:
            return ended
        for event in self.store.experiments.events(ended.id):
            print(event.at_s, event.run_id, event.kind, event.message)
        if ended.submission_id is not None:
            print(self.jobs.logs(ended.submission_id)[-6000:])
        sys.exit(f"experiment {ended.id} is {ended.state}: {ended.failure_message}")

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Waits for a condition for some minutes; returns whether it held."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not (held := condition()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return held


@contextmanager
def local_sweeps(
    folder: Path, *, train: int = 128, database_url: str | None = None, num_cpus: int = 2
) -> Iterator[LocalSweeps]:
    """A service with its data in a folder, ended with the block.

    Args:
        folder: empty.
        train: training texts of the corpus.
        database_url: database without tables; None = a SQLite file in the folder.
        num_cpus: that Ray counts.
    """
    write_corpus(folder / "texts", train=train, test=32, seed=0)
    settings = Settings(
        data_dir=folder / "data", data_roots=str(folder), offline=True, database_url=database_url
    )
    with LocalRay.start(settings, num_cpus=num_cpus) as cluster:
        # In the environment that this set, and not by two threads at once: the scheduler's and a benchmark's.
        import ray  # noqa: F401

        settings = settings.model_copy(update={"ray_dashboard_url": cluster.dashboard_url})
        store, jobs = Store.open(settings, migrate=True), DashboardRayJobs(cluster.dashboard_url)
        stop = threading.Event()
        scheduler = Scheduler(store, Queue(store), jobs, settings)
        thread = threading.Thread(target=scheduler.run, args=(stop,))
        thread.start()
        try:
            yield LocalSweeps(store, folder / "texts", cluster.address, jobs)
        finally:
            stop.set()
            thread.join()
            store.close()


def start_node(
    head: str, address: str, *options: str, cpus: int = 1, within: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """A node of this machine that joins a cluster; on SIGTERM it drains for up to two minutes.

    `within` is a command that executes the one it is given.
    """
    command = [
        *within,
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options),
        *("--address", head, "--node-ip-address", address, "--num-cpus", str(cpus)),
        *("--object-store-memory", str(100 * 2**20), "--disable-usage-stats"),
        *("--min-worker-port", "0", "--max-worker-port", "0"),
    ]
    environment = {
        **os.environ,
        "RAY_raylet_start_wait_time_s": "180",  # A busy machine needs more than the 30 s that Ray gives it.
        "RAY_raylet_liveness_self_check_interval_ms": "5000",  # As docs/operations.md recommends.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "120",
    }
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
