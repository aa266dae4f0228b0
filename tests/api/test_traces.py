"""The timeline of a run over HTTP and on the command line's client, and in the report."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from service.config.settings import Settings
from service.output.run_files import typical_step
from service.specs.models import checkpoints_folder
from tests.api.conftest import Driver
from tests.api.test_reading import problem
from trainers.checkpoints.manifest import attempt_folder, kernel_trace
from trainers.telemetry import tracing
from trainers.telemetry.tracing import TraceSpan, WorkerTrace

API = "/api/v1"


def write_trace(folder: Path) -> None:
    """What two workers leave behind: steps of 30, 10 and 20 ms, the second worker idle at first."""
    spans: tuple[list[TraceSpan], list[TraceSpan]] = ([], [])
    at = 100.0
    for step, length_s in ((11, 0.030), (12, 0.010), (13, 0.020)):
        middle, end = at + length_s / 2, at + length_s
        spans[0].append(TraceSpan("forward", step, 0, at, middle))
        spans[0].append(TraceSpan("backward", step, 0, middle, end))
        spans[1].append(TraceSpan("bubble", step, None, at, middle))
        spans[1].append(TraceSpan("forward", step, 0, middle, end))
        at = end
    workers = [WorkerTrace(f"worker {rank}", tuple(of), 0.0, ((0.0, 1.0),)) for rank, of in enumerate(spans)]
    tracing.write(attempt_folder(folder, 1), tracing.chrome_trace(workers, {"strategy": "pipeline"}))


def test_a_trace_is_served_as_it_lies_on_the_disk(
    client: TestClient, driver: Driver, settings: Settings
) -> None:
    experiment = driver.submit(telemetry={"trace_steps": 3})
    (run,) = driver.start(experiment)
    body = problem(client, f"/runs/{run.id}/trace", 409, "no-trace")
    assert body["detail"] == f"run {run.id} is running and has not reached its 3 traced steps yet"
    write_trace(checkpoints_folder(settings, experiment.id, run.id))
    answer = client.get(f"{API}/runs/{run.id}/trace")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert f"run-{run.id}-trace.json" in answer.headers["content-disposition"]
    assert len([e for e in answer.json()["traceEvents"] if e["ph"] == "X"]) == 6 + 12
    driver.finish(experiment, [run])
    page = client.get(f"{API}/experiments/{experiment.id}/report")
    assert page.status_code == 200
    assert f'id="step-{run.id}"' in page.text
    assert "Step 13 of run:" in page.text


def test_without_traced_steps_there_is_no_trace(client: TestClient, driver: Driver) -> None:
    problem(client, "/runs/77/trace", 404, "not-found")
    (run,) = driver.start(driver.submit())
    body = problem(client, f"/runs/{run.id}/trace", 409, "no-trace")
    assert "submit it with telemetry.trace_steps" in body["detail"]


def test_the_kernel_trace_of_each_worker_is_served(
    client: TestClient, driver: Driver, settings: Settings
) -> None:
    experiment = driver.submit(telemetry={"profile_steps": 3})
    (run,) = driver.start(experiment)
    place = f"/runs/{run.id}/trace/kernels"
    body = problem(client, place, 409, "no-trace")
    assert body["detail"] == f"run {run.id} is running and has not reached its 3 profiled steps yet"
    folder = attempt_folder(checkpoints_folder(settings, experiment.id, run.id), 1)
    tracing.write_kernels(folder, [gzip.compress(b'{"rank": %d}' % rank) for rank in (0, 1)])
    assert client.get(API + place).json() == {"rank": 0}
    answer = client.get(API + place, params={"rank": 1})
    assert answer.json() == {"rank": 1}
    assert f"run-{run.id}-kernels-1.json" in answer.headers["content-disposition"]
    body = problem(client, place, 409, "no-trace", rank=2)
    assert body["detail"] == f"run {run.id} has no kernel trace of worker 2; it has those of 0, 1"
    kernel_trace(folder, 0).write_bytes(b"damaged")
    assert "cannot be read" in problem(client, place, 409, "no-trace")["detail"]


def test_without_profiled_steps_there_is_no_kernel_trace(client: TestClient, driver: Driver) -> None:
    (run,) = driver.start(driver.submit())
    body = problem(client, f"/runs/{run.id}/trace/kernels", 409, "no-trace")
    assert "submit it with telemetry.profile_steps" in body["detail"]


def test_the_typical_step_has_the_median_time(tmp_path: Path) -> None:
    write_trace(tmp_path)
    step = typical_step(json.loads((attempt_folder(tmp_path, 1) / "trace.json").read_text()))
    assert (step.step, step.rows) == (13, ("worker 0", "worker 1"))
    (bubble,) = [bar for bar in step.bars if bar.phase == "bubble"]
    assert (bubble.row, bubble.begin_ms, bubble.micro_batch) == ("worker 1", 0.0, None)
    assert bubble.end_ms == pytest.approx(10.0)


@pytest.mark.parametrize("document", [{}, {"traceEvents": []}, {"traceEvents": [{"ph": "X"}]}, []])
def test_another_document_is_no_trace(document: object) -> None:
    with pytest.raises(ValueError, match="not a trace from this service"):
        typical_step(document)  # type: ignore[arg-type]
