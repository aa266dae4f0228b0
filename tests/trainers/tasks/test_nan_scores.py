"""Predictions that are NaN: every score of every task is NaN, which is said once."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainers.corpora import write_task
from trainers.checkpoints import predictions
from trainers.data.batches import Batch
from trainers.entrypoint import train
from trainers.metrics import on_test
from trainers.models.student import Output
from trainers.parallel.replica import Replica
from trainers.reporting import NeverStop
from trainers.tasks import TASKS
from trainers.tasks.regression.task import pearson, rmse, spearman
from trainers.tasks.wikiqa.task import ranking


def lose_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's logits of a part's first example have one NaN, and those of the others none."""
    infer = Replica.infer

    def lossy(self: Replica, batch: Batch) -> Output | None:
        said = infer(self, batch)
        assert said is not None
        logits = said.logits.clone()
        for place in (batch.rows == 0).nonzero()[:, 0].tolist():
            if batch.guessed is not None:
                own = (batch.guessed // batch.input_ids.shape[1] == place).nonzero()[:, 0]
                logits[own[-1], -1] = torch.nan
            elif logits.dim() == 3:
                logits[place, 1, -1] = torch.nan
            else:
                logits[place, -1] = torch.nan
        return replace(said, logits=logits)

    monkeypatch.setattr(Replica, "infer", lossy)


@pytest.mark.parametrize("task", TASKS)
def test_every_score_of_every_task_is_nan_and_said_once(task, config_in, tmp_path, recorder, monkeypatch):
    write_task(tmp_path / "data" / task, task)
    lose_an_example(monkeypatch)
    level = {"level": 4} if task == "tariff" else {}
    config = config_in(
        tmp_path / "run",
        task={"name": task, "path": task, "max_length": 32, "test": "auto", **level},
        length={"steps": 2},
        evaluation={"every_epochs": 0.001},
        workspace__data_roots=(str(tmp_path / "data"),),
    )
    outcome = train(config, recorder, NeverStop())
    info = TASKS[task]
    computed = {point.name for point in recorder.seen} & info.scores.keys() - {
        "validation_loss",
        "sequence_ms",
    }
    assert info.headline in computed | {"validation_loss"}
    for name in computed:
        values = recorder.series(name)
        assert len(values) == 2
        assert all(map(math.isnan, values.values())), name
    tested = {on_test(name) for name in computed} - {None}
    assert tested
    assert all(math.isnan(outcome.summary[name]) for name in tested)
    lines = [line for line in recorder.logs if "NaN" in line]
    assert [line.split(":")[0] for line in lines] == ["validation", "test"]
    assert all("predictions of 1 of " in line for line in lines)
    (file,) = Path(config.workspace.checkpoints).rglob("test.parquet")
    assert all(math.isnan(score) for score in predictions.unit_scores(file).values())
    assert {one.prediction for one in predictions.read(file)} == {None}
    assert predictions.read_record(file).labels is None


numbers = st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=3, max_size=20)


@given(rows=numbers, place=st.integers(0, 2))
def test_figures_of_numbers_with_nan_are_nan(rows, place):
    predicted, labels = np.array(rows).T
    predicted[place] = math.nan
    assert all(math.isnan(metric(predicted, labels)) for metric in (pearson, spearman, rmse))
    relevant = np.arange(len(rows)) % 2
    assert all(map(math.isnan, ranking(predicted, relevant, np.zeros(len(rows), dtype=int)).values()))


def test_numbers_beyond_the_format_have_no_correlation_and_raise_nothing():
    predicted, labels = np.array([1.0, math.inf, 3.0]), np.array([1.0, 2.0, 3.0])
    assert math.isnan(pearson(predicted, labels))
    assert spearman(predicted, labels) == pytest.approx(0.5)
    assert rmse(predicted, labels) == math.inf
