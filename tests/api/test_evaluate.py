"""Texts that are answered by a run's model: one process, with bounds, and only where it is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from api.app import create_app
from service.config.settings import Settings
from service.output.bounded import LONGEST_TEXT, MOST_TEXTS
from service.store import Store
from tests.api.conftest import BASE_URL, TOKEN, Driver
from tests.api.trained_model import trained
from trainers.tasks import TASKS

TINY = {"model": {"name": "tiny"}, "length": {"steps": 4}, "batch": {"global_size": 8}}
REVIEWS = {"name": "tried", "task": {"name": "imdb", "path": "texts", "max_length": 32}, **TINY}


def asked(client: TestClient, run: int, texts: list[str], **shared: str) -> Any:
    return client.post(f"/api/v1/runs/{run}/evaluate", json={"texts": texts, "shared": shared})


def test_texts_get_labels_with_probabilities(client: TestClient, store: Store, settings: Settings) -> None:
    run = trained(store, settings, REVIEWS)
    asks = client.get(f"/api/v1/runs/{run.id}/evaluate").json()
    assert (asks["each"], asks["shared"], asks["shown"]) == ("text", [], "labels")
    answers = asked(client, run.id, ["The aroma was superb.", "The finish was dull.", "Tea."]).json()["items"]
    assert len(answers) == 3
    for answer in answers:
        assert answer["probabilities"].keys() == {"negative", "positive"}
        assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-4)
        assert answer["prediction"] == max(answer["probabilities"], key=answer["probabilities"].get)
    again = asked(client, run.id, ["Tea."]).json()["items"]
    assert again[0]["probabilities"] == pytest.approx(answers[2]["probabilities"], abs=1e-4)


@pytest.mark.slow
def test_words_get_a_tag_each(client: TestClient, store: Store, settings: Settings, tmp_path: Path) -> None:
    rows = [{"tokens": ["Ada", "lives", "in", "Paris"], "tags": ["B-PER", "O", "O", "B-LOC"]}] * 12
    folder = tmp_path / "entities"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "token_classification", "path": "entities", "max_length": 32, "overlap": "allow"}
    run = trained(store, settings, {"name": "tagged", "task": {**task, "test": "none"}, **TINY})
    (answer,) = asked(client, run.id, ["Grace lives in New York"]).json()["items"]
    assert len(answer["prediction"]) == 5


def test_a_task_that_makes_examples_of_several_rows_says_so(client: TestClient, driver: Driver) -> None:
    (run,) = driver.start(driver.submit(task={"name": "mlm", "path": "texts"}))
    refused = client.get(f"/api/v1/runs/{run.id}/evaluate").json()
    assert (refused["type"], "mlm" in refused["detail"]) == ("/problems/unanswerable", True)


def test_bounds_and_fields_are_checked(client: TestClient, driver: Driver) -> None:
    (run,) = driver.start(driver.submit(task={"name": "squad_v2", "path": "texts"}))
    assert asked(client, run.id, ["text"] * (MOST_TEXTS + 1)).status_code == 422
    assert asked(client, run.id, ["x" * (LONGEST_TEXT + 1)]).status_code == 422
    assert asked(client, run.id, []).status_code == 422
    assert "context is missing" in asked(client, run.id, ["who?"]).json()["detail"]
    assert "title is not a field" in asked(client, run.id, ["who?"], context="x", title="y").json()["detail"]
    assert asked(client, run.id, ["who?"], context="x").json()["type"] == "/problems/no-model"


@pytest.mark.parametrize(("chosen", "allowed"), [(None, False), (True, True), (False, False)])
def test_a_closed_service_evaluates_only_when_it_is_told_to(
    settings: Settings, chosen: bool | None, allowed: bool
) -> None:
    closed = settings.model_copy(update={"token": SecretStr(TOKEN), "evaluate": chosen})
    app = create_app(closed)
    (run,) = Driver(app.state.store).start(Driver(app.state.store).submit())
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with TestClient(app, base_url=BASE_URL, headers=headers) as client:
        answer = client.get(f"/api/v1/runs/{run.id}/evaluate")
    assert answer.is_success == allowed
    assert allowed or "STILLHOUSE_EVALUATE" in answer.json()["detail"]


def test_every_trial_names_fields_of_its_task() -> None:
    for info in TASKS.values():
        if info.trial is not None:
            named = {info.trial.each, *info.trial.shared}
            assert named <= set(info.columns)
            assert not named & set(info.labels)
            assert set(info.trial.optional) <= set(info.trial.shared)
