"""Figures of `benchmarks.scale` about rows that pile up: totals, points, deletion."""

from __future__ import annotations

import math
import multiprocessing
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from benchmarks.store import percentile_ms
from service.config.process import freeze_loaded
from service.config.settings import Settings
from service.db import schema
from service.domain.records import Experiment
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.scheduling.upkeep import Upkeep
from service.specs.experiment import validate
from service.store import NewExperiment, PointBatch, RecordBatch, Store

ROWS_AT_A_TIME = 50_000
_CONTEXT = multiprocessing.get_context("spawn")


def experiment_get(settings: Settings, smoke: bool) -> dict[str, float]:
    """Gets a running experiment whose runs have reported energy and overhead, window by window."""
    runs, windows, asked = (20, 3, 3) if smoke else (10_000, 60, 100)
    with closing(Store.open(settings)) as store:
        experiment = _driven(store, runs)
        ids = [row.id for row in store.runs.all_of(experiment.id)]
        begin = time.time() - 10.0 * windows
        _insert(store, schema.attempts, [
            {"run_id": id, "number": 1, "experiment_attempt": 1, "state": RunState.succeeded,
             "started_s": begin, "ended_s": begin + 10.0 * windows, "last_step": 100, "workers": 1}
            for id in ids
        ])  # fmt: skip
        for name in ("window_energy_kwh", "overhead_time_s"):
            for first in range(0, runs, 500):
                _insert(store, schema.measurements, [
                    {"run_id": id, "attempt": 1, "name": name, "scope": "restart", "value": 0.001,
                     "unit": "", "provenance": "counter", "start_s": begin + 10.0 * n,
                     "end_s": begin + 10.0 * n + 10.0}
                    for id in ids[first : first + 500]
                    for n in range(windows)
                ])  # fmt: skip
        store.database.write(
            lambda c: c.execute(sa.update(schema.runs).values(state=RunState.succeeded, attempt=1))
        )
        store.accounting.recount(experiment.id)
        _analyze(store)
    times, _ = _got(settings, f"/api/v1/experiments/{experiment.id}", asked)
    return {"experiment_get_ms_10k_runs_60_windows": percentile_ms(times, 0.99)}


def points_get(settings: Settings, smoke: bool) -> dict[str, float]:
    """Gets the points of a run without saying which or how many, in a process that has just started."""
    names, steps, asked = (2, 500, 3) if smoke else (4, 500_000, 20)
    with closing(Store.open(settings)) as store:
        (run_id,) = trained(store, _driven(store, 1), names, steps)
        _analyze(store)
    times, more_mib = _got(settings, f"/api/v1/runs/{run_id}/points", asked)
    return {"points_get_2m_ms": percentile_ms(times, 0.99), "points_get_2m_rss_mib": more_mib}


def delete_experiment(settings: Settings, smoke: bool) -> dict[str, float]:
    """Records points of a run before and while another process removes a deleted experiment."""
    names, steps = (2, 4_000) if smoke else (10, 1_000_000)
    with closing(Store.open(settings)) as store:
        deleted = _driven(store, 1)
        (run_id,) = trained(store, deleted, names, steps)
        store.attempts.finish_run(run_id, 1, RunState.succeeded)
        store.drivers.finish_experiment(deleted.id, 1, ExperimentState.succeeded)
        _analyze(store)
        other = _driven(store, 1)
        (busy,) = trained(store, other, 1, 1)
        undisturbed = _writes(store, busy, 0, 0.2 if smoke else 15.0, lambda: True)
        begin = time.perf_counter()
        store.removal.delete(deleted.id, at_once=True)
        deleting_s = time.perf_counter() - begin
        remover = _CONTEXT.Process(target=_remove, args=(settings,))
        remover.start()
        times = _writes(store, busy, len(undisturbed), math.inf, remover.is_alive)
        remover.join()
        assert remover.exitcode == 0 and store.removal.deleted_experiments() == [], "the removal failed"
    return {
        "delete_experiment_longest_write_ms": 1000 * max(deleting_s, *times),
        "delete_experiment_writes": len(times),
        "delete_experiment_p999_write_ms": percentile_ms(times, 0.999),
        "longest_write_before_delete_ms": 1000 * max(undisturbed),
    }


def _writes(store: Store, run_id: int, after: int, seconds: float, go_on: Callable[[], bool]) -> list[float]:
    """Records a point again and again; returns how long each write took, in seconds."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while go_on() and time.perf_counter() < until:
        step = after + len(times) + 1
        batch = RecordBatch([PointBatch(run_id, 1, "m0", [step], [0.5], [time.time()])])
        begin = time.perf_counter()
        store.recording.record(batch)
        times.append(time.perf_counter() - begin)
        time.sleep(0.002)
    return times


def _driven(store: Store, runs: int) -> Experiment:
    spec = validate({"name": "bench", "task": {"name": "imdb"}, "seeds": list(range(runs))})
    experiment, _ = store.submissions.submit(
        NewExperiment(spec, list(spec.runs()), spec_text="", owner="bench")
    )
    (claimed,) = Queue(store).claim("bench", lease_s=36_000)
    store.drivers.started(claimed.id, 1, "bench", 0)
    return experiment


def trained(store: Store, experiment: Experiment, names: int, steps: int) -> list[int]:
    """Opens every run and records so many series of so many points for each."""
    ids = [run.id for run in store.runs.all_of(experiment.id)]
    for id in ids:
        store.attempts.open(id, 1)
        store.attempts.run_started(id, 1, total_steps=steps, resumed_from_step=0, facts={})
        each = max(1, ROWS_AT_A_TIME // names)
        for first in range(0, steps, each):
            span = list(range(first, min(first + each, steps)))
            values, at_s = [math.sin(step / 99) for step in span], [float(step) for step in span]
            store.recording.record(
                RecordBatch([PointBatch(id, 1, f"m{n}", span, values, at_s) for n in range(names)])
            )
    return ids


def _insert(store: Store, table: sa.Table, rows: list[dict[str, Any]]) -> None:
    store.database.write(lambda c: c.execute(sa.insert(table), rows))


def _analyze(store: Store) -> None:
    if not store.database.is_sqlite:
        store.database.write(lambda c: c.execute(sa.text("ANALYZE")))


def _got(settings: Settings, path: str, asked: int) -> tuple[list[float], float]:
    """Times of requests to an API in a process of its own, and the MiB of memory by which it grew."""
    with _CONTEXT.Pool(1) as pool:
        return pool.apply(_get, (settings, path, asked))


def _get(settings: Settings, path: str, asked: int) -> tuple[list[float], float]:
    from fastapi.testclient import TestClient

    from api.app import create_app

    times: list[float] = []
    with TestClient(create_app(settings), base_url=f"http://127.0.0.1:{settings.port}") as client:
        assert client.get("/api/v1/experiments").status_code == 200
        freeze_loaded()  # As the server does.
        before = psutil.Process().memory_info().rss
        for _ in range(asked):
            begin = time.perf_counter()
            answer = client.get(path)
            times.append(time.perf_counter() - begin)
            assert answer.status_code == 200, answer.text
    return times, max(0, _largest_rss() - before) / 2**20


def _largest_rss() -> int:
    """Bytes of memory that this program had at most; `ru_maxrss` counts the process that started it, too."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return 1024 * int(peak)


def _remove(settings: Settings) -> None:
    freeze_loaded()
    with closing(Store.open(settings)) as store:
        Upkeep(store, settings).run_once(threading.Event())
