"""A running API exports every metric that alerts and dashboards ask for, with its labels and right values."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from service.domain.process_metrics import FIGURES, MetricBuffer, MetricKind
from service.domain.records import Experiment, Run
from service.domain.states import RunState
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.store import CheckpointRow, RecordBatch, Store
from service.workers.run_gauges import RUN_GAUGES
from tests.api.conftest import Driver
from tests.service.test_docker import DASHBOARDS, RULES, check_expression
from trainers.errors import FailureClass

Samples = dict[str, dict[frozenset[tuple[str, str]], float]]
"""Values by name of the sample and by its labels."""
A100 = {"CPU": 16.0, "GPU": 4.0, "accelerator_type:A100": 1.0, "memory": 1e9}


def node(id: str, *, alive: bool = True, **free: float) -> ClusterNode:
    return ClusterNode(id, id, alive, A100, {**A100, **free})


def scrape(http: httpx.Client) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"stillhouse_{name}"][frozenset(labels.items())]


def measure_everything(store: Store) -> None:
    """Stores a value of each figure that processes without a port measure, unless it is there from zero."""
    buffer = MetricBuffer()
    for info in FIGURES.values():
        labels = dict.fromkeys(info.labels, "x")
        if info.kind is MetricKind.gauge:
            buffer.gauge(info.name, 1.0, **labels)
        elif info.kind is MetricKind.histogram:
            buffer.observe(info.name, 0.1, **labels)
        elif not info.from_zero:
            buffer.count(info.name, **labels)
    store.process_metrics.add(buffer.taken(), source="test")


def trained(driver: Driver, runs: int) -> tuple[Experiment, list[Run]]:
    experiment = driver.submit(seeds=list(range(runs)))
    return experiment, driver.start(experiment)


def test_alerts_and_dashboards_ask_for_what_is_exported_with_its_labels(
    app: FastAPI, http: httpx.Client, driver: Driver
) -> None:
    trained(driver, 1)
    driver.submit()
    measure_everything(driver.store)
    app.state.queue.put_cluster(ClusterSnapshot(driver.store.clock(), True, None, (node("1"),)))
    scrape(http)  # A request is counted once it is answered.
    exported = {
        name: {label for labels in series for label, _ in labels} for name, series in scrape(http).items()
    }
    assert {name for name in FIGURES if not any(each.startswith(name) for each in exported)} == set()
    known = {"up": {"job", "instance"}} | {f"ray_{gauge.name}": {"run"} for gauge in RUN_GAUGES.values()}
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"][0]["rules"]
    boards = [json.loads(path.read_text(encoding="utf-8")) for path in DASHBOARDS]
    targets: list[dict[str, Any]] = [
        target for board in boards for panel in board["panels"] for target in panel["targets"]
    ]
    for expression in [each["expr"] for each in (*rules, *targets)]:
        check_expression(expression, exported | known)
    shown = " ".join(target["expr"] for target in targets)
    own = {name for name in exported if name.startswith("stillhouse_") and not name.endswith("_created")}
    parts = ("_bucket", "_sum", "_count")
    every = own | {f"ray_{gauge.name}" for gauge in RUN_GAUGES.values()}
    assert {name for name in every if name not in shown and not name.endswith(parts)} == set()


def test_nodes_and_devices_are_those_of_the_clusters_snapshot(app: FastAPI, http: httpx.Client) -> None:
    nodes = (
        node("1", GPU=1.0, CPU=10.0),
        node("2"),
        node("3", alive=False),
        replace(node("4"), draining=True),
        replace(node("5", alive=False), draining=True),
    )
    app.state.queue.put_cluster(ClusterSnapshot(app.state.store.clock(), True, None, nodes))
    samples = scrape(http)
    assert value(samples, "nodes", pool="default", state="alive") == 2
    for state in ("lost", "draining", "drained"):
        assert value(samples, "nodes", pool="default", state=state) == 1
    assert value(samples, "devices", pool="default", kind="A100", state="in_use") == 3
    assert value(samples, "devices", pool="default", kind="A100", state="idle") == 9
    assert value(samples, "devices", pool="default", kind="CPU", state="in_use") == 6
    app.state.queue.put_cluster(ClusterSnapshot(app.state.store.clock(), False, None, ()))
    assert "stillhouse_devices" not in scrape(http)


def test_failures_retries_and_lost_attempts_are_counted_by_class(http: httpx.Client, driver: Driver) -> None:
    before = scrape(http)
    assert value(before, "failures_total", failure_class="storage") == 0  # So that `increase` sees the first.
    experiment, (first, second, third, _) = trained(driver, 4)
    finish = driver.store.attempts.finish_run
    full = FailureClass.storage, "checkpoint of step 2 cannot be written"
    finish(first.id, 1, RunState.failed, failure=full, retry_delay_s=1.0)
    finish(second.id, 1, RunState.failed, failure=(FailureClass.bug, "x"))
    finish(third.id, 1, RunState.failed, failure=(FailureClass.preempted, "x"), retry_delay_s=0.0)
    driver.store.drivers.release_experiment(
        experiment.id, 1, delay_s=0.0, failure=(FailureClass.bug, "RuntimeError: Set changed size")
    )
    (again,) = driver.queue.claim("scheduler", lease_s=60.0)
    driver.store.attempts.reset_runs_of_dead_attempt(again.id, again.attempt)
    samples = scrape(http)
    for kind, failures, retries, lost in (("storage", 1, 1, 0), ("bug", 1, 0, 1), ("lost", 1, 1, 0)):
        assert value(samples, "failures_total", failure_class=kind) == failures
        assert value(samples, "retries_total", failure_class=kind) == retries
        assert value(samples, "driver_attempts_lost_total", failure_class=kind) == lost
    assert value(samples, "failures_total", failure_class="preempted") == 0
    assert value(samples, "preemptions_total", project="default") == 1


def test_work_since_the_last_checkpoint_is_that_of_the_run_with_most(
    http: httpx.Client, driver: Driver, store: Store
) -> None:
    now = 1000.0
    store.clocks.simulated = lambda: now
    _, (first, second) = trained(driver, 2)
    now += 100.0
    for run, ago_s in ((first, 30.0), (second, 5.0)):
        row = CheckpointRow(run.id, run.attempt, 5, "p", now - ago_s)
        assert not store.recording.record(RecordBatch(checkpoints=[row]))
    assert value(scrape(http), "checkpoint_age_seconds", project="default") == 30.0
    store.attempts.finish_run(first.id, 1, RunState.cancelled)
    assert value(scrape(http), "checkpoint_age_seconds", project="default") == 5.0


def test_what_waits_for_capacity_is_counted_by_pool(app: FastAPI, http: httpx.Client, driver: Driver) -> None:
    experiment = driver.submit()
    (claimed,) = driver.queue.claim("scheduler", lease_s=60.0)
    driver.store.drivers.started(claimed.id, claimed.attempt, "here", 1)
    assert value(scrape(http), "experiments_waiting_for_capacity", pool="default") == 0
    (run, *_) = driver.store.runs.page(experiment_id=experiment.id).items
    driver.store.drivers.set_waiting(experiment.id, 1, {run.id: "capacity: no node has 8 CPUs"})
    assert value(scrape(http), "experiments_waiting_for_capacity", pool="default") == 1
    assert [each.experiment.id for each in app.state.queue.listing().at_work] == [experiment.id]


def test_space_and_connections_are_this_processs(
    app: FastAPI, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = scrape(http)
    assert value(samples, "data_free_bytes") > 0
    states = [value(samples, "database_connections", state=state) for state in ("in_use", "idle", "unopened")]
    assert sum(states) == app.state.store.database.readers.pool.size()

    def unreachable(folder: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("api.metrics.shutil.disk_usage", unreachable)
    assert value(scrape(http), "data_free_bytes") == 0
