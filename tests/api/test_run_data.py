"""Predictions looked through a page at a time, and the data of a run, over HTTP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from service.config.settings import Settings
from service.domain.records import Run
from service.output import run_data
from service.specs.models import checkpoints_folder, workspace_of
from tests.api.conftest import Driver
from tests.api.test_reading import problem
from tests.trainers.corpora import write_task
from trainers.checkpoints import predictions
from trainers.checkpoints.manifest import attempt_folder
from trainers.checkpoints.predictions import LabelCounts, Prediction, Record, source_of
from trainers.config import RunConfig
from trainers.tasks import TASKS
from trainers.tasks.scores import calibration_error

API = "/api/v1"


def rows(client: TestClient, run: Run, **params: object) -> dict[str, Any]:
    answer = client.get(f"{API}/runs/{run.id}/predictions/rows", params=params)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.fixture
def predicted(driver: Driver, settings: Settings, tmp_path: Path) -> Run:
    """A run with 20,001 predictions, of which every tenth is wrong, of texts in a file."""
    texts = [{"text": f"text number {n}", "label": "no" if n % 3 else "yes"} for n in range(20_001)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    experiment = driver.submit(task={"name": "classification", "path": "many.jsonl"})
    (run,) = driver.start(experiment)
    kept, guessed = [], []
    for n, row in enumerate(texts):
        guess = row["label"] if n % 10 else {"yes": "no", "no": "yes"}[row["label"]]
        share = 0.5 + (n % 5000) / 10_000
        guessed.append(guess)
        probabilities = {guess: share, {"yes": "no", "no": "yes"}[guess]: 1 - share}
        place = source_of(f"{tmp_path / 'many.jsonl'}, line {n + 1}")
        score = float(guess == row["label"])
        kept.append(Prediction(f"u{n}", score, guess, row["label"], probabilities, [place]))
    labels = ["no", "yes"]
    counts = LabelCounts.of_classes(
        np.array([labels.index(one) for one in guessed]),
        np.array([labels.index(row["label"]) for row in texts]),
        labels,
    )
    record = Record("0" * 64, "1" * 64, "accuracy", 4, {}, {"test_accuracy": 0.9}, counts)
    folder = checkpoints_folder(settings, experiment.id, run.id)
    predictions.write(attempt_folder(folder, 1), record, kept)
    return run


def test_wrong_predictions_come_first_and_pages_follow_each_other(client: TestClient, predicted: Run) -> None:
    page = rows(client, predicted, limit=3)
    assert (page["total"], page["looked_through"]) == (20_001, 20_001)
    assert [(one["unit"], one["error"]) for one in page["items"]] == [("u0", 1), ("u10", 1), ("u20", 1)]
    assert rows(client, predicted, limit=2, offset=1)["items"] == page["items"][1:]
    last = rows(client, predicted, wrong=True, offset=2000, limit=200)
    assert last["total"] == 2001
    assert [one["unit"] for one in last["items"]] == ["u20000"]
    assert rows(client, predicted, offset=2001, limit=1)["items"][0]["unit"] == "u1"


def test_predictions_are_ordered_by_confidence(client: TestClient, predicted: Run) -> None:
    sure = rows(client, predicted, order="sure", wrong=True, limit=2)["items"]
    assert [(one["unit"], one["confidence"]) for one in sure] == [("u4990", 0.999), ("u9990", 0.999)]
    (unsure,) = rows(client, predicted, order="unsure", limit=1)["items"]
    assert (unsure["unit"], unsure["confidence"]) == ("u0", 0.5)


def test_a_cell_of_the_confusion_has_its_predictions(client: TestClient, predicted: Run) -> None:
    summary = client.get(f"{API}/runs/{predicted.id}/predictions/summary").json()
    assert summary["labels"] == ["no", "yes"]
    for true, row in zip(summary["labels"], summary["confusion"], strict=True):
        for guess, count in zip(summary["labels"], row, strict=True):
            page = rows(client, predicted, label=true, predicted=guess, limit=1)
            assert page["total"] == count
            assert (page["items"][0]["truth"], page["items"][0]["prediction"]) == (true, guess)


def test_calibration_is_the_score_of_this_name(client: TestClient, predicted: Run) -> None:
    summary = client.get(f"{API}/runs/{predicted.id}/predictions/summary").json()
    confidence = np.array([0.5 + (n % 5000) / 10_000 for n in range(20_001)])
    right = np.array([n % 10 != 0 for n in range(20_001)])
    assert summary["calibration_error"] == pytest.approx(calibration_error(confidence, right))
    assert sum(one["decisions"] for one in summary["reliability"]) == 20_001


def test_texts_are_those_of_the_file_until_it_changes(
    client: TestClient, predicted: Run, tmp_path: Path
) -> None:
    (one,) = rows(client, predicted, offset=2000, limit=1)["items"]
    assert one["texts"] == [["text number 20000"]]
    os.utime(tmp_path / "many.jsonl", (2e9, 2e9))
    (one,) = rows(client, predicted, offset=2000, limit=1)["items"]
    assert one["texts"] == []


def test_what_predictions_lack_cannot_be_asked_for(
    client: TestClient, driver: Driver, settings: Settings
) -> None:
    experiment = driver.submit(task={"name": "regression", "path": "texts"})
    (run,) = driver.start(experiment)
    problem(client, f"/runs/{run.id}/predictions/rows", 409, "no-predictions")
    problem(client, f"/runs/{run.id}/predictions/summary", 409, "no-predictions")
    record = Record("0" * 64, "1" * 64, "pearson", 4, {}, {})
    units = [Prediction("near", 0.1, 1.0, 1.1), Prediction("far", 0.9, 5.0, 1.0)]
    predictions.write(attempt_folder(checkpoints_folder(settings, experiment.id, run.id), 1), record, units)
    assert [one["unit"] for one in rows(client, run)["items"]] == ["far", "near"]
    path = f"/runs/{run.id}/predictions/rows"
    for name, value in (("label", "a"), ("predicted", "a"), ("wrong", True), ("order", "sure")):
        body = problem(client, path, 422, "invalid-parameter", **{name: value})
        assert f"query.{name}" in body["detail"]
    summary = client.get(f"{API}/runs/{run.id}/predictions/summary").json()
    assert (summary["labels"], summary["reliability"], summary["can_be_right"]) == ([], [], False)


def test_only_the_first_predictions_are_looked_through(
    client: TestClient, predicted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_data, "_MOST_READ", 10_000)
    page = rows(client, predicted, order="sure", limit=1)
    assert (page["total"], page["looked_through"]) == (10_000, 10_000)
    summary = client.get(f"{API}/runs/{predicted.id}/predictions/summary").json()
    assert (summary["units"], summary["looked_through"]) == (20_001, 10_000)


@pytest.mark.parametrize("task", TASKS)
def test_predictions_of_every_task_can_be_looked_through(
    client: TestClient, driver: Driver, settings: Settings, tmp_path: Path, task: str
) -> None:
    from trainers.entrypoint import train
    from trainers.reporting import NeverStop, NullSink

    write_task(tmp_path / task, task)
    section = {"name": task, "path": task, "max_length": 32, "test": "auto"}
    section |= {"level": 4} if task == "tariff" else {}
    experiment = driver.submit(task=section)
    (run,) = driver.start(experiment)
    folder = str(checkpoints_folder(settings, experiment.id, run.id))
    config = RunConfig.model_validate(
        {
            "task": section,
            "model": {"name": "tiny"},
            "length": {"steps": 2},
            "batch": {"global_size": 8},
            "seed": 0,
            "threads": 1,
            "rates": {
                "hardware": "cpu", "device": "cpu", "price_usd_per_hour": 0.05, "price_date": "2026-01-01",
                "tdp_w": 7.5,
            },
            "workspace": workspace_of(settings, checkpoints=folder),
        }
    )  # fmt: skip
    train(config, NullSink(), NeverStop())
    page, summary = rows(client, run), client.get(f"{API}/runs/{run.id}/predictions/summary").json()
    assert page["total"] == summary["units"] > 0
    errors = [one["error"] for one in page["items"]]
    assert errors == sorted(errors, reverse=True)
    of_rows = bool(page["items"][0]["texts"])
    assert of_rows == (task != "mlm")
    if of_rows:
        assert all(len(one["texts"]) == len(one["tokens"]) > 0 for one in page["items"])
        assert all("[CLS]" in tokens for one in page["items"] for tokens in one["tokens"])
    for place, label in enumerate(summary["labels"]):
        for field, counts in (("label", "true"), ("predicted", "predicted")):
            found = rows(client, run, **{field: label})["total"]
            # Of tags a text may have several with the label.
            assert found == summary[counts][place] or 0 < found <= summary[counts][place]
    if summary["reliability"]:
        sure = [one["confidence"] for one in rows(client, run, order="sure")["items"]]
        assert sure == sorted(sure, reverse=True)
        assert 0.0 <= summary["calibration_error"] <= 1.0


def test_the_data_of_a_run_is_shown_by_part(client: TestClient, driver: Driver, tmp_path: Path) -> None:
    folder = tmp_path / "reviews"
    folder.mkdir()
    train = [("a fine film", "pos"), ("a poor film", "neg"), ("a fine film", "pos"), ("dull and long", "neg")]
    for part, lines in (("train", train), ("test", [("a poor film", "neg"), ("it shines", "pos")])):
        text = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in lines)
        (folder / f"{part}.jsonl").write_text(text)
    (run,) = driver.start(driver.submit(task={"name": "classification", "path": "reviews"}))
    found = client.get(f"{API}/runs/{run.id}/data").json()
    assert found["problem"] is None
    assert found["shared"] == {"train and test": 1}
    part = found["parts"]["train"]
    assert (part["rows"], part["duplicates"], part["whole"]) == (4, 1, True)
    assert part["labels"] == {"label": {"pos": 2, "neg": 2}}
    assert sum(number for _, number in part["lengths"]) == 4
    assert {one["texts"][0] for one in part["samples"]} == {text for text, _ in train}
    assert part["samples"][0]["labels"] == {"label": "pos"}


def test_data_that_is_not_here_is_said_to_be(client: TestClient, driver: Driver) -> None:
    (run,) = driver.start(driver.submit(task={"name": "imdb"}))
    found = client.get(f"{API}/runs/{run.id}/data").json()
    assert found["parts"] == {}
    assert "hub" in found["problem"]
