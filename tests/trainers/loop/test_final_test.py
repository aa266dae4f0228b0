"""The test part is scored once, at the end, and decides nothing."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.trainers.conftest import Recorder
from tests.trainers.corpora import write_squad, write_wikiqa
from trainers.checkpoints import manifest, predictions
from trainers.config import TaskConfig
from trainers.data.synthetic import write_corpus
from trainers.entrypoint import train
from trainers.loop.evaluation import Evaluator
from trainers.reporting import NeverStop, StopReason

HEADLINES = {"imdb": "accuracy", "squad_v2": "f1", "wikiqa": "map"}
_OFFICIAL_TEST = {"imdb": "test.jsonl", "squad_v2": "test-v2.0.json", "wikiqa": "WikiQA-test.txt"}


@pytest.fixture
def run_of(config_in, tmp_path):
    """Train a run on a corpus with all three parts; `name` says which folder of checkpoints it has."""

    def run(
        task: str, name: str = "run", sink=None, stop=None, test: str = "auto", train_on="train", **changes
    ):
        config = config_in(
            tmp_path / name,
            task={"name": task, "path": task, "max_length": 48, "test": test, "train_on": train_on},
            length={"steps": 12},
            evaluation={"every_epochs": 0.5},
            deterministic=True,
            workspace__data_roots=(str(tmp_path / "data"),),
            **changes,
        )
        return train(config, sink or Recorder(), stop or NeverStop())

    return run


def write(folder: Path, task: str) -> Path:
    """A corpus with a training, a validation and a test file; returns the test file."""
    folder = folder / task
    if task == "imdb":
        write_corpus(folder, train=60, test=30, seed=3)
    elif task == "squad_v2":
        write_squad(folder, train=20, dev=8, seed=3)
        write_squad(folder / "more", train=1, dev=9, seed=4)
        text = (folder / "more" / "dev-v2.0.json").read_text().replace("dev", "test")
        (folder / "test-v2.0.json").write_text(text)
    else:
        write_wikiqa(folder, train=30, dev=12, seed=3)
        write_wikiqa(folder / "more", train=1, dev=12, seed=4)
        (folder / "more" / "WikiQA-dev.txt").rename(folder / "WikiQA-test.txt")
    return folder / _OFFICIAL_TEST[task]


def permute_labels(file: Path, task: str) -> None:
    """Give the test part's examples each other's labels; texts and their order stay."""
    rng = random.Random(5)
    if task == "imdb":
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        labels = [row["label"] for row in rows]
        rng.shuffle(labels)
        file.write_text(
            "".join(
                json.dumps({**row, "label": label}) + "\n" for row, label in zip(rows, labels, strict=True)
            )
        )
    elif task == "wikiqa":
        rows = [line.split("\t") for line in file.read_text().splitlines()]
        labels = [row[2] for row in rows]
        rng.shuffle(labels)
        file.write_text(
            "".join("\t".join([*row[:2], label]) + "\n" for row, label in zip(rows, labels, strict=True))
        )
    else:
        tree = json.loads(file.read_text())
        for article in tree["data"]:
            for question in article["paragraphs"][0]["qas"]:
                question["answers"], question["is_impossible"] = [], True
        file.write_text(json.dumps(tree))


def weights_of(folder: Path, step: int) -> str:
    return manifest.sealed_files(manifest.CheckpointId(1, step).path(folder))["model.safetensors"]["sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("task", list(HEADLINES))
def test_permuted_test_labels_change_nothing_but_test_figures(run_of, tmp_path, task):
    file = write(tmp_path / "data", task)
    chosen = []
    for name in ("as they are", "permuted"):
        sink = Recorder()
        outcome = run_of(task, name, sink)
        summary, folder = dict(outcome.summary), tmp_path / name
        tested = {key: value for key, value in summary.items() if key.startswith("test_")}
        scores = (
            "score", "best_score", "best_step", "validation_loss", "accuracy", "f1", "map", "exact_match",
            "threshold", "null_threshold", "train_loss",
        )  # fmt: skip
        points = {(p.name, p.step): p.value for p in sink.seen if not p.name.endswith(("_s", "_ms"))}
        points = {key: value for key, value in points.items() if key[0] not in ("goodput",)}
        chosen.append(
            (
                {key: summary.get(key) for key in scores},
                Path(str(summary["best_checkpoint"])).name,
                weights_of(folder, int(summary["best_step"])),
                weights_of(folder, outcome.step),
                sink.saved,
                points,
                tested,
            )
        )
        permute_labels(file, task)
    first, second = chosen
    assert first[:-1] == second[:-1]
    assert first[-1]["test_loss"] != second[-1]["test_loss"]


@pytest.mark.parametrize("task", list(HEADLINES))
def test_figures_are_those_of_the_best_weights_at_the_validation_part_s_thresholds(run_of, tmp_path, task):
    write(tmp_path / "data", task)
    outcome = run_of(task)
    summary = outcome.summary
    file = manifest.attempt_folder(tmp_path / "run", 1) / predictions.PREDICTIONS
    record, rows = predictions.read_record(file), list(predictions.read(file))
    assert record.step == summary["best_step"]
    assert (
        summary["test_score"]
        == summary[f"test_{HEADLINES[task]}"]
        == record.figures[f"test_{HEADLINES[task]}"]
    )
    assert summary["test_score"] == pytest.approx(sum(row.score for row in rows) / len(rows))
    assert (summary["test_examples"], len({row.unit for row in rows})) == (len(rows), len(rows))
    assert predictions.unit_scores(file) == {row.unit: row.score for row in rows}
    assert not [name for name in summary if "test" in name and "threshold" in name]
    assert record.weights_sha256 == weights_of(tmp_path / "run", record.step)
    assert 0 < float(summary["test_time_s"]) < float(summary["total_time_s"])


def test_the_last_weights_are_not_scored_where_earlier_ones_are_the_best(run_of, tmp_path):
    write(tmp_path / "data", "imdb")
    outcome = run_of("imdb", optimizer={"learning_rate": 0.03, "schedule": "constant"})
    best = outcome.summary["best_step"]
    assert best < outcome.step
    record = predictions.read_record(manifest.attempt_folder(tmp_path / "run", 1) / predictions.PREDICTIONS)
    assert (
        record.weights_sha256
        == weights_of(tmp_path / "run", best)
        != weights_of(tmp_path / "run", outcome.step)
    )
    # The same weights, evaluated on the same texts as a validation part, have the same scores.
    (tmp_path / "data" / "imdb" / "dev.jsonl").write_text(
        (tmp_path / "data" / "imdb" / "test.jsonl").read_text()
    )
    (tmp_path / "data" / "imdb" / "test.jsonl").unlink()
    again = run_of(
        "imdb",
        "again",
        test="none",
        model={"name": str(manifest.CheckpointId(1, best).path(tmp_path / "run"))},
        workspace__model_roots=(str(tmp_path),),
        optimizer={"learning_rate": 1e-12},
    )
    assert again.summary["accuracy"] == outcome.summary["test_accuracy"]
    assert again.summary["validation_loss"] == pytest.approx(outcome.summary["test_loss"], rel=1e-4)


def test_a_run_without_a_test_part_has_no_test_figures(run_of, tmp_path):
    write(tmp_path / "data", "imdb")
    outcome = run_of("imdb", test="none")
    assert not [name for name in outcome.summary if name.startswith("test_") and name != "test_time_s"]
    assert (outcome.status, outcome.summary["validation_examples"]) == ("completed", 30)
    assert not (manifest.attempt_folder(tmp_path / "run", 1) / predictions.PREDICTIONS).exists()


class StopsWhileTesting(Recorder):
    """Asks for a pause as soon as the test part is being scored."""

    def requested(self):
        return StopReason.pause if self.phases[-1:] == ["testing"] else None


@pytest.mark.slow
def test_a_run_stopped_while_it_is_tested_is_tested_by_the_next_attempt(run_of, tmp_path):
    write(tmp_path / "data", "imdb")
    sink = StopsWhileTesting()
    stopped = run_of("imdb", sink=sink, stop=sink)
    assert (stopped.status, stopped.stop_reason) == ("stopped", StopReason.pause)
    assert "test_score" not in stopped.summary
    resumed = run_of("imdb")
    assert resumed.status == "completed"
    assert resumed.summary["test_score"] == run_of("imdb", "straight").summary["test_score"]


@pytest.mark.slow
def test_a_resumed_attempt_takes_over_what_an_earlier_one_recorded(run_of, tmp_path, monkeypatch):
    write(tmp_path / "data", "imdb")
    first = run_of("imdb")
    scored = []
    judged = Evaluator.judge
    monkeypatch.setattr(Evaluator, "judge", lambda self, *args: scored.append(1) or judged(self, *args))
    again = run_of("imdb")
    tested = {name: value for name, value in first.summary.items() if name.startswith("test_")}
    assert {**tested, "test_time_s": None} == {
        **{name: again.summary[name] for name in tested},
        "test_time_s": None,
    }
    assert scored == []
    (manifest.attempt_folder(tmp_path / "run", 1) / predictions.PREDICTIONS).unlink()
    assert run_of("imdb").summary["test_score"] == first.summary["test_score"]
    assert scored == [1]


def test_time_of_the_test_part_is_in_no_training_time(run_of, tmp_path):
    write(tmp_path / "data", "imdb")
    summary = run_of("imdb").summary
    rest = (
        float(summary["total_time_s"]) - float(summary["validation_time_s"]) - float(summary["test_time_s"])
    )
    assert summary["train_time_s"] == pytest.approx(rest)


def test_no_point_is_of_the_test_part(run_of, tmp_path):
    write(tmp_path / "data", "imdb")
    sink = Recorder()
    run_of("imdb", sink=sink)
    assert not [point for point in sink.seen if point.name.startswith("test")]


SPREADS = {
    "ddp": {"strategy": "ddp", "workers": 2},
    "1f1b": {"strategy": "pipeline", "workers": 2, "schedule": "1f1b"},
    "half": {"strategy": "ddp", "workers": 2},
    **(
        {"deepspeed": {"strategy": "pipeline", "engine": "deepspeed", "workers": 2}}
        if find_spec("deepspeed")
        else {}
    ),
}


@pytest.mark.slow
def test_workers_score_the_best_weights_as_one_worker_does(launch, config_in, tmp_path):
    write(tmp_path / "data", "imdb")

    def configured(how: str, **changes):
        half = {"precision": "bf16", "numerics": {"parameters": "half", "evaluation": "half"}}
        return config_in(
            tmp_path / how,
            task={"name": "imdb", "path": "imdb", "max_length": 48, "test": "auto"},
            length={"steps": 12},
            evaluation={"every_epochs": 0.5},
            optimizer={"learning_rate": 0.03, "schedule": "constant"},
            workspace__data_roots=(str(tmp_path / "data"),),
            **(half if how == "half" else {}),
            **changes,
        )

    ended = launch([configured(how, parallel=parallel) for how, parallel in SPREADS.items()])
    assert ended.codes == [0, 0]
    for number, how in enumerate(SPREADS):
        first, second = (result["runs"][number]["summary"] for result in ended.results)
        figures = {name: value for name, value in first.items() if name.startswith("test_")}
        assert figures["test_examples"] == 30
        names = figures.keys() - {"test_time_s"}
        assert {name: first[name] for name in names} == {name: second[name] for name in names}
        # One worker goes on from the same checkpoints, and scores the same weights.
        file = manifest.attempt_folder(tmp_path / how, 1) / predictions.PREDICTIONS
        rows = predictions.unit_scores(file)
        file.unlink()
        alone = train(configured(how), Recorder(), NeverStop()).summary
        assert alone["best_step"] == first["best_step"] < 12
        tolerance = 2e-2 if how == "half" else 1e-4
        assert alone["test_loss"] == pytest.approx(first["test_loss"], rel=tolerance)
        assert predictions.unit_scores(file).keys() == rows.keys()


def test_what_trains_on_all_data_is_evaluated_once_and_keeps_its_last_step(run_of, tmp_path):
    write(tmp_path / "data", "imdb")
    recorder = Recorder()
    outcome = run_of("imdb", sink=recorder, train_on="all")
    assert set(recorder.series("accuracy")) == {outcome.step}
    assert outcome.summary["best_step"] == outcome.step == 12
    assert 0.0 <= float(outcome.summary["test_score"]) <= 1.0


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("wikiqa", "chooses its threshold on it"),
        ("squad_v2", "chooses its null_threshold on it"),
        ("mlm", "draws its examples from running text"),
    ],
)
def test_a_task_that_needs_its_validation_part_does_not_train_on_it(task, reason):
    with pytest.raises(ValidationError, match=f"but task {task} {reason}; remove task.train_on"):
        TaskConfig(name=task, train_on="all")
