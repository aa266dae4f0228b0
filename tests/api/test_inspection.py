"""Data over HTTP: files that are sent, datasets below a root, and forecasts before any run has read them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from fastapi.testclient import TestClient
from pyarrow import parquet

from api.app import create_app
from service.config.examples import keep_demo_texts
from service.config.settings import Settings
from service.output import bounded
from service.output.bounded import BoundedProcess, Unanswerable
from service.specs.experiment import validate
from tests.api.conftest import BASE_URL, SPEC

INSPECT = "/api/v1/data/inspect"
ROWS = {"text": [f"tea number {n}" for n in range(12)], "label": ["good", "bad"] * 6}


def sent(client: TestClient, name: str, content: bytes) -> Any:
    headers = {"Content-Type": "application/octet-stream"}
    return client.post(INSPECT, params={"name": name}, content=content, headers=headers)


def as_parquet() -> bytes:
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table(ROWS), stream)
    return stream.getvalue()


CSV = "text,label\n" + "".join(f"{text},{label}\n" for text, label in zip(*ROWS.values(), strict=True))


@pytest.mark.parametrize(("name", "content"), [("my rows.csv", CSV.encode()), ("rows.parquet", as_parquet())])
def test_a_file_is_inspected_and_drafted(client: TestClient, name: str, content: bytes) -> None:
    import yaml

    found = sent(client, name, content).json()
    assert found["columns"] == {"text": "text", "label": "label"}
    assert found["parts"]["train"]["labels"] == {"label": {"good": 6, "bad": 6}}
    spec = validate(yaml.safe_load(found["spec"]))
    assert (spec.task.name, spec.task.path) == ("classification", name)
    assert found["tasks"][0]["path"] == name, "not where the server kept it"


def test_what_no_task_reads_says_why_without_a_folder_of_the_server(client: TestClient) -> None:
    found = sent(client, "rows.parquet", b"PAR1").json()
    assert (found["spec"], found["tasks"]) == (None, [])
    assert found["refused"]["classification"].startswith("rows.parquet: not a Parquet file")


@pytest.mark.parametrize("name", ["../rows.csv", "rows.xlsx", "rows", ".csv"])
def test_other_names_are_refused(client: TestClient, name: str) -> None:
    assert sent(client, name, b"x").status_code == 422


def test_a_dataset_of_a_root_is_inspected_and_others_are_refused(
    client: TestClient, settings: Settings, tmp_path: Path
) -> None:
    found = client.post(INSPECT, params={"path": "texts"}).json()
    assert found["parts"]["train"]["rows"] == 16
    assert "path: texts\n" in found["spec"]
    assert client.post(INSPECT, params={"path": "../"}).json()["type"] == "/problems/unanswerable"
    for nothing in ({}, {"path": "."}):
        assert client.post(INSPECT, params=nothing).json()["type"] == "/problems/invalid-parameter"
    outside = tmp_path.parent / f"{tmp_path.name}-outside.jsonl"
    outside.write_text('{"text": "secret", "label": 1}\n')
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "train.jsonl").symlink_to(outside)
    refused = client.post(INSPECT, params={"path": "linked"})
    assert "a link that leads out of the data roots" in refused.json()["detail"]


def test_data_that_no_run_has_read_are_counted_for_the_forecast(client: TestClient) -> None:
    spec = SPEC.replace("{name: tiny}", "{name: tiny}\nlength: {epochs: 2}")
    forecast = client.post("/api/v1/specs/preview", content=spec).json()["forecast"]
    assert (forecast["runs"], forecast["unknown"]) == (4, [])
    assert forecast["cost_usd"]["low"] > 0


def test_the_pages_first_draft_is_valid_where_there_are_no_other_data(
    settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    bare = settings.model_copy(update={"data_roots": str(tmp_path / "empty")})
    keep_demo_texts(bare)
    with TestClient(create_app(bare), base_url=BASE_URL) as client:
        drafts = {one["name"]: one["text"] for one in client.get("/api/v1/examples").json()["items"]}
        assert client.post("/api/v1/specs/validate", content=drafts["demo"]).status_code == 200
        forecast = client.post("/api/v1/specs/preview", content=drafts["demo"]).json()["forecast"]
    assert forecast["runs"] == 8


@pytest.fixture
def process() -> Iterator[BoundedProcess]:
    found = BoundedProcess()
    yield found
    found.close()


def test_what_takes_too_long_ends_the_process_and_the_next_job_gets_another(
    process: BoundedProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text(CSV)
    monkeypatch.setattr(bounded, "LONGEST_S", 0.0)
    with pytest.raises(Unanswerable, match="took more than"):
        process.ask("inspect", path=tmp_path, roots=[tmp_path])
    monkeypatch.setattr(bounded, "LONGEST_S", 600.0)
    assert process.ask("inspect", path=tmp_path, roots=[tmp_path])["spec"]


def test_an_idle_process_ends(
    process: BoundedProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text(CSV)
    monkeypatch.setattr(bounded, "IDLE_S", 0.0)
    process.ask("inspect", path=tmp_path, roots=[tmp_path])
    assert process._end is not None
    process._end.join()
    assert process._process is None


def test_the_process_sees_no_secrets(
    process: BoundedProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STILLHOUSE_TOKEN", "a secret")
    (tmp_path / "rows.csv").write_text(CSV)
    process.ask("inspect", path=tmp_path, roots=[tmp_path])
    assert process._process is not None
    environment = Path(f"/proc/{process._process.pid}/environ").read_bytes()
    assert b"STILLHOUSE_TOKEN" not in environment
