"""Predictions of rows by a trained model, and the way back from saved predictions to their rows."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from tests.trainers.corpora import write_task
from trainers.checkpoints import manifest, predictions
from trainers.checkpoints.predictions import source_of
from trainers.config import TaskConfig
from trainers.entrypoint import predict, train
from trainers.errors import BadDataError, BadSpecError
from trainers.reporting import NeverStop, NullSink

LABELS = {"label", "tags", "spans", "code", "answers", "is_impossible"}
FILES = {
    "regression": "train.jsonl",
    "token_classification": "train.conll",
    "tariff": "train.csv",
    "squad_v2": "dev-v2.0.json",
    "wikiqa": "WikiQA-dev.txt",
    "classification": "train.jsonl",
}


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def trained(configure, tmp_path):
    """Train a task on its small corpus; returns its best checkpoint, its section, and what it saved."""

    def run(task, **fields):
        folder = tmp_path / "data"
        write_task(folder, task)
        section = {"name": task, "path": str(folder), "max_length": 32, "test": "auto", **fields}
        config = configure(
            task=section,
            length={"steps": 4},
            workspace__data_roots=(str(tmp_path),),
            workspace__cache=str(tmp_path / "cache"),
        )
        summary = train(config, NullSink(), NeverStop()).summary
        file = manifest.attempt_folder(tmp_path / "checkpoints", 1) / predictions.PREDICTIONS
        best = Path(str(summary["best_checkpoint"]))
        return best, config.task, predictions.read_record(file), list(predictions.read(file)), summary

    return run


def of(best, task, data, record=None, **more):
    carried = {} if record is None else record.carried
    return predict(best, task, data, carried=carried, report=lambda line: None, **more)


def key(one):
    """A row by its number; in a document, by its own id."""
    return one.unit if one.sources[0]["row"] is None else str(one.sources)


@pytest.mark.parametrize("task", list(FILES))
def test_saved_predictions_lead_to_their_rows_which_predict_the_same(task, trained, tmp_path):
    best, section, record, saved, _ = trained(task)
    file = tmp_path / "data" / FILES[task]
    again = {key(one): one for one in of(best, section, file, record).rows}
    assert saved
    for one in saved:
        assert {source["file"] for source in one.sources} <= {
            str(file),
            str(tmp_path / "data" / "test.jsonl"),
        }
        if key(one) not in again:
            assert task == "classification"  # Its test part is a file of its own.
            continue
        other = again[key(one)]
        assert (other.prediction, other.truth) == (
            pytest.approx(one.prediction, rel=1e-4) if task == "regression" else one.prediction,
            one.truth,
        )
        if one.probabilities is not None:
            assert other.probabilities == pytest.approx(one.probabilities, abs=1e-4)


def test_scores_on_the_runs_own_test_file_are_its_test_scores(trained, tmp_path):
    best, section, record, saved, summary = trained("classification")
    found = of(best, section, tmp_path / "data", record)
    assert (found.part, found.examples) == ("test", len(saved))
    for name, value in found.scores.items():
        assert value == pytest.approx(summary[f"test_{name}"], abs=1e-5), name
    for row in found.rows:
        assert max(row.probabilities, key=row.probabilities.get) == row.prediction
        assert sum(row.probabilities.values()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("task", ["classification", "regression", "tariff"])
def test_rows_without_labels_are_predicted_alike(task, trained, tmp_path):
    best, section, record, _, _ = trained(task)
    file = tmp_path / "data" / FILES[task]
    labelled = of(best, section, file, record)
    bare = tmp_path / f"bare{file.suffix}"
    if file.suffix == ".csv":
        with file.open() as rows, bare.open("w") as stream:
            csv.writer(stream).writerows([row[0]] for row in csv.reader(rows))
    else:
        rows = map(json.loads, file.read_text().splitlines())
        bare.write_text(
            "".join(json.dumps({k: v for k, v in row.items() if k not in LABELS}) + "\n" for row in rows)
        )
    found = of(best, section, bare, record)
    assert (found.scores, found.without_truth) == ({}, found.examples)
    assert [row.prediction for row in found.rows] == [row.prediction for row in labelled.rows]
    assert all(row.truth is None and math.isnan(row.score) for row in found.rows)


def test_words_and_questions_without_truth_are_predicted(trained, tmp_path):
    best, section, record, _, _ = trained("token_classification")
    (tmp_path / "bare.jsonl").write_text('{"tokens": ["there", "was", "oslo"]}\n{"text": "a fox in rome"}\n')
    rows = of(best, section, tmp_path / "bare.jsonl", record).rows
    assert [len(row.prediction) for row in rows] == [3, 4]


def test_questions_without_answers_are_predicted(trained, tmp_path):
    best, section, record, _, _ = trained("squad_v2")
    (tmp_path / "bare.jsonl").write_text(
        json.dumps({"question": "Which city?", "context": "once in rome"}) + "\n"
    )
    (row,) = of(best, section, tmp_path / "bare.jsonl", record).rows
    assert isinstance(row.prediction, str)
    with pytest.raises(BadSpecError, match="the checkpoint has no null_threshold"):
        of(best, section, tmp_path / "bare.jsonl")


def test_several_labels_have_a_probability_each_and_rows_keep_their_own_name(configure, tmp_path):
    (tmp_path / "data").mkdir()
    rows = [
        {"id": f"r{n}", "text": f"x{n % 2} y{n % 3} z{n}", "label": ["a"] * (n % 2) + ["b"] * (n % 3 > 0)}
        for n in range(30)
    ]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = configure(
        task={"name": "classification", "path": "data", "max_length": 16, "multi_label": True},
        length={"steps": 2},
        workspace__data_roots=(str(tmp_path),),
        workspace__cache=str(tmp_path / "cache"),
    )
    best = Path(str(train(config, NullSink(), NeverStop()).summary["best_checkpoint"]))
    found = of(best, config.task, tmp_path / "data" / "train.jsonl")
    assert [row.unit for row in found.rows] == [f"r{n}" for n in range(30)]
    assert found.rows[4].sources == [{"file": str(tmp_path / "data" / "train.jsonl"), "row": 5}]
    for row in found.rows:
        assert row.prediction == [name for name, p in row.probabilities.items() if p > 0.5]


def test_what_cannot_be_predicted_is_one_line(trained, tmp_path):
    best, section, _, _, _ = trained("classification")
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "fine", "label": "neutral"}\n')
    with pytest.raises(BadDataError, match=r"other\.jsonl: label 'neutral' is none that the"):
        of(best, section, other)
    other.write_text("")
    with pytest.raises(BadDataError, match="no row of the train part can be predicted"):
        of(best, section, other)
    with pytest.raises(BadSpecError, match="task mlm makes its examples from several rows"):
        of(best, TaskConfig(name="mlm"), other)


@pytest.mark.parametrize(
    ("place", "file", "row"),
    [
        ("/d/a, b.csv, line 12", "/d/a, b.csv", 12),
        ("owner/name (test), row 3", "owner/name (test)", 3),
        ("/d/pos/1.txt", "/d/pos/1.txt", None),
        ("/d/dev.json, data[0].paragraphs[1].qas[2]", "/d/dev.json", None),
    ],
)
def test_a_place_is_a_file_and_a_row(place, file, row):
    assert source_of(place) == {"file": file, "row": row}


def test_rows_are_read_by_the_columns_of_the_part_that_they_look_like(configure, tmp_path):
    (tmp_path / "data").mkdir()
    lines = [{"sentence": f"a {'good' if n % 2 else 'bad'} film {n}", "y": n % 2} for n in range(20)]
    write(tmp_path / "data" / "train.jsonl", lines)
    write(tmp_path / "data" / "test.jsonl", [{"content": line["sentence"], "y": line["y"]} for line in lines])
    columns = {"text": {"train": "sentence", "test": "content"}, "label": "y"}
    task = {"name": "classification", "path": "data", "columns": columns, "max_length": 16}
    config = configure(
        task={**task, "test": "auto", "overlap": "allow"},
        length={"steps": 1},
        workspace__data_roots=(str(tmp_path),),
        workspace__cache=str(tmp_path / "cache"),
    )
    best = Path(str(train(config, NullSink(), NeverStop()).summary["best_checkpoint"]))
    found = [of(best, config.task, tmp_path / "data" / f"{part}.jsonl") for part in ("train", "test")]
    assert [row.prediction for row in found[0].rows] == [row.prediction for row in found[1].rows]
    write(tmp_path / "bare.jsonl", [{"content": line["sentence"]} for line in lines])
    assert of(best, config.task, tmp_path / "bare.jsonl").without_truth == 20
