"""What a run was resolved to, its checkpoints, its log by parts, who holds devices, and the examples."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Generator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.requests import ClientDisconnect

from api.deps import Download
from service.config.examples import examples, examples_folder
from service.config.settings import Settings
from service.domain.access import Visibility
from service.domain.records import LogLine, Placement
from service.specs.experiment import ExperimentSpec, validate
from service.specs.models import checkpoints_folder
from service.store import RecordBatch
from tests.api.conftest import Driver
from tests.api.test_reading import problem
from trainers.checkpoints import manifest
from trainers.checkpoints.store import CheckpointStore
from trainers.data import storage

API = "/api/v1"


def save(folder: Path, attempt: int, step: int) -> Path:
    """Writes a sealed checkpoint of one file."""
    path = manifest.CheckpointId(attempt, step).path(folder)
    path.mkdir(parents=True)
    (path / "weights").write_bytes(b"x" * step)
    files = {"weights": storage.seal(path / "weights")}
    document = {"format": manifest.FORMAT, "attempt": attempt, "step": step, "files": files}
    (path / storage.MANIFEST).write_text(json.dumps(document))
    return path


def test_a_runs_configuration_is_a_spec_with_its_values(client: TestClient, driver: Driver) -> None:
    driver.submit(search={"axes": {"precision": ["fp32", "bf16"]}}, seeds=[3])
    answer = client.get(f"{API}/runs/2/config")
    assert answer.headers["content-type"] == "application/json"
    assert (answer.json()["precision"], answer.json()["seeds"]) == ("bf16", [3])
    assert isinstance(validate(answer.json()), ExperimentSpec)
    problem(client, "/runs/77/config", 404, "not-found")


def test_checkpoints_are_listed_newest_first_with_what_is_wrong(
    client: TestClient, driver: Driver, settings: Settings
) -> None:
    experiment = driver.submit()
    (run,) = driver.start(experiment)
    assert client.get(f"{API}/runs/{run.id}/checkpoints").json() == {"items": []}
    folder = checkpoints_folder(settings, experiment.id, run.id)
    for attempt, step in ((1, 10), (1, 20), (2, 15)):
        save(folder, attempt, step)
    assert CheckpointStore(folder, 9).mark_best(manifest.CheckpointId(1, 20), "accuracy", 0.9)
    (manifest.CheckpointId(1, 10).path(folder) / "weights").write_bytes(b"short")
    found = client.get(f"{API}/runs/{run.id}/checkpoints").json()["items"]
    assert [(one["attempt"], one["step"], one["best"]) for one in found] == [
        (2, 15, False), (1, 20, True), (1, 10, False),
    ]  # fmt: skip
    assert [one["size_bytes"] for one in found] == [15, 20, 10]
    assert [one["problem"] for one in found] == [None, None, "weights has 5 bytes, the manifest says 10"]


def test_a_model_card_needs_a_checkpoint(client: TestClient, driver: Driver) -> None:
    (run,) = driver.start(driver.submit())
    body = problem(client, f"/runs/{run.id}/model-card", 409, "no-model")
    assert body["detail"] == f"run {run.id} is running and has saved no checkpoint yet"


def test_a_log_is_read_from_its_end_and_searched(client: TestClient, driver: Driver) -> None:
    (run,) = driver.start(driver.submit())
    words = ["starting", "loss 0.9", "50% done", "Loss is nan", "done_"]
    lines = [LogLine(run.id, 1, number, 1.0, "info", word) for number, word in enumerate(words, 1)]
    driver.store.recording.record(RecordBatch(logs=lines))

    def messages(**params: object) -> list[str]:
        answer = client.get(f"{API}/runs/{run.id}/logs", params=params)
        assert answer.status_code == 200, answer.text
        return [line["message"] for line in answer.json()["items"]]

    assert messages(before=2**62, limit=2) == ["Loss is nan", "done_"]
    fourth = client.get(f"{API}/runs/{run.id}/logs").json()["items"][3]["cursor"]
    assert messages(before=fourth, limit=2) == ["loss 0.9", "50% done"]
    assert messages(contains="LOSS") == ["loss 0.9", "Loss is nan"]
    assert messages(contains="0%") == ["50% done"]
    assert messages(contains="e_") == ["done_"]
    assert messages(contains="e\0") == []
    assert messages(contains="loss", before=fourth) == ["loss 0.9"]


def test_held_devices_name_their_run_where_it_may_be_seen(client: TestClient, driver: Driver) -> None:
    assert client.get(f"{API}/cluster/held").json() == {"items": []}
    experiment = driver.submit()
    (claimed,) = driver.queue.claim("scheduler", lease_s=60.0)
    driver.store.drivers.started(claimed.id, claimed.attempt, "here", 1)
    held = Placement("g", "cpu", 1, 2, 0.1, 10.0, time.time(), None, None, time.time())
    driver.store.drivers.record_placements(experiment.id, 1, [held])
    (free,) = client.get(f"{API}/cluster/held").json()["items"]
    assert (free["devices"], free["run_id"], free["experiment"]["owner"]) == (2, None, "ada")
    assert free["pool"] == "default"
    attempt = driver.store.attempts.open(1, 1, placement="g")
    facts = {"worker_node": "node-a"}
    driver.store.attempts.run_started(1, attempt, total_steps=9, resumed_from_step=0, facts=facts)
    (busy,) = client.get(f"{API}/cluster/held").json()["items"]
    assert (busy["run_id"], busy["node"], busy["experiment"]["id"]) == (1, "node-a", experiment.id)
    (hidden,) = driver.store.drivers.held_devices(limit=10, visible=Visibility(frozenset()))
    assert (hidden.run_id, hidden.experiment, hidden.devices) == (None, None, 2)


def test_examples_are_valid_specs_with_a_question(client: TestClient) -> None:
    found = client.get(f"{API}/examples").json()["items"]
    assert examples_folder() is not None
    assert [one["name"] for one in found] == [one.name for one in examples()]
    by_name = {one["name"]: one for one in found}
    question = "Does bf16, or a larger batch, make this small BERT cheaper without losing accuracy?"
    assert by_name["demo"]["title"] == question
    assert all(one["title"] and "\n" not in one["title"] for one in found)
    assert client.post(f"{API}/specs/validate", content=by_name["demo"]["text"]).status_code == 422


def test_a_log_is_read_by_stream(client: TestClient, driver: Driver) -> None:
    (run,) = driver.start(driver.submit())
    lines = [
        LogLine(run.id, 1, number, 1.0, "info", stream, stream)
        for number, stream in enumerate(("log", "stdout", "stderr"), 1)
    ]
    driver.store.recording.record(RecordBatch(logs=lines))
    for stream in ("log", "stdout", "stderr"):
        (line,) = client.get(f"{API}/runs/{run.id}/logs", params={"stream": stream}).json()["items"]
        assert (line["message"], line["stream"]) == (stream, stream)
    problem(client, f"/runs/{run.id}/logs", 422, "invalid-parameter", stream="both")


def test_changes_to_the_code_of_a_run_are_those_of_its_newest_attempt(
    client: TestClient, driver: Driver, settings: Settings
) -> None:
    experiment = driver.submit()
    (run,) = driver.start(experiment)
    assert client.get(f"{API}/runs/{run.id}/patch").content == b""
    folder = checkpoints_folder(settings, experiment.id, run.id)
    for attempt in (1, 2):
        own = manifest.attempt_folder(folder, attempt)
        own.mkdir(parents=True)
        (own / manifest.PATCH).write_bytes(f"+attempt {attempt}\n".encode())
    answer = client.get(f"{API}/runs/{run.id}/patch")
    assert (answer.content, answer.headers["content-type"]) == (b"+attempt 2\n", "text/x-diff; charset=utf-8")
    assert f"run-{run.id}.patch" in answer.headers["content-disposition"]


def test_histograms_of_all_attempts_are_one_list(
    client: TestClient, driver: Driver, settings: Settings
) -> None:
    experiment = driver.submit()
    (run,) = driver.start(experiment)
    assert client.get(f"{API}/runs/{run.id}/histograms").json() == []

    def line(step: int, most: float) -> str:
        return json.dumps(
            {"step": step, "layers": {"a": {"weights": [most, [1]], "gradients": {}}}}, separators=(",", ":")
        )

    folder = checkpoints_folder(settings, experiment.id, run.id)
    for attempt, lines in ((1, [line(1, 1.0), line(5, 1.0)]), (2, [line(5, 2.0), line(9, 2.0)[:-9]])):
        own = manifest.attempt_folder(folder, attempt)
        own.mkdir(parents=True)
        (own / manifest.HISTOGRAMS).write_text("\n".join(lines))
    found = client.get(f"{API}/runs/{run.id}/histograms").json()
    assert [(one["step"], one["layers"]["a"]["weights"][0]) for one in found] == [(1, 1.0), (5, 2.0)]


def test_what_a_download_holds_open_is_closed_when_its_client_has_gone() -> None:
    closed = []

    def chunks() -> Generator[bytes]:
        try:
            while True:
                yield b"weights"
        finally:
            closed.append(True)

    async def nothing() -> MutableMapping[str, Any]:
        return {"type": "http.request"}

    async def gone(message: MutableMapping[str, Any]) -> None:
        if message.get("body"):
            raise OSError("the connection was closed")

    download = Download(chunks(), "application/x-tar", "model.tar")
    held = download.body_iterator  # As a traceback may hold it.
    with pytest.raises(ClientDisconnect):
        asyncio.run(download({"type": "http", "asgi": {"spec_version": "2.4"}}, nothing, gone))
    assert closed and held is not None
