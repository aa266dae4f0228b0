"""The predictions of a run's test part over HTTP."""

from __future__ import annotations

import io
import json
from pathlib import Path

from fastapi.testclient import TestClient
from pyarrow import parquet

from service.config.settings import Settings
from service.domain.states import RunState
from service.output.run_files import known_scores
from service.specs.models import checkpoints_folder
from tests.api.conftest import Driver
from tests.api.test_reading import problem
from trainers.checkpoints import predictions
from trainers.checkpoints.manifest import attempt_folder
from trainers.checkpoints.predictions import Prediction, Record, source_of

API = "/api/v1"
SCORES = {"a": 1.0, "b": 0.0, "c": 1.0}


def write_predictions(folder: Path) -> None:
    """What a run of two classes leaves behind."""
    record = Record("0" * 64, "1" * 64, "accuracy", 4, {"accuracy": 0.5}, {"test_accuracy": 2 / 3})
    truths = ["positive", "negative", "negative"]
    guesses = ["positive", "positive", "negative"]
    rows = [
        Prediction(unit, score, guess, truth, {guess: 0.75}, [source_of(f"/data/test.csv, line {line}")])
        for line, (unit, score, guess, truth) in enumerate(
            zip(SCORES, SCORES.values(), guesses, truths, strict=True), 2
        )
    ]
    predictions.write(attempt_folder(folder, 1), record, rows)


def test_predictions_are_served_as_parquet_and_as_json_lines(
    client: TestClient, driver: Driver, settings: Settings
) -> None:
    experiment = driver.submit()
    (run,) = driver.start(experiment)
    body = problem(client, f"/runs/{run.id}/predictions", 409, "no-predictions")
    assert body["detail"] == f"run {run.id} is running; its test part is scored at its end"
    write_predictions(checkpoints_folder(settings, experiment.id, run.id))
    answer = client.get(f"{API}/runs/{run.id}/predictions")
    assert answer.headers["content-type"] == "application/vnd.apache.parquet"
    assert f"run-{run.id}-predictions.parquet" in answer.headers["content-disposition"]
    table = parquet.read_table(io.BytesIO(answer.content))
    assert dict(zip(table["unit"].to_pylist(), table["score"].to_pylist(), strict=True)) == SCORES
    lines = client.get(f"{API}/runs/{run.id}/predictions", params={"format": "jsonl"})
    assert [json.loads(line) for line in lines.text.splitlines()][1] == {
        "unit": "b",
        "score": 0.0,
        "prediction": "positive",
        "truth": "negative",
        "probabilities": {"positive": 0.75},
        "sources": [{"file": "/data/test.csv", "row": 3}],
    }


def test_known_scores_are_those_of_the_file(driver: Driver, settings: Settings) -> None:
    experiment = driver.submit()
    (run,) = driver.start(experiment)
    assert known_scores(driver.store, settings, run) is None
    folder = checkpoints_folder(settings, experiment.id, run.id)
    write_predictions(folder)
    assert known_scores(driver.store, settings, run) == SCORES
    (attempt_folder(folder, 1) / predictions.PREDICTIONS).write_bytes(b"PAR1 but no table")
    assert known_scores(driver.store, settings, run) is None


def test_a_run_without_a_test_part_says_so(client: TestClient, driver: Driver) -> None:
    problem(client, "/runs/77/predictions", 404, "not-found")
    (run,) = driver.start(driver.submit(task={"name": "imdb", "path": "texts", "test": "none"}))
    body = problem(client, f"/runs/{run.id}/predictions", 409, "no-predictions")
    assert body["detail"] == f"run {run.id} has no test part; submit it with task.test: auto"


def test_claims_go_over_the_predictions_that_runs_kept(
    client: TestClient, driver: Driver, settings: Settings
) -> None:
    axes = {"precision": ["fp32", "bf16"]}
    experiment = driver.submit(search={"axes": axes}, seeds=[0, 1, 2])
    for run in driver.start(experiment):
        missed = set(range(run.seed, 400, 20)) | (set(range(1, 400, 4)) if run.precision == "bf16" else set())
        scores = [float(at not in missed) for at in range(400)]
        share = sum(scores) / 400
        record = Record("0" * 64, "1" * 64, "accuracy", 4, {}, {"test_accuracy": share})
        folder = checkpoints_folder(settings, experiment.id, run.id)
        rows = [Prediction(f"unit:{at}", score, score, score) for at, score in enumerate(scores)]
        predictions.write(attempt_folder(folder, 1), record, rows)
        summary = {"accuracy": 0.9, "test_accuracy": share, "test_score": share, "test_examples": 400}
        driver.store.attempts.finish_run(run.id, run.attempt, RunState.succeeded, summary=summary)
    answer = client.get(f"{API}/experiments/{experiment.id}/compare", params={"claims": True})
    assert answer.status_code == 200, answer.text
    [claim] = [pair["claim"] for pair in answer.json()["claims"] if pair["metric"] == "test_accuracy"]
    assert (claim["test"], claim["examples"], claim["pairs"]) == ("paired two-way test", 400, 3)
    assert claim["verdict"] == "A is better"
