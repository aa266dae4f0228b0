"""Runs as models over HTTP: named in specs, waited for, downloaded."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient

from service.config.settings import Settings
from service.domain.records import LogLine
from service.domain.states import ExperimentState, RunState
from service.specs.models import checkpoints_folder
from service.store import RecordBatch, Store
from tests.api.conftest import Driver
from tests.api.test_reading import problem
from trainers.checkpoints.store import CheckpointStore, Snapshot
from trainers.errors import FailureClass

API = "/api/v1"
SPEC = "name: students\ntask: {name: imdb, path: texts}\n"
TOKENIZER = json.dumps(
    {
        "model": {"type": "WordPiece", "vocab": {"[PAD]": 0, "[UNK]": 1, "tea": 2}},
        "normalizer": {"type": "BertNormalizer", "lowercase": False},
    }
)


def submitted(client: TestClient, text: str, status: int) -> dict[str, Any]:
    answer = client.post(f"{API}/experiments", content=SPEC + text)
    assert answer.status_code == status, answer.text
    body: dict[str, Any] = answer.json()
    return body


def save_checkpoint(settings: Settings, experiment_id: int, run_id: int, *, best: bool) -> Path:
    """What a worker leaves behind."""
    folder = checkpoints_folder(settings, experiment_id, run_id)
    checkpoints = CheckpointStore(folder, keep=2)

    def describe(path: Path) -> None:
        (path / "config.json").write_text('{"model_type": "bert"}')
        (path / "tokenizer.json").write_text(TOKENIZER)

    path = checkpoints.save(100, Snapshot({"model": {"w": torch.ones(700)}}, {}), describe)
    if best:
        checkpoints.mark_best(checkpoints.id(100), "accuracy", 0.9)
    return path


@pytest.mark.parametrize(
    ("text", "type", "words"),
    [
        ("model: {name: 'run:77'}", "unknown-run", "'run:77': no such run"),
        ("model: {teacher: 'run:77'}", "unknown-run", "'run:77': no such run"),
        ("model: {name: 'run:x'}", "invalid-value", "write run: and its number, such as run:12"),
        ("model: {teacher: 'run:0'}", "invalid-value", "is not a run"),
        ("model: {teacher: mini}", "model-without-weights", "a preset, which has no trained weights"),
        ("model: {teacher: /etc}", "path-outside-roots", "is outside the allowed folders"),
        ("model: {teacher: ../../etc}", "path-outside-roots", "is outside the allowed folders"),
        ("model: {teacher: nowhere}", "path-not-found", "does not exist"),
        ("model: {teacher: texts}", "model-without-weights", "no config.json"),
        ("search: {axes: {model.teacher: [null, 'run:78']}}", "unknown-run", "'run:78'"),
    ],
)
def test_what_cannot_be_a_model_is_refused_with_its_field(
    client: TestClient, text: str, type: str, words: str
) -> None:
    body = submitted(client, text, 422)
    assert body["type"] == f"/problems/{type}", body
    assert words in body["detail"]
    assert body["errors"][0]["path"] in ("model.name", "model.teacher")


def test_a_run_without_a_result_is_refused_and_said_why(client: TestClient, driver: Driver) -> None:
    experiment = driver.submit()
    (run,) = driver.start(experiment)
    driver.store.attempts.finish_run(
        run.id, run.attempt, RunState.failed, failure=(FailureClass.out_of_memory, "batch 64 does not fit")
    )
    body = submitted(client, f"model: {{name: 'run:{run.id}'}}", 422)
    assert body["type"] == "/problems/run-without-result"
    assert "failed: out_of_memory: batch 64 does not fit" in body["detail"]


def test_a_teacher_of_another_task_is_refused_and_a_student_is_not(
    client: TestClient, driver: Driver, store: Store
) -> None:
    experiment = driver.submit(task={"name": "wikiqa"})
    (run,) = driver.start(experiment)
    body = submitted(client, f"model: {{teacher: 'run:{run.id}'}}", 422)
    assert body["type"] == "/problems/teacher-of-another-task"
    assert f"'run:{run.id}' was trained on wikiqa, but task.name is imdb" in body["detail"]
    submitted(client, f"model: {{name: 'run:{run.id}'}}", 201)


def test_validation_asks_for_runs_too(client: TestClient) -> None:
    answer = client.post(f"{API}/specs/validate", content=SPEC + "model: {name: 'run:77'}")
    assert answer.json()["type"] == "/problems/unknown-run"


def test_the_queue_says_which_run_is_waited_for(client: TestClient, driver: Driver) -> None:
    experiment = driver.submit()
    (run,) = driver.start(experiment)
    driver.queue.heartbeat("s", node="here", pid=1)
    waiting = submitted(client, f"model: {{teacher: 'run:{run.id}'}}", 201)
    (entry,) = client.get(f"{API}/queue").json()["items"]
    assert entry["experiment"]["id"] == waiting["id"]
    assert entry["reason"] == f"waiting for run {run.id} to finish"
    assert client.get(f"{API}/experiments/{waiting['id']}/runs").json()["items"][0]["teacher"] == (
        f"run:{run.id}"
    )
    driver.finish(experiment, [run])
    answer = client.delete(f"{API}/experiments/{experiment.id}")
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/conflict")
    assert f"experiment {waiting['id']} starts from run {run.id}" in answer.json()["detail"]


def test_a_model_comes_as_a_tar_of_announced_length(
    client: TestClient, driver: Driver, settings: Settings
) -> None:
    experiment = driver.submit()
    (run,) = driver.start(experiment)
    save_checkpoint(settings, experiment.id, run.id, best=True)
    driver.finish(experiment, [run])
    answer = client.get(f"{API}/runs/{run.id}/model")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-tar"
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        assert archive.getnames()[0] == "manifest.json"
        assert {"README.md", "model.safetensors", "vocab.txt"} <= set(archive.getnames())


def test_without_a_checkpoint_there_is_no_model(
    client: TestClient, driver: Driver, settings: Settings
) -> None:
    problem(client, "/runs/77/model", 404, "not-found")
    experiment = driver.submit()
    (run,) = driver.start(experiment)
    body = problem(client, f"/runs/{run.id}/model", 409, "no-model")
    assert body["detail"] == f"run {run.id} is running and has saved no checkpoint yet"
    save_checkpoint(settings, experiment.id, run.id, best=False)
    body = problem(client, f"/runs/{run.id}/model", 409, "no-model")
    assert "no evaluated checkpoint" in body["detail"]
    assert client.get(f"{API}/runs/{run.id}/model", params={"checkpoint": "last"}).status_code == 200
    problem(client, f"/runs/{run.id}/model", 422, "invalid-parameter", checkpoint="first")


def test_a_run_that_prepares_is_streamed_with_its_last_line(driver: Driver, store: Store) -> None:
    from api.stream import ExperimentSource

    experiment = driver.submit(seeds=[0, 1])
    (claimed,) = driver.queue.claim("scheduler", lease_s=60.0)
    store.drivers.started(claimed.id, 1, "here", 1)
    preparing, training = store.runs.page(experiment_id=experiment.id).items
    for run in (preparing, training):
        attempt = store.attempts.open(run.id, 1)
        store.recording.record(
            RecordBatch(logs=[LogLine(run.id, attempt, 1, 1.0, "info", "tokenised 5 of 9 parts")])
        )
    store.attempts.run_started(training.id, 1, total_steps=9, resumed_from_step=0, facts={})
    from service.store import ProgressRow

    store.recording.record(RecordBatch(progress=[ProgressRow(training.id, 1, 0, 9, "training")]))
    views = ExperimentSource(store, experiment.id).poll(None)[0].runs
    assert '"message":"tokenised 5 of 9 parts"' in views[preparing.id].payload
    assert '"line":null' in views[training.id].payload
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.failed)
