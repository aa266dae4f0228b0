"""Commands that use a run's model, or train it again, against a running service."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from service.domain.states import ExperimentState
from tests.api.trained_model import outcome_of
from tests.service.cli.house import House
from trainers.data.synthetic import write_corpus
from trainers.models import onnx

SPEC = """\
name: reviews
task: {name: imdb, path: reviews, max_length: 32}
model: {name: tiny}
length: {steps: 4}
batch: {global_size: 8}
seeds: [0, 1]
"""


@pytest.fixture
def number(house: House) -> int:
    """An experiment whose two runs, 1 and 2, have succeeded; no model was kept."""
    write_corpus(house.folder / "reviews", train=60, test=20, seed=1)
    number = house.submitted(SPEC)
    experiment = house.claimed()
    for run in house.runs(number):
        house.finished(run, house.begun(run, experiment), 0.9 - 0.1 * run.seed, 20.0)
    house.ended(ExperimentState.succeeded, experiment)
    return number


def trained(house: House, number: int) -> tuple[int, dict[str, object]]:
    """Train the first run of an experiment; returns its number and its figures."""
    first = house.runs(number)[0]
    outcome = outcome_of(house.store, house.settings, first)
    return first.id, dict(outcome.summary)


def refused(house: House, code: int, words: str, *arguments: str) -> None:
    result = house.run(*arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (code, 1), result.output
    assert words in result.stderr


def test_rows_are_predicted_and_scored_here(house: House, number: int, tmp_path: Path) -> None:
    run, summary = trained(house, number)
    data = house.folder / "reviews" / "test.jsonl"
    scored = house.json("evaluate", f"run:{run}", "--on", str(data), "-o", str(tmp_path / "p.parquet"))
    assert scored["scores"]["accuracy"] == pytest.approx(summary["test_accuracy"])
    assert parquet.read_table(tmp_path / "p.parquet")["truth"].to_pylist()[0] in ('"negative"', '"positive"')
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    bare = tmp_path / "mine.jsonl"
    bare.write_text(
        "".join(json.dumps({"text": text, "ref": f"n{i}"}) + "\n" for i, text in enumerate(texts))
    )
    result = house.run("predict", f"run:{run}", str(bare), "-o", str(tmp_path / "p.csv"), "--id", "ref")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path}/p.csv: {len(texts)} predictions of {len(texts)} rows\n"
    with (tmp_path / "p.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["unit"] for row in rows] == [f"n{i}" for i in range(len(texts))]
    assert json.loads(rows[3]["sources"]) == [{"file": str(bare), "row": 4}]
    probabilities = json.loads(rows[3]["probabilities"])
    assert max(probabilities, key=probabilities.get) == rows[3]["prediction"]
    assert "truth" not in rows[3]
    unscored = f"{len(texts)} of {len(texts)} rows have no label, so nothing is scored"
    refused(house, 2, unscored, "evaluate", f"run:{run}", "--on", str(bare))
    bare.write_text('{"text": "fine", "label": "so so"}\n')
    refused(
        house,
        2,
        "mine.jsonl, line 1, field label: unknown label",
        "evaluate",
        f"run:{run}",
        "--on",
        str(bare),
    )
    refused(house, 3, "no such file", "predict", f"run:{run}", str(tmp_path / "none.jsonl"))
    refused(house, 2, "unknown format; end it in", "predict", f"run:{run}", str(data), "-o", "p.xlsx")
    refused(house, 4, "does not exist", "predict", f"run:{run + 1}", str(data))


def test_a_continuation_is_an_experiment_of_its_own(house: House, number: int) -> None:
    parent = house.runs(number)[1]
    first = parent.id
    child = house.json("continue", f"run:{first}", "--epochs", "2")
    (run,) = house.runs(child["id"])
    config = json.loads(house.store.runs.config(run.id))
    assert (child["name"], run.seed) == ("reviews continued", parent.seed)
    assert config["model"]["name"] == f"run:{first}"
    assert config["length"] == {"epochs": 2.0, "steps": None}
    assert config["description"] == f"Continues run {first} for 2 epochs, from its best checkpoint."
    before = house.json("compare", str(number), "--metric", "accuracy")["rows"]
    experiment = house.claimed()
    house.finished(run, house.begun(run, experiment), 0.99, 5.0)
    house.ended(ExperimentState.succeeded, experiment)
    # The parent's answer stays as it was, and together they are two configurations.
    assert house.json("compare", str(number), "--metric", "accuracy")["rows"] == before
    both = house.json("compare", str(number), str(child["id"]), "--metric", "accuracy")["rows"]
    found = {one["point"]["model.name"]: one["figures"]["accuracy"] for one in both}
    assert {name: (of["mean"], of["n"]) for name, of in found.items()} == {
        "tiny": (pytest.approx(0.85), 2),
        f"run:{first}": (0.99, 1),
    }


def test_settings_are_trained_again_on_all_data(house: House, number: int) -> None:
    parent = house.runs(number)[1]
    first = parent.id
    child = house.json("retrain", f"run:{first}", "--on", "all")
    (run,) = house.runs(child["id"])
    config = json.loads(house.store.runs.config(run.id))
    assert (child["name"], run.seed, config["task"]["train_on"]) == ("reviews all", parent.seed, "all")
    assert (config["model"]["name"], config["length"]["steps"]) == ("tiny", 4)
    assert config["description"] == f"Trains the settings of run {first} on its training and validation data."


def test_what_cannot_be_trained_further_is_one_line(house: House, number: int) -> None:
    first = house.runs(number)[0].id
    refused(house, 2, "give --epochs or --steps", "continue", f"run:{first}")
    refused(house, 2, "give --epochs or --steps", "continue", f"run:{first}", "--epochs", "1", "--steps", "2")
    refused(house, 3, "no run has the id 999", "continue", "run:999", "--steps", "2")
    stages = "stages: [{length: {steps: 2}}, {length: {steps: 2}}]\n"
    staged = house.runs(house.submitted(SPEC + stages))[0].id
    refused(house, 2, "trains in stages", "continue", f"run:{staged}", "--steps", "2")
    spans = SPEC.replace("imdb", "wikiqa")
    ranked = house.runs(house.submitted(spans.replace("path: reviews, ", "path: hub:microsoft/wiki_qa, ")))[
        0
    ].id
    refused(house, 2, "chooses its threshold on it", "retrain", f"run:{ranked}", "--on", "all")


@pytest.mark.slow
def test_a_model_for_onnx_is_run_before_it_is_written(
    house: House, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ort = pytest.importorskip("onnxruntime")
    run, _ = trained(house, number)
    folder = tmp_path / "deep" / "model"
    listing = house.json("export-model", f"run:{run}", str(folder), "--onnx")
    assert listing["onnx_max_difference"] <= onnx.TOLERANCE
    content = (folder / "model.onnx").read_bytes()
    assert listing["files"]["model.onnx"] == {
        "size": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    assert json.loads((folder / "manifest.json").read_text())["files"] == listing["files"]
    # In texts and batches of other sizes than it was made of.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    inputs = tokenizer(
        ["good " * 7, "bad", "fine and long " * 9, "so", "la la"], padding=True, return_tensors="pt"
    )
    (found,) = ort.InferenceSession(content).run(["logits"], {k: v.numpy() for k, v in inputs.items()})
    with torch.no_grad():
        assert np.allclose(found, model(**inputs).logits.numpy(), atol=1e-4)
    # Outputs that differ are no model.
    monkeypatch.setattr(onnx, "TOLERANCE", -1.0)
    words = "ONNX Runtime's outputs differ from torch's by"
    refused(house, 2, words, "export-model", f"run:{run}", str(tmp_path / "other"), "--onnx")
    assert not (tmp_path / "other").exists()
    refused(
        house,
        2,
        "two forms of a model",
        "export-model",
        f"run:{run}",
        str(tmp_path / "x"),
        "--onnx",
        "--packed",
    )
