"""Numbers of texts: columns, units, scores against scipy, distillation, every named failure."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from trainers.checkpoints import predictions
from trainers.config import TaskConfig
from trainers.entrypoint import train
from trainers.errors import BadDataError
from trainers.models.origin import Preset
from trainers.reporting import NeverStop
from trainers.tasks import base
from trainers.tasks.regression.task import NumberScoring


@pytest.fixture
def regress(on_folder):
    return partial(on_folder, "regression")


def write(folder, rows, part="train"):
    (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def praised(count, *, unit=1.0, start=0.0):
    drawn = np.random.default_rng(0)
    rows = []
    for number in range(count):
        grade = int(drawn.integers(0, 5))
        rows.append(
            {"text": f"{'good ' * grade}{'bad ' * (4 - grade)}tea {number}", "label": start + unit * grade}
        )
    return rows


def prepare(config):
    return base.build("regression").prepare(config, Preset("tiny"), lambda line: None)


def refused(config, match):
    with pytest.raises(BadDataError, match=match):
        prepare(config)


def test_sick_as_published(configure, real_data):
    config = configure(
        task={
            "name": "regression",
            "path": "sick",
            "columns": {"text": "sentence_A", "text_pair": "sentence_B", "label": "relatedness_score"},
            "label_range": (1, 5),
            "max_length": 16,
            "train_examples": 50,
            "test": "auto",
        },
        workspace__data_roots=(str(real_data),),
    )
    data = prepare(config)
    assert (len(data.train), len(data.test)) == (50, 4927)
    assert data.train.second_at is not None
    assert data.train.labels.min() >= 1.0
    assert data.head.scale == 1.0


@pytest.mark.parametrize(
    ("label", "match"),
    [
        ("high", "line 2, field label: 'high' is not a finite number"),
        (True, "'True' is not a finite number"),
        ("nan", "'nan' is not a finite number"),
        (None, "field label: missing"),
        (6, r"6 is outside task.label_range \[1, 5\]"),
    ],
)
def test_what_is_no_number_is_refused(regress, folder, label, match):
    write(folder, [{"text": "a", "label": 1}, {"text": "b", "label": label}, {"text": "c", "label": 5}])
    refused(regress(label_range=(1, 5)), match)


def test_numbers_may_be_written_as_text(regress, folder):
    (folder / "train.csv").write_text("text,label\n" + "".join(f"text {n},{n / 4}\n" for n in range(20)))
    assert prepare(regress()).train.labels.dtype == np.float32


def test_one_number_is_nothing_to_learn(regress, folder):
    write(folder, [{"text": f"tea {n}", "label": 3} for n in range(12)])
    refused(regress(), "all examples .* have label 3, so there is nothing to learn")


def test_pairs_next_to_single_texts_are_refused(regress, folder):
    rows = praised(12)
    rows[5]["text_pair"] = "and more"
    write(folder, rows)
    refused(regress(), "some rows have a text_pair and others have none")


def test_an_empty_range_is_refused():
    with pytest.raises(ValidationError, match=r"label_range \[5.0, 1.0\] is empty"):
        TaskConfig(name="regression", label_range=(5, 1))


def test_constant_predictions_correlate_with_nothing():
    scores = NumberScoring(np.arange(10.0), None).score(np.full((10, 1), 1 / 3, dtype=np.float32))
    assert (scores["pearson"], scores["spearman"]) == (0.0, 0.0)
    assert scores["rmse"] > 0


def test_predictions_are_clipped_to_the_range_and_their_shares_have_the_correlation_as_mean():
    scoring = NumberScoring(np.array([1.0, 2.0, 5.0]), (1.0, 5.0))
    observed = scoring.observe(torch.tensor([[0.0], [2.5], [9.0]]), None).numpy()  # type: ignore[arg-type]
    judged = scoring.judge(observed, {})
    assert judged.predictions == [1.0, 2.5, 5.0]
    assert judged.scores.mean() == pytest.approx(scoring.score(observed)["pearson"])


def learned(config, recorder, **changes):
    config = config.model_copy(
        update={
            "length": config.length.model_copy(update={"steps": 60, "epochs": None}),
            "batch": config.batch.model_copy(update={"global_size": 16}),
            "optimizer": config.optimizer.model_copy(update={"learning_rate": 3e-3}),
        }
    )
    return train(config, recorder, NeverStop()).summary


@pytest.mark.parametrize(("unit", "start"), [(1.0, 1.0), (2.0**10, 2.0**17)])
def test_tiny_learns_in_any_unit(regress, folder, recorder, unit, start, tmp_path):
    write(folder, praised(240, unit=unit, start=start))
    config = regress(test="auto")
    summary = learned(config, recorder)
    assert summary["pearson"] > 0.9
    assert summary["rmse"] < 0.6 * unit
    assert summary["test_pearson"] > 0.8
    files = list((tmp_path / "checkpoints").rglob("test.parquet"))
    kept = list(predictions.read(files[0]))
    assert np.mean([one.score for one in kept]) == pytest.approx(summary["test_pearson"])
    assert all(isinstance(one.prediction, float) for one in kept)
