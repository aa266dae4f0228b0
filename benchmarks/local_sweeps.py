"""A real service on this machine for benchmarks: SQLite, a scheduler, and Ray with two CPUs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
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

_TIMEOUT_S = 900.0
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
    """

    store: Store
    texts: Path
    address: str

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
            SystemExit: it did not.
        """
        self.wait_for(lambda: self.store.experiments.get(experiment.id).state in TERMINAL_EXPERIMENT_STATES)
        ended = self.store.experiments.get(experiment.id)
        if ended.state is not ExperimentState.succeeded:
            sys.exit(f"experiment {ended.id} is {ended.state}: {ended.failure_message}")
        return ended

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition.

        Raises:
            SystemExit: it never held.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline:
                sys.exit("the sweep did not get there in time")
            time.sleep(0.05)


@contextmanager
def local_sweeps(folder: Path, *, train: int = 128) -> Iterator[LocalSweeps]:
    """A service with its data in a folder, ended with the block.

    Args:
        folder: empty.
        train: training texts of the corpus.
    """
    write_corpus(folder / "texts", train=train, test=32, seed=0)
    settings = Settings(data_dir=folder / "data", data_roots=str(folder), offline=True)
    with LocalRay.start(settings, num_cpus=2) as cluster:
        # In the environment that this set, and not by two threads at once: the scheduler's and a benchmark's.
        import ray  # noqa: F401

        settings = settings.model_copy(update={"ray_dashboard_url": cluster.dashboard_url})
        store = Store.open(settings, migrate=True)
        stop = threading.Event()
        scheduler = Scheduler(store, Queue(store), DashboardRayJobs(cluster.dashboard_url), settings)
        thread = threading.Thread(target=scheduler.run, args=(stop,))
        thread.start()
        try:
            yield LocalSweeps(store, folder / "texts", cluster.address)
        finally:
            stop.set()
            thread.join()
            store.close()
