"""An API process, and an experiment that is running: what benchmarks of live follow have in common."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx
import psutil

from service.config.settings import Settings
from service.domain.records import Run
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import NewExperiment, PointBatch, ProgressRow, RecordBatch, Store

REPORT_S = 0.25
"""Seconds between two reports of a run."""


@contextmanager
def api_process(settings: Settings) -> Iterator[tuple[str, psutil.Process]]:
    """An API process on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        "STILLHOUSE_DATA_DIR": str(settings.data_dir),
        "STILLHOUSE_DATABASE_URL": settings.resolved_database_url(),
        "STILLHOUSE_PORT": str(port),
    }
    started = subprocess.Popen([sys.executable, "-m", "api"], env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60.0
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/healthz", trust_env=False).status_code == 200:
                    break
            assert time.monotonic() < deadline, "the API did not start within a minute"
            time.sleep(0.1)
        yield url, psutil.Process(started.pid)
    finally:
        started.terminate()
        started.wait(10)


def started(store: Store, runs: int) -> tuple[int, list[Run]]:
    """Submits an experiment of so many runs and starts them all; returns its id and its runs."""
    spec = validate({"name": "followed", "task": {"name": "imdb"}, "seeds": list(range(runs))})
    experiment, _ = store.submissions.submit(
        NewExperiment(spec, list(spec.runs()), spec_text="", owner="bench")
    )
    Queue(store).claim("bench", lease_s=3600)
    store.drivers.started(experiment.id, 1, "bench", 0)
    begun = store.runs.page(experiment_id=experiment.id).items
    for run in begun:
        attempt = store.attempts.open(run.id, 1)
        store.attempts.run_started(run.id, attempt, total_steps=10**6, resumed_from_step=0, facts={})
    return experiment.id, [store.runs.get(run.id) for run in begun]


@contextmanager
def reporting(store: Store, runs: list[Run], every_s: float = REPORT_S) -> Iterator[None]:
    """Has all runs report again and again while the context lasts."""
    stop = threading.Event()
    thread = threading.Thread(target=_report, args=(store, runs, every_s, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _report(store: Store, runs: list[Run], every_s: float, stop: threading.Event) -> None:
    step = 0
    while not stop.wait(every_s):
        step += 1
        names = ("loss", "learning_rate", "samples_per_s", "gradient_norm")
        at_s = [time.time()]
        store.recording.record(
            RecordBatch(
                points=[
                    PointBatch(run.id, run.attempt, name, [step], [1.0 / step], at_s)
                    for run in runs
                    for name in names
                ],
                progress=[ProgressRow(run.id, run.attempt, step, 10**6, "training") for run in runs],
            )
        )
