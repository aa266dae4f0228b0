"""Lists, records, series and exports over HTTP."""

from __future__ import annotations

import csv
import difflib
import io
import json
from typing import Any

import pyarrow.parquet
import pytest
from fastapi.testclient import TestClient

from api.export import guarded
from service.config.document import MAX_PROBLEMS, MAX_SUGGESTIONS
from service.domain.records import LogLine, MeasurementRow
from service.domain.states import RunState
from service.store import RecordBatch, Store
from tests.api.conftest import SPEC, Driver

API = "/api/v1"


def problem(client: TestClient, path: str, status: int, type: str, **params: Any) -> dict[str, Any]:
    answer = client.get(f"{API}{path}", params=params)
    body: dict[str, Any] = answer.json()
    assert (answer.status_code, body["type"]) == (status, f"/problems/{type}"), answer.text
    return body


@pytest.fixture
def grid(client: TestClient) -> list[dict[str, Any]]:
    """Four runs of one experiment."""
    assert client.post(f"{API}/experiments", content=SPEC).status_code == 201
    runs: list[dict[str, Any]] = client.get(f"{API}/experiments/1/runs").json()["items"]
    return runs


def test_pages_join_to_the_whole_list(client: TestClient) -> None:
    for number in range(7):
        client.post(f"{API}/experiments", content=SPEC.replace("by-seed", f"n{number}"))
    seen, token = [], None
    while True:
        page = client.get(
            f"{API}/experiments", params={"page_size": 3, **({"page_token": token} if token else {})}
        ).json()
        seen += [item["id"] for item in page["items"]]
        if (token := page["next_page_token"]) is None:
            break
    assert seen == [7, 6, 5, 4, 3, 2, 1]
    assert page["items"][0]["run_states"] == {"queued": 4}


def test_costs_are_listed_on_request(client: TestClient, driver: Driver) -> None:
    experiment = driver.submit()
    driver.start(experiment)
    listed = [client.get("/api/v1/experiments", params=asked).json() for asked in ({}, {"costs": True})]
    without, with_costs = (page["items"][0]["cost"] for page in listed)
    assert without is None
    assert with_costs["so_far_usd"] > 0.0
    assert with_costs["rest_usd"] is None, "no step is made yet"


def test_runs_are_filtered_and_ordered(client: TestClient, grid: list[dict[str, Any]]) -> None:
    params = {"filter": "precision = 'bf16' and axis.precision = 'bf16'", "order_by": "seed desc"}
    runs = client.get(f"{API}/runs", params=params).json()["items"]
    assert [(run["precision"], run["seed"]) for run in runs] == [("bf16", 1), ("bf16", 0)]


def test_bad_filter_names_position_and_nearest_field(client: TestClient) -> None:
    body = problem(client, "/runs", 400, "invalid-filter", filter="seed = 1 and precison = 'fp16'")
    assert "position 14" in body["detail"]
    assert "precision" in body["detail"]
    problem(client, "/experiments", 400, "invalid-filter", order_by="nome")
    problem(client, "/runs/export", 400, "invalid-filter", filter="seed = ")


def test_bad_page_tokens_and_sizes_are_refused(client: TestClient, grid: list[dict[str, Any]]) -> None:
    problem(client, "/runs", 400, "invalid-page-token", page_token="nonsense")
    token = client.get(f"{API}/runs", params={"page_size": 1}).json()["next_page_token"]
    problem(client, "/runs", 400, "invalid-page-token", page_token=token, order_by="seed")
    problem(client, "/runs", 422, "invalid-parameter", page_size=0)
    problem(client, "/runs", 422, "invalid-parameter", page_size=1001)


def test_unknown_parameters_are_refused_by_name(client: TestClient) -> None:
    body = problem(client, "/runs", 422, "invalid-parameter", filtr="seed = 1")
    assert body["errors"] == [
        {"type": "unknown-key", "path": "query.filtr", "message": "unknown parameter; did you mean 'filter'?"}
    ]


def test_many_unknown_parameters_are_neither_all_compared_nor_all_listed(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda word, *_, **__: compared.append(word) or [])
    answer = client.get("/api/v1/runs", params=dict.fromkeys(map(str, range(2000)), "x"))
    assert (answer.status_code, len(answer.json()["errors"])) == (422, MAX_PROBLEMS)
    assert len(compared) == MAX_SUGGESTIONS


@pytest.mark.parametrize(
    "path",
    [
        "/experiments/9", "/experiments/9/runs", "/experiments/9/events", "/experiments/9/spec",
        "/experiments/9/stream", "/experiments/9/export", "/runs/9", "/runs/9/points", "/runs/9/logs",
        "/runs/9/summary", "/runs/9/attempts", "/runs/9/measurements", "/runs/9/stream",
    ],
)  # fmt: skip
def test_what_does_not_exist_is_404(client: TestClient, path: str) -> None:
    assert "9" in problem(client, path, 404, "not-found")["detail"]


def test_ids_beyond_64_bits_are_refused(client: TestClient) -> None:
    problem(client, f"/runs/{2**63}", 422, "invalid-parameter")
    problem(client, "/runs/0", 422, "invalid-parameter")
    problem(client, "/runs/one", 422, "invalid-parameter")


def test_unknown_paths_and_methods_are_problems(client: TestClient) -> None:
    problem(client, "/nope", 404, "not-found")
    answer = client.patch(f"{API}/runs/1/points")
    assert (answer.status_code, answer.json()["type"]) == (405, "/problems/method-not-allowed")
    assert answer.headers["allow"] == "GET, HEAD"


def test_points_come_as_columns_with_words_for_what_json_lacks(client: TestClient, driver: Driver) -> None:
    (run,) = driver.start(driver.submit())
    driver.report(run, "loss", [1, 2, 3], [0.5, float("nan"), float("inf")])
    driver.report(run, "accuracy", [3], [0.75])
    series = client.get(f"{API}/runs/{run.id}/points").json()["series"]
    assert series["loss"]["steps"] == [1, 2, 3]
    assert series["loss"]["values"] == [0.5, "NaN", "Infinity"]
    assert series["loss"]["attempts"] == [1, 1, 1]
    assert list(series) == ["accuracy", "loss"]
    some = client.get(f"{API}/runs/{run.id}/points", params={"name": "loss", "min_step": 2, "max_step": 2})
    assert some.json()["series"]["loss"]["steps"] == [2]


def test_points_are_thinned(client: TestClient, driver: Driver) -> None:
    (run,) = driver.start(driver.submit())
    values = [1.0] * 500 + [-5.0] + [1.0] * 498 + [9.0]
    driver.report(run, "loss", list(range(1, 1001)), values)
    series = client.get(f"{API}/runs/{run.id}/points", params={"max_points": 20}).json()["series"]["loss"]
    assert len(series["steps"]) <= 24
    assert {-5.0, 9.0} <= set(series["values"])
    problem(client, f"/runs/{run.id}/points", 422, "invalid-parameter", max_points=1)


def test_long_series_are_bounded_and_say_so(client: TestClient, driver: Driver) -> None:
    (run,) = driver.start(driver.submit())
    driver.report(run, "loss", list(range(3_000)), [1.0] * 3_000)
    series = client.get(f"{API}/runs/{run.id}/points").json()["series"]["loss"]
    assert len(series["steps"]) <= 1_002
    assert series["bucket_steps"] == 7
    assert (
        client.get(f"{API}/runs/{run.id}/points?min_step=2990").json()["series"]["loss"]["bucket_steps"]
        is None
    )


def test_exact_points_come_in_pages(client: TestClient, driver: Driver) -> None:
    (run,) = driver.start(driver.submit())
    driver.report(run, "loss", list(range(3_000)), [1.0] * 3_000)
    steps: list[int] = []
    place: int | None = 0
    while place is not None:
        params = {"name": "loss", "exact": True, "min_step": place, "max_points": 1_000}
        page = client.get(f"{API}/runs/{run.id}/points", params=params).json()
        steps += page["series"]["loss"]["steps"]
        place = page["next_step"]
    assert steps == list(range(3_000))
    problem(client, f"/runs/{run.id}/points", 422, "invalid-parameter", exact=True)


def test_run_with_all_that_it_reported(client: TestClient, driver: Driver, store: Store) -> None:
    experiment = driver.submit()
    (run,) = driver.start(experiment)
    store.recording.record(
        RecordBatch(
            logs=[LogLine(run.id, 1, number, 1.0, "info", f"line {number}") for number in (1, 2, 3)],
            measurements=[
                MeasurementRow(run.id, 1, "energy", float("nan"), "J", "modelled", "run", 0.0, 1.0)
            ],
        )
    )
    lines = client.get(f"{API}/runs/{run.id}/logs", params={"limit": 2}).json()["items"]
    assert [line["message"] for line in lines] == ["line 1", "line 2"]
    rest = client.get(f"{API}/runs/{run.id}/logs", params={"after": lines[-1]["cursor"]}).json()["items"]
    assert [line["message"] for line in rest] == ["line 3"]
    (measurement,) = client.get(f"{API}/runs/{run.id}/measurements").json()["items"]
    assert (measurement["value"], measurement["unit"]) == ("NaN", "J")
    driver.finish(experiment, [run])
    assert client.get(f"{API}/runs/{run.id}").json()["state"] == "succeeded"
    assert client.get(f"{API}/runs/{run.id}/summary").json()["values"]["accuracy"] == 0.9
    (attempt,) = client.get(f"{API}/runs/{run.id}/attempts").json()["items"]
    assert (attempt["number"], attempt["state"]) == (1, "succeeded")
    detail = client.get(f"{API}/experiments/{experiment.id}").json()
    assert (detail["state"], detail["waiting"]) == ("succeeded", None)
    assert detail["totals"]["device_hours"] >= 0
    kinds = [
        event["kind"] for event in client.get(f"{API}/experiments/{experiment.id}/events").json()["items"]
    ]
    assert kinds[0] == "experiment.submitted"
    after = client.get(f"{API}/experiments/{experiment.id}/events", params={"after": 1, "limit": 1}).json()
    assert [event["number"] for event in after["items"]] == [2]


def test_managing_moves_states_and_refuses_what_does_not_apply(
    client: TestClient, grid: list[dict[str, Any]]
) -> None:
    place = f"{API}/experiments/1"
    assert client.post(f"{place}/pause").json()["state"] == "paused"
    assert client.post(f"{place}/resume").json()["state"] == "queued"
    assert client.put(f"{place}/priority", json={"priority": 90}).json()["priority"] == 90
    assert client.delete(place).json()["type"] == "/problems/conflict"
    cancelled = client.post(f"{API}/runs/{grid[0]['id']}/cancel").json()
    assert cancelled["state"] == "cancelled"
    assert client.post(f"{API}/runs/{grid[0]['id']}/retry").json()["state"] == "queued"
    assert client.post(f"{API}/runs/{grid[0]['id']}/retry").status_code == 409
    assert client.post(f"{place}/cancel").json()["state"] == "cancelled"
    assert client.post(f"{place}/cancel").status_code == 200, "cancel on what has ended is no error"
    assert client.post(f"{place}/resume").status_code == 409
    assert client.post(f"{place}/retry").json()["state"] == "queued"
    assert client.post(f"{place}/cancel").json()["run_states"] == {"cancelled": 4}
    answer = client.delete(place)
    assert (answer.status_code, answer.content) == (204, b"")
    assert client.get(place).status_code == 404


@pytest.mark.parametrize(
    "body", ['{"priority": 101}', '{"priority": "9"}', "{", "[]", '{"priority": 1, "x": 2}']
)
def test_bad_priority_is_refused(client: TestClient, grid: list[dict[str, Any]], body: str) -> None:
    answer = client.put(
        f"{API}/experiments/1/priority", content=body, headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-body")
    assert answer.json()["errors"][0]["path"].startswith("body")


def test_the_queue_comes_in_pages(client: TestClient, driver: Driver) -> None:
    ids = [driver.submit(name=f"waits {number}").id for number in range(5)]
    first = client.get(f"{API}/queue", params={"page_size": 3}).json()
    assert [entry["experiment"]["id"] for entry in first["items"]] == ids[:3]
    token = first["next_page_token"]
    second = client.get(f"{API}/queue", params={"page_size": 3, "page_token": token}).json()
    assert [entry["experiment"]["id"] for entry in second["items"]] == ids[3:]
    assert [entry["position"] for entry in second["items"]] == [4, 5]
    assert (first["total"], second["total"], second["next_page_token"]) == (5, 5, None)
    problem(client, "/queue", 400, "invalid-page-token", page_token="of-another-list")


def test_queue_says_why_each_waits(client: TestClient, grid: list[dict[str, Any]], driver: Driver) -> None:
    (entry,) = client.get(f"{API}/queue").json()["items"]
    assert (entry["position"], entry["experiment"]["id"]) == (1, 1)
    assert "no scheduler is running" in entry["reason"]
    driver.queue.heartbeat("s1", node="here", pid=1)
    answer = client.get(f"{API}/queue").json()
    assert answer["schedulers_alive"] == ["s1"]
    assert client.get(f"{API}/experiments/1").json()["waiting"]["reason"] == answer["items"][0]["reason"]


def test_hardware_and_schema(client: TestClient) -> None:
    entries = {entry["name"]: entry for entry in client.get(f"{API}/hardware").json()["items"]}
    assert {"cpu", "V100-SXM2-16GB", "A100-PCIE-80GB"} <= set(entries)
    assert entries["A100-PCIE-80GB"]["aliases"] == ["A100"]
    assert "data sheet" in entries["A10G"]["source"]
    assert (entries["cpu"]["source"], entries["cpu"]["without_data_sheet"]) == (None, ["tdp_w"])
    schema = client.get(f"{API}/spec.schema.json").json()
    assert schema["$schema"].endswith("2020-12/schema")
    assert not client.get(f"{API}/cluster").json()["reachable"]


def test_csv_has_a_column_per_axis(client: TestClient, grid: list[dict[str, Any]]) -> None:
    answer = client.get(f"{API}/experiments/1/export")
    assert answer.headers["content-disposition"] == 'attachment; filename="experiment-1.csv"'
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["axis.precision"] for row in rows] == ["fp32", "fp32", "bf16", "bf16"]
    assert rows[0]["accuracy"] == ""


@pytest.mark.parametrize("path", ["/experiments/1/export", "/runs/export"])
@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet"])
def test_an_export_has_each_figure_by_the_name_that_comparisons_have(
    client: TestClient, driver: Driver, path: str, format: str
) -> None:
    experiment = driver.submit(
        seeds=[0, 1], search={"together": [{"optimizer.eps": [1e-8], "batch.global_size": [8]}]}
    )
    for run, score in zip(driver.start(experiment), (0.75, None), strict=True):
        figures = {"accuracy": 0.9} | ({} if score is None else {"test_accuracy": score})
        driver.store.attempts.finish_run(run.id, run.attempt, RunState.succeeded, summary=figures)
    answer = client.get(API + path, params={"format": format, "order_by": "seed"})
    if format == "csv":
        rows = list(csv.DictReader(io.StringIO(answer.text)))
        assert [row["test_accuracy"] for row in rows] == ["0.75", ""]
    else:
        lines = map(json.loads, answer.text.splitlines()) if format == "jsonl" else None
        rows = list(lines or pyarrow.parquet.read_table(io.BytesIO(answer.content)).to_pylist())
        assert [row["test_accuracy"] for row in rows] == [0.75, None]
    assert ("axis.optimizer.eps+batch.global_size" in rows[0]) == (path != "/runs/export")
    assert list(rows[0]).count("accuracy") == 1
    only = client.get(API + path, params={"filter": "test_accuracy < 0.5"}).text
    assert "test_accuracy" not in only
    assert len(only.splitlines()) == 1


def test_a_misspelt_column_is_answered_with_the_name_that_other_places_have(client: TestClient) -> None:
    for text, meant in {
        "test_acuracy > 0.5": "'test_accuracy'",
        "batch.size = 16": "'batch.global_size'",
        "lr < 1": "'optimizer.learning_rate'",
        "val_loss < 1": "'validation_loss'",
    }.items():
        body = problem(client, "/runs", 400, "invalid-filter", filter=text)
        assert f"did you mean {meant}?" in body["detail"]
    body = problem(client, "/runs", 400, "invalid-filter", order_by="test_acuracy")
    assert "did you mean 'test_accuracy'?" in body["detail"]


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx"])
def test_csv_cells_that_spreadsheets_would_run_are_guarded(cell: str) -> None:
    assert guarded(cell) == "'" + cell


def test_csv_numbers_stay_numbers() -> None:
    assert guarded(-0.5) == -0.5
    assert guarded(float("-inf")) == "-Infinity"


def test_json_lines_and_parquet_hold_the_same_rows(client: TestClient, driver: Driver) -> None:
    experiment = driver.submit(seeds=list(range(5)), search={"axes": {"optimizer.eps": [1e-8, 1e-6]}})
    driver.finish(experiment, driver.start(experiment))
    params = {"filter": "seed < 3"}
    lines = [
        json.loads(line)
        for line in client.get(
            f"{API}/experiments/1/export", params={**params, "format": "jsonl"}
        ).text.splitlines()
    ]
    table = pyarrow.parquet.read_table(
        io.BytesIO(client.get(f"{API}/experiments/1/export", params={**params, "format": "parquet"}).content)
    )
    assert len(lines) == 6
    assert [row["seed"] for row in lines] == table.column("seed").to_pylist()
    assert table.column("accuracy").to_pylist() == [0.9] * 6
    assert table.column("axis.optimizer.eps").to_pylist()[:1] == ["1e-08"]
    every = client.get(f"{API}/runs/export", params={"format": "jsonl"}).text.splitlines()
    assert json.loads(json.loads(every[0])["point"]).keys() == {"optimizer.eps"}


@pytest.mark.parametrize("repeats", [1, 2])
def test_repeats_are_a_column_of_an_export_where_there_are_any(
    client: TestClient, driver: Driver, repeats: int
) -> None:
    driver.submit(seeds=[3, 4], repeats=repeats)
    lines = client.get(f"{API}/experiments/1/export", params={"format": "jsonl"}).text.splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["seed"] for row in rows] == [3, 4] * repeats
    assert [row.get("repeat") for row in rows] == ([None] * 2 if repeats == 1 else [0, 0, 1, 1])
    runs = client.get(f"{API}/experiments/1/runs", params={"filter": "repeat = 0"}).json()["items"]
    assert [run["repeat"] for run in runs] == [0, 0]


def test_an_empty_export_is_a_table_without_rows(client: TestClient) -> None:
    content = client.get(f"{API}/runs/export", params={"format": "parquet"}).content
    assert pyarrow.parquet.read_table(io.BytesIO(content)).num_rows == 0
    assert client.get(f"{API}/runs/export").text.startswith("id,experiment_id,index")
