"""Studies over HTTP: one test per outcome."""

from __future__ import annotations

from typing import Any

from fastapi.testclient import TestClient

STUDIES = "/api/v1/studies"
STUDY = """\
study: distillation
parts:
  teacher: {task: {name: imdb, path: texts}, model: {name: tiny}, seeds: [0, 1]}
  student:
    task: {name: imdb, path: texts}
    model: {name: tiny, teacher: {best: teacher}}
"""


def refused(client: TestClient, text: str, status: int = 422) -> list[Any]:
    answer = client.post(STUDIES, content=text)
    assert answer.status_code == status, answer.text
    assert client.get(STUDIES).json()["items"] == []
    assert client.get("/api/v1/experiments").json()["items"] == [], "nothing is half-stored"
    return [(error["type"], error["path"]) for error in answer.json()["errors"]]


def test_a_study_is_stored_with_the_experiments_that_can_start(client: TestClient) -> None:
    answer = client.post(STUDIES, content=STUDY)
    assert answer.status_code == 201
    assert answer.headers["location"] == f"{STUDIES}/1"
    study = answer.json()
    assert (study["name"], study["project"], study["state"]) == ("distillation", "default", "running")
    teacher, student = study["parts"]
    assert (teacher["state"], teacher["experiment"]["name"]) == ("submitted", "distillation-teacher")
    assert (student["state"], student["needs"], student["experiment"]) == ("waiting", ["teacher"], None)
    assert client.get(f"{STUDIES}/1").json() == study
    assert client.get(STUDIES).json()["items"] == [study]


def test_the_same_key_gets_the_same_study(client: TestClient) -> None:
    key = {"Idempotency-Key": "k"}
    first = client.post(STUDIES, content=STUDY, headers=key)
    again = client.post(STUDIES, content=STUDY, headers=key)
    assert "idempotent-replayed" not in first.headers
    assert (again.status_code, again.headers["idempotent-replayed"]) == (201, "true")
    assert again.json() == first.json()
    other = client.post(STUDIES, content=STUDY.replace("[0, 1]", "[0]"), headers=key)
    assert (other.status_code, other.json()["type"]) == (422, "/problems/idempotency-mismatch")


def test_every_part_is_checked_before_anything_is_stored(client: TestClient) -> None:
    wrong = STUDY.replace("{best: teacher}", "{best: teacher}, encoder: none")
    assert refused(client, wrong) == [("invalid-value", "parts.student.model.encoder")]
    missing = STUDY.replace("path: texts}\n    model", "path: nowhere}\n    model")
    assert refused(client, missing) == [("path-not-found", "parts.student.task.path")]
    assert refused(client, STUDY.replace("parts:", "project: nlp\nparts:")) == [
        ("unknown-project", "parts.teacher.project"),
        ("unknown-project", "parts.student.project"),
    ]


def test_a_study_is_no_spec_and_a_spec_no_study(client: TestClient) -> None:
    answer = client.post("/api/v1/experiments", content=STUDY)
    assert answer.status_code == 422
    assert ("unknown-key", "study") in {(one["type"], one["path"]) for one in answer.json()["errors"]}
    assert refused(client, "name: a\ntask: {name: imdb, path: texts}\n")[0] == ("unknown-key", "name")
    assert refused(client, "study: a\n") == [("missing-field", "parts")]


def test_cancelling_ends_every_part_and_can_be_repeated(client: TestClient) -> None:
    client.post(STUDIES, content=STUDY)
    cancelled = client.post(f"{STUDIES}/1/cancel")
    assert cancelled.status_code == 200
    study = cancelled.json()
    assert study["state"] == "cancelled"
    assert [part["state"] for part in study["parts"]] == ["submitted", "cancelled"]
    assert study["parts"][0]["experiment"]["state"] == "cancelled"
    assert client.post(f"{STUDIES}/1/cancel").json() == study


def test_a_missing_study_is_not_found(client: TestClient) -> None:
    for answer in (client.get(f"{STUDIES}/7"), client.post(f"{STUDIES}/7/cancel")):
        assert (answer.status_code, answer.json()["detail"]) == (404, "no study has the id 7")


def test_a_preview_may_name_runs_that_do_not_exist_yet(client: TestClient) -> None:
    spec = "name: student\ntask: {name: imdb, path: texts}\nmodel: {name: tiny, teacher: 'run:9'}\n"
    assert client.post("/api/v1/specs/preview", content=spec).status_code == 422
    assert client.post("/api/v1/specs/preview?find_runs=false", content=spec).json()["run_count"] == 1
