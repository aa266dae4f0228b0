"""Submission over HTTP: one test per outcome."""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api import intake
from api.access import Caller
from api.intake import HEAVY_AT_A_TIME
from api.routes import specs
from service.config.document import MAX_PROBLEMS, MAX_SUGGESTIONS, parse, refusal
from service.config.hardware import Hardware
from service.config.settings import Settings
from service.db.errors import StoreFull
from service.domain.access import local
from service.domain.records import Experiment
from service.scheduling import admission
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.queue import Queue
from service.specs.experiment import ExperimentSpec, validate
from service.specs.models import workspace_of
from service.store import Store, StoreUnavailable, UnusableDatabase
from tests.api.conftest import SPEC, Driver, wait_until
from trainers.data.synthetic import write_corpus
from trainers.entrypoint import input_identity
from trainers.models.origin import Preset
from trainers.tasks import inspection

BERT_CONFIG = json.dumps(Preset("mini").config(100))  # four layers
EXPERIMENTS = "/api/v1/experiments"
ADA = Caller(local("ada"), "ada")


def refused(client: TestClient, text: str | bytes, type: str, status: int = 422) -> dict[str, Any]:
    answer = client.post(EXPERIMENTS, content=text)
    problem: dict[str, Any] = answer.json()
    assert (answer.status_code, problem["type"]) == (status, f"/problems/{type}"), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert "\n" not in problem["detail"]
    assert client.get(EXPERIMENTS).json()["items"] == [], "nothing is half-stored"
    return problem


def test_spec_is_stored_with_its_runs(client: TestClient) -> None:
    answer = client.post(EXPERIMENTS, content=SPEC)
    assert answer.status_code == 201
    assert answer.headers["location"] == f"{EXPERIMENTS}/1"
    assert "idempotent-replayed" not in answer.headers
    body = answer.json()
    assert (body["run_count"], body["run_states"]) == (4, {"queued": 4})
    runs = client.get(f"{EXPERIMENTS}/1/runs").json()["items"]
    assert [(run["point"], run["seed"]) for run in runs] == [
        ({"precision": "fp32"}, 0),
        ({"precision": "fp32"}, 1),
        ({"precision": "bf16"}, 0),
        ({"precision": "bf16"}, 1),
    ]


def test_text_is_kept_verbatim(client: TestClient) -> None:
    text = SPEC + "# why: to see whether bf16 costs accuracy\n"
    client.post(EXPERIMENTS, content=text)
    answer = client.get(f"{EXPERIMENTS}/1/spec")
    assert answer.text == text
    assert answer.headers["content-type"].startswith("text/yaml")
    canonical = client.get(f"{EXPERIMENTS}/1/spec", params={"form": "canonical"}).json()
    assert canonical["optimizer"]["name"] == "adamw"


def test_json_is_a_spec_too(client: TestClient) -> None:
    document = {"name": "json", "task": {"name": "imdb", "path": "texts"}}
    assert client.post(EXPERIMENTS, json=document).status_code == 201


def test_same_key_and_body_replays(client: TestClient) -> None:
    headers = {"Idempotency-Key": "once"}
    first = client.post(EXPERIMENTS, content=SPEC, headers=headers)
    again = client.post(EXPERIMENTS, content=SPEC, headers=headers)
    assert again.status_code == 201
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["location"] == first.headers["location"]
    assert again.json() == first.json()
    assert len(client.get(EXPERIMENTS).json()["items"]) == 1


def test_same_key_with_another_body_is_refused(client: TestClient) -> None:
    headers = {"Idempotency-Key": "once"}
    client.post(EXPERIMENTS, content=SPEC, headers=headers)
    answer = client.post(EXPERIMENTS, content=SPEC + "max_restarts: 5\n", headers=headers)
    assert answer.status_code == 422
    assert answer.json()["type"] == "/problems/idempotency-mismatch"


@pytest.mark.parametrize("seeds", [2, 30], ids=["light", "heavy"])
def test_a_replay_is_not_validated_again(client: TestClient, tmp_path: Path, seeds: int) -> None:
    text = SPEC.replace("[0, 1]", str(list(range(seeds))))
    headers = {"Idempotency-Key": "once"}
    first = client.post(EXPERIMENTS, content=text, headers=headers)
    (tmp_path / "texts").rename(tmp_path / "moved")
    again = client.post(EXPERIMENTS, content=text, headers=headers)
    assert (again.status_code, again.headers["idempotent-replayed"]) == (201, "true")
    assert again.json() == first.json()
    other = client.post(EXPERIMENTS, content=text + "max_restarts: 5\n", headers=headers)
    assert other.json()["type"] == "/problems/idempotency-mismatch"
    assert client.post(EXPERIMENTS, content=text).json()["type"] == "/problems/path-not-found"


def test_the_key_of_a_deleted_experiment_is_not_free(client: TestClient) -> None:
    headers = {"Idempotency-Key": "once"}
    assert client.post(EXPERIMENTS, content=SPEC, headers=headers).status_code == 201
    client.post(f"{EXPERIMENTS}/1/cancel")
    assert client.delete(f"{EXPERIMENTS}/1").status_code == 204
    again = client.post(EXPERIMENTS, content=SPEC, headers=headers)
    assert (again.status_code, again.json()["type"]) == (409, "/problems/conflict")
    assert "which has been deleted; use a new key" in again.json()["detail"]


def test_a_submission_that_fails_unexpectedly_fails_alone(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_spec = intake.read_spec

    def read(text: bytes, catalogue: Mapping[str, Hardware]) -> ExperimentSpec:
        if text.startswith(b"#7"):
            raise ZeroDivisionError
        return read_spec(text, catalogue)

    async def submit_together() -> list[tuple[Experiment, bool] | BaseException]:
        submits = (app.state.intake.submit(f"#{n}\n{SPEC}".encode(), ADA, None) for n in range(20))
        return await asyncio.gather(*submits, return_exceptions=True)

    monkeypatch.setattr(intake, "read_spec", read)
    answers = asyncio.run(submit_together())
    assert [n for n, answer in enumerate(answers) if isinstance(answer, BaseException)] == [7]
    assert isinstance(answers[7], ZeroDivisionError)


def test_reads_do_not_wait_for_checks(
    app: FastAPI, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, more_than_the_pool = threading.Event(), 60

    def check(*_: object, **__: object) -> None:
        released.wait()
        raise refusal("not-yaml", "checked")

    monkeypatch.setattr(specs, "admit", check)
    with ThreadPoolExecutor(more_than_the_pool) as pool:
        url = f"{http.base_url}/api/v1/specs/validate"
        asked = [pool.submit(httpx.post, url, content=SPEC, timeout=60.0) for _ in range(more_than_the_pool)]
        waiting = app.state.intake.checks._heavy._work_queue
        wait_until(lambda: waiting.qsize() == more_than_the_pool - HEAVY_AT_A_TIME)
        try:
            assert http.get(EXPERIMENTS).json()["items"] == []
            assert http.post(EXPERIMENTS, content=SPEC).status_code == 201
        finally:
            released.set()
    assert {one.result().status_code for one in asked} == {422}


def test_unknown_key_names_the_nearest(client: TestClient) -> None:
    problem = refused(client, SPEC + "precison: fp16\n", "unknown-key")
    assert problem["errors"] == [
        {"type": "unknown-key", "path": "precison", "message": "unknown key; did you mean 'precision'?"}
    ]


@pytest.mark.parametrize("place", ["", "search.axes."])
def test_many_unknown_names_are_neither_all_compared_nor_all_listed(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    compared: list[str] = []
    closest = difflib.get_close_matches

    def count(word: str, *rest: Any, **named: Any) -> list[str]:
        compared.append(word)
        return closest(word, *rest, **named)

    monkeypatch.setattr(difflib, "get_close_matches", count)
    names = {f"optimizer.lerning_rate_{'x' * 100}{number}": [1] for number in range(2000)}
    extra = {"search": {"axes": names}} if place else names
    document = {"name": "many", "task": {"name": "imdb", "path": "texts"}, **extra}
    problem = refused(client, json.dumps(document), "unknown-axis" if place else "unknown-key")
    assert len(problem["errors"]) == MAX_PROBLEMS
    assert problem["detail"].endswith(f"(and at least {MAX_PROBLEMS} more)")
    assert len(compared) == MAX_SUGGESTIONS
    assert max(map(len, compared)) <= 64
    assert problem["errors"][-1]["message"].endswith("`stillhouse schema` lists the known ones")


def test_a_grid_that_takes_too_long_to_check_is_given_up(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "CHECK_LIMIT_S", -1.0)
    problem = refused(client, SPEC, "check-too-long")
    assert "list fewer values" in problem["detail"]
    for path in ("validate", "preview"):
        answer = client.post(f"/api/v1/specs/{path}", content=SPEC)
        assert answer.json()["type"] == "/problems/check-too-long"


def test_several_kinds_of_errors_are_all_listed(client: TestClient) -> None:
    problem = refused(client, SPEC + "precison: fp16\nmax_restarts: many\n", "invalid-spec")
    assert {error["type"] for error in problem["errors"]} == {"unknown-key", "wrong-type"}
    assert problem["detail"].endswith("(and 1 more)")


@pytest.mark.parametrize(
    ("text", "type"),
    [
        (b"", "not-a-mapping"),
        (b"[1, 2]", "not-a-mapping"),
        (b"name: [", "not-yaml"),
        (b"name: \xff", "not-utf-8"),
        (b"a: &x 1\nb: *x", "yaml-alias"),
        (b"a: " + b"[" * 40 + b"]" * 40, "too-deep"),
        (b"name: a", "missing-field"),
        (SPEC.replace("[fp32, bf16]", "[]").encode(), "invalid-value"),
        (SPEC.replace("precision:", "precission:").encode(), "unknown-axis"),
        (SPEC.encode() + b"hardware: Z80\n", "unknown-hardware"),
        (SPEC.replace("[fp32, bf16]", "[fp32, bf16], seed: [1]").encode(), "unknown-axis"),
        (SPEC.replace("[0, 1]", str(list(range(6000)))).encode(), "grid-too-large"),
        (SPEC.encode() + b"optimizer: {learning_rate: .nan}\n", "not-finite"),
        (SPEC.encode() + b"max_restarts: 1e400\n", "wrong-type"),
        (b"{[a]: b}", "not-yaml"),
        (b"? [a, b]\n: 1", "not-yaml"),
        (b"{{}: b}", "not-yaml"),
        (SPEC.encode() + b"max_restarts: !!int ''\n", "not-yaml"),
        (SPEC.encode() + b"reuse: !!bool foo\n", "not-yaml"),
        (SPEC.encode() + b"description: !!timestamp foo\n", "not-yaml"),
        (SPEC.encode() + b"queue: !!set [a]\n", "not-yaml"),
        (SPEC.encode() + b"queue: !!map [a]\n", "not-yaml"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_text_is_refused_in_one_line(client: TestClient, text: bytes, type: str) -> None:
    refused(client, text, type)


@pytest.mark.parametrize("description", ['"\\ud800"', '"\\0"', '"\\uffff"'])
def test_characters_that_databases_dislike_do_not_break_it(client: TestClient, description: str) -> None:
    answer = client.post(EXPERIMENTS, content=f"{SPEC}description: {description}\n")
    assert answer.status_code in (201, 422)


def test_emoji_in_json_are_kept(client: TestClient) -> None:
    document = {"name": "a", "task": {"name": "imdb", "path": "texts"}, "description": "\U0001f600\u0085"}
    for escaped in (True, False):
        answer = client.post(EXPERIMENTS, content=json.dumps(document, ensure_ascii=escaped))
        assert answer.status_code == 201
        stored = client.get(answer.headers["location"] + "/spec", params={"form": "canonical"})
        assert stored.json()["description"] == document["description"]


def test_too_many_values_are_too_large(client: TestClient) -> None:
    refused(client, SPEC + f"x: {[1] * 100_001}", "body-too-large", 413)


def test_path_outside_the_roots_is_refused(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    for path in ("/etc", "../..", "link/passwd"):
        problem = refused(client, SPEC.replace("path: texts", f"path: {path}"), "path-outside-roots")
        assert problem["errors"][0]["path"] == "task.path"


def test_path_that_does_not_exist_is_refused(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nothing.csv").touch()
    for path in ("nope", "empty", "nothing.csv", '"a\\0b"', "x" * 4000):
        refused(client, SPEC.replace("path: texts", f"path: {path}"), "path-not-found")


def test_a_pipe_is_not_a_dataset(client: TestClient, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    problem = refused(client, SPEC.replace("path: texts", "path: pipe"), "path-not-found")
    assert "neither a folder nor a file" in problem["detail"]


@pytest.mark.parametrize("field", ["task.path", "model.name", "model.teacher"])
@pytest.mark.parametrize("search", [{"name": "grid"}, {"name": "tpe", "samples": 2}])
@pytest.mark.parametrize("place", ["otherwise", "field"])
def test_a_path_is_checked_where_its_conditional_axis_is_left_out(
    client: TestClient, field: str, search: dict[str, Any], place: str
) -> None:
    conditional = {
        "axes": {"precision": ["fp32", "bf16"], field: ["hub:a/b"]},
        "when": {field: {"precision": ["bf16"]}},
        **({"otherwise": {field: "/etc"}} if place == "otherwise" else {}),
    }
    document: dict[str, Any] = {
        "name": "left out",
        "task": {"name": "imdb", "path": "texts"},
        "search": search | conditional,
    }
    if place == "field":
        section, name = field.split(".")
        document.setdefault(section, {})[name] = "/etc"
    problem = refused(client, json.dumps(document), "path-outside-roots")
    assert problem["errors"][0]["path"] == field


def test_paths_of_axes_are_checked_too(client: TestClient) -> None:
    text = SPEC.replace("precision: [fp32, bf16]", "model.name: [tiny, nowhere]")
    problem = refused(client, text, "path-not-found")
    assert "nowhere" in problem["detail"]


def test_model_folder_without_weights_is_refused(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    text = SPEC.replace("name: tiny", "name: model")
    refused(client, text, "model-without-weights")
    (tmp_path / "model" / "config.json").write_text("{}")
    refused(client, text, "model-without-weights")
    (tmp_path / "model" / "model.safetensors").touch()
    assert (
        "no tokenizer (tokenizer.json, vocab.txt, "
        in refused(client, text, "model-without-weights")["detail"]
    )
    (tmp_path / "model" / "tokenizer.json").touch()
    assert client.post(EXPERIMENTS, content=text).status_code == 201


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["pytorch_model.bin", "training_args.bin"], "but there is pytorch_model.bin"),
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            "2 parts (model-00001-of-",
        ),
    ],
)
def test_weights_of_another_format_are_answered_with_their_conversion(
    client: TestClient, tmp_path: Path, files: list[str], said: str
) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", *files):
        (tmp_path / "model" / name).write_text("{}")
    detail = refused(client, SPEC.replace("name: tiny", "name: model"), "model-without-weights")["detail"]
    assert said in detail
    assert ".save_pretrained(" in detail


def test_layers_that_the_student_does_not_have_are_refused(client: TestClient, tmp_path: Path) -> None:
    model = tmp_path / "bert"
    model.mkdir()
    (model / "config.json").write_text(BERT_CONFIG, encoding="utf-8")
    (model / "model.safetensors").write_bytes(b"x")
    (model / "tokenizer.json").write_bytes(b"{}")
    text = SPEC.replace("{name: tiny}", "{name: bert, layers: [0, 4]}")
    answer = client.post(EXPERIMENTS, content=text)
    assert answer.status_code == 422
    (problem,) = answer.json()["errors"]
    assert problem["message"] == "layer 4 does not exist: 'bert' has 4 layers; use 0 to 3"
    assert client.post(EXPERIMENTS, content=text.replace("4]", "3]")).status_code == 201


@pytest.mark.parametrize(
    "configuration",
    [
        "[" * 200_000,
        '{"num_hidden_layers": 1e999, "hidden_size": 256}',
        '{"num_hidden_layers": NaN, "hidden_size": 256}',
        '{"num_hidden_layers": [4], "hidden_size": 256}',
        "[4, 256]",
        BERT_CONFIG + " " * (1 << 20),
    ],
    ids=["nested", "infinite", "not a number", "a list", "no object", "large"],
)
def test_a_configuration_that_cannot_be_read_is_left_to_the_worker(
    client: TestClient, tmp_path: Path, configuration: str
) -> None:
    model = tmp_path / "bert"
    model.mkdir()
    (model / "config.json").write_text(configuration, encoding="utf-8")
    (model / "model.safetensors").write_bytes(b"x")
    (model / "tokenizer.json").write_bytes(b"{}")
    text = SPEC.replace("{name: tiny}", "{name: bert, layers: [0, 4]}") + "budget: {hours: 1000}\n"
    assert client.post(EXPERIMENTS, content=text).status_code == 201
    assert client.post("/api/v1/specs/preview", content=text).status_code == 200


def test_hub_ids_pass(client: TestClient) -> None:
    text = SPEC.replace("path: texts", "path: 'hub:stanfordnlp/imdb'").replace(
        "tiny", "'hub:bert-base-uncased'"
    )
    assert client.post(EXPERIMENTS, content=text).status_code == 201


@pytest.mark.parametrize("identifier", ["/etc", "../texts", "json"])
def test_paths_and_files_are_no_hub_datasets(client: TestClient, identifier: str) -> None:
    problem = refused(client, SPEC.replace("path: texts", f"path: 'hub:{identifier}'"), "invalid-value")
    assert "an id is owner/name" in problem["detail"]
    assert problem["errors"][0]["path"] == "task.path"


@pytest.mark.parametrize("field", ["name", "teacher"])
def test_paths_are_no_hub_models(client: TestClient, field: str) -> None:
    problem = refused(client, SPEC.replace("name: tiny", f"{field}: 'hub:/etc'"), "invalid-value")
    assert "'hub:/etc' is not a model id of the hub" in problem["detail"]
    assert problem["errors"][0]["path"] == f"model.{field}"


def see_cluster(app: FastAPI, at_s: float, *, reachable: bool = True) -> None:
    node = ClusterNode("n1", "here", True, {"CPU": 2.0, "memory": 8 * 2.0**30}, {"CPU": 2.0})
    Queue(app.state.store).put_cluster(ClusterSnapshot(at_s, reachable, None, (node,)))


BIG = SPEC + "parallel: {strategy: ddp, workers: 4}\nbatch: {global_size: 16}\n"


def test_what_the_cluster_can_never_serve_is_refused(app: FastAPI, client: TestClient) -> None:
    import time

    see_cluster(app, time.time())
    problem = refused(client, BIG, "unsatisfiable-resources")
    assert "room for 2" in problem["detail"]
    assert "wait_for_capacity" in problem["detail"]
    assert client.post(EXPERIMENTS, content=SPEC).status_code == 201
    waiting = BIG + "queue: {wait_for_capacity: true}\n"
    assert client.post(EXPERIMENTS, content=waiting).status_code == 201


@pytest.mark.parametrize("reachable", [True, False])
def test_an_old_view_of_the_cluster_refuses_nothing(
    app: FastAPI, client: TestClient, reachable: bool
) -> None:
    import time

    see_cluster(app, time.time() - (1000.0 if reachable else 0.0), reachable=reachable)
    assert client.post(EXPERIMENTS, content=BIG).status_code == 201


@pytest.mark.parametrize(
    ("error", "status", "type"),
    [
        (StoreUnavailable('connection to server at "db.internal" (10.0.0.5) failed'), 503, "unavailable"),
        (UnusableDatabase("/srv/db.internal/stillhouse.db: malformed"), 503, "unavailable"),
        (StoreFull('could not extend file "/srv/db.internal/1": disk is full'), 507, "storage-full"),
    ],
)
def test_a_store_in_trouble_is_never_a_500(
    client: TestClient,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    status: int,
    type: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(store.submissions, "submit_many", fail)
    monkeypatch.setattr(store.submissions, "submit", fail)
    for text in (SPEC, SPEC.replace("[0, 1]", str(list(range(30))))):  # light and heavy
        answer = client.post(EXPERIMENTS, content=text)
        assert (answer.status_code, answer.json()["type"]) == (status, f"/problems/{type}")
        assert answer.json()["detail"].endswith("; the server's log says why")
        assert "db.internal" not in answer.text and "db.internal" in caplog.text
        caplog.clear()
        assert ("retry-after" in answer.headers) == (status == 503)


def test_large_grids_are_stored_whole(client: TestClient) -> None:
    text = SPEC.replace("[0, 1]", str(list(range(500))))
    assert client.post(EXPERIMENTS, content=text).json()["run_count"] == 1000


def test_owner_is_the_services_user_unless_named(client: TestClient, settings: Settings) -> None:
    from api.access import own_name

    assert client.post(EXPERIMENTS, content=SPEC).json()["owner"] == own_name()
    named = client.post(EXPERIMENTS, content=SPEC, headers={"Stillhouse-Owner": "ada"})
    assert named.json()["owner"] == "ada"
    bad = client.post(EXPERIMENTS, content=SPEC, headers={"Stillhouse-Owner": "<script>"})
    assert (bad.status_code, bad.json()["type"]) == (422, "/problems/invalid-parameter")


def test_validate_checks_everything_and_stores_nothing(client: TestClient) -> None:
    answer = client.post("/api/v1/specs/validate", content=SPEC).json()
    assert (answer["valid"], answer["run_count"]) == (True, 4)
    assert answer["spec"]["search"]["axes"] == {"precision": ["fp32", "bf16"]}
    bad = client.post("/api/v1/specs/validate", content=SPEC.replace("texts", "nope"))
    assert bad.json()["type"] == "/problems/path-not-found"
    assert client.get(EXPERIMENTS).json()["items"] == []


@pytest.mark.parametrize(
    ("change", "type"),
    [
        (("[fp32, bf16]", "[fp32, fp64]"), "invalid-value"),
        (("name: tiny", "name: bert, layers: [9]"), "out-of-range"),
        (("name: tiny", "name: 'run:7'"), "unknown-run"),
        (("path: texts", "path: nope"), "path-not-found"),
    ],
)
def test_preview_refuses_what_validate_refuses(
    client: TestClient, tmp_path: Path, change: tuple[str, str], type: str
) -> None:
    model = tmp_path / "bert"
    model.mkdir()
    (model / "config.json").write_text(BERT_CONFIG, encoding="utf-8")
    (model / "model.safetensors").write_bytes(b"x")
    (model / "tokenizer.json").write_bytes(b"{}")
    answers = [
        client.post(f"/api/v1/specs/{path}", content=SPEC.replace(*change))
        for path in ("validate", "preview")
    ]
    assert [(one.status_code, one.json()["type"]) for one in answers] == [(422, f"/problems/{type}")] * 2
    assert answers[0].json()["errors"] == answers[1].json()["errors"]


def test_preview_pages_over_the_grid(client: TestClient) -> None:
    runs: list[dict[str, Any]] = []
    token = None
    while True:
        params = {"page_size": 3, **({"page_token": token} if token else {})}
        page = client.post("/api/v1/specs/preview", content=SPEC, params=params).json()
        runs += page["items"]
        if (token := page["next_page_token"]) is None:
            break
    assert [run["index"] for run in runs] == [0, 1, 2, 3]
    client.post(EXPERIMENTS, content=SPEC)
    stored = client.get(f"{EXPERIMENTS}/1/runs").json()["items"]
    assert [(run["cell"], run["seed"], run["point"]) for run in runs] == [
        (run["cell"], run["seed"], run["point"]) for run in stored
    ]
    assert page["cluster_age_s"] is None
    bad = client.post("/api/v1/specs/preview", content=SPEC, params={"page_token": "x"})
    assert (bad.status_code, bad.json()["type"]) == (400, "/problems/invalid-page-token")


def test_preview_says_why_a_run_is_not_feasible(app: FastAPI, client: TestClient) -> None:
    import time

    see_cluster(app, time.time())
    text = SPEC.replace("precision: [fp32, bf16]", "precision: [fp32, bf16], hardware: [cpu, V100]")
    page = client.post("/api/v1/specs/preview", content=text).json()
    reasons = {(run["point"]["hardware"], run["point"]["precision"]): run["reason"] for run in page["items"]}
    assert reasons["cpu", "fp32"] is None
    assert "V100" in reasons["V100", "fp32"]
    assert "does not support bf16" in reasons["V100", "bf16"]
    assert page["cluster_age_s"] >= 0
    v100 = next(run for run in page["items"] if run["hardware"] == "V100-PCIE-16GB")
    assert (v100["accelerators"], v100["price_usd_per_hour"], v100["feasible"]) == (1, 2.75, False)


def test_a_reposted_spec_with_one_more_value_reuses_what_has_succeeded(
    app: FastAPI, client: TestClient, settings: Settings, driver: Driver
) -> None:
    client.post(EXPERIMENTS, content=SPEC)
    experiment = app.state.store.experiments.get(1)
    runs = driver.start(experiment, facts=recorded(settings))
    driver.finish(experiment, runs)
    wider = SPEC.replace("[fp32, bf16]", "[fp32, bf16], batch.global_size: [16, 32]")  # 16 is the default.
    assert client.post("/api/v1/specs/preview", content=wider).json()["reused_count"] == 0

    preview = client.post("/api/v1/specs/preview", content=wider + "reuse: true\n", params={"page_size": 3})
    assert preview.json()["reused_count"] == 4
    assert [run["reused_from"] for run in preview.json()["items"]] == [1, 2, None]
    answer = client.post(EXPERIMENTS, content=wider + "reuse: true\n").json()
    assert answer["run_states"] == {"succeeded": 4, "queued": 4}
    stored = client.get(f"{EXPERIMENTS}/2/runs").json()["items"]
    assert [run["reused_from"] for run in stored] == [1, 2, None, None, 3, 4, None, None]
    assert client.get(f"{EXPERIMENTS}/2").json()["totals"]["cost_usd"] == 0
    assert client.delete(f"{EXPERIMENTS}/1").status_code == 409

    write_corpus(settings.roots("data")[0] / "texts", train=16, test=8, seed=1)
    page = client.post("/api/v1/specs/preview", content=SPEC + "reuse: true\n").json()
    assert page["reused_count"] == 0
    assert "the training data and the test data changed since" in page["items"][0]["not_reused"]


def recorded(settings: Settings) -> dict[str, Any]:
    """What a worker would put into the record of a run of `SPEC` about its files."""
    spec = validate(parse(SPEC.encode()))
    return {"data": input_identity(spec, workspace_of(settings)), "student_sha256": None}


# -- Mistakes in data ------------------------------------------------------------------------------


def test_a_mistake_in_the_data_is_found_before_the_queue(
    client: TestClient, store: Store, tmp_path: Path
) -> None:
    """SST-2 as it is published was accepted, and failed once for each run."""
    (tmp_path / "sst2").mkdir()
    rows = "".join(f'{{"label": {n % 2}, "sentence": "sentence {n}"}}\n' for n in range(20))
    (tmp_path / "sst2" / "train.jsonl").write_text(rows)
    spec = {"name": "sst2", "task": {"name": "classification", "path": "sst2"}}
    for path in ("experiments", "specs/validate", "specs/preview"):
        answer = client.post(f"/api/v1/{path}", json=spec)
        assert (answer.status_code, answer.json()["type"]) == (422, "/problems/bad-data")
        assert "set task.columns.text to one of these" in answer.json()["detail"]
    assert store.experiments.page().items == []
    spec["task"]["columns"] = {"text": "sentence"}  # type: ignore[index]
    assert client.post("/api/v1/experiments", json=spec).status_code == 201


def test_a_replay_does_not_look_at_the_data_again(client: TestClient, settings: Settings) -> None:
    key = {"Idempotency-Key": "once"}
    first = client.post("/api/v1/experiments", content=SPEC, headers=key)
    (Path(settings.data_roots) / "texts" / "train.jsonl").write_text("no JSON any more\n")
    again = client.post("/api/v1/experiments", content=SPEC, headers=key)
    assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])
    assert client.post("/api/v1/experiments", content=SPEC).json()["type"] == "/problems/bad-data"


def test_data_that_were_not_looked_at_are_read_apart_from_light_submissions(
    app: FastAPI, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    monkeypatch.setattr(
        inspection,
        "mistakes_in",
        lambda *_, **__: threads.append(threading.current_thread().name) or [],
    )
    for _ in range(3):
        assert client.post("/api/v1/experiments", content=SPEC).status_code == 201
    assert [name.partition("_")[0] for name in threads] == ["looks"]
