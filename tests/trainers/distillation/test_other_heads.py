"""Teachers of numbers and of the classes of tokens."""

from __future__ import annotations

import pytest

from tests.trainers.conftest import Recorder
from tests.trainers.corpora import write_task
from trainers.entrypoint import train
from trainers.errors import BadSpecError
from trainers.reporting import NeverStop, NullSink


@pytest.fixture
def of_task(config_in, tmp_path):
    """Make configurations of a task on its small corpus."""

    def make(task, name, **changes):
        folder = tmp_path / "data" / task
        if not folder.exists():
            write_task(folder, task)
        return config_in(
            tmp_path / name,
            **{
                "task": {"name": task, "path": task, "max_length": 24},
                "length": {"steps": 3},
                "model__dropout": 0.0,
                "workspace__data_roots": (str(tmp_path / "data"),),
                "workspace__model_roots": (str(tmp_path),),
                "workspace__cache": str(tmp_path / "cache"),
                **changes,
            },
        )

    return make


@pytest.mark.parametrize("task", ["regression", "token_classification"])
def test_kept_logits_teach_what_computed_ones_do(task, of_task):
    teacher = train(of_task(task, "teacher"), NullSink(), NeverStop()).checkpoint
    series = []
    for kept in (True, False):
        recorder = Recorder()
        distillation = {"soft_weight": 0.5, "cache_logits": kept, "teacher_precision": "fp32"}
        taught = of_task(task, f"kept-{kept}", model__teacher=teacher, distillation=distillation)
        train(taught, recorder, NeverStop())
        series.append(recorder.series("soft_loss"))
    assert series[0] == pytest.approx(series[1], rel=1e-4)
    assert all(value > 0 for value in series[0].values())


@pytest.mark.parametrize(
    ("task", "teaching", "match"),
    [
        (
            "regression",
            "token_classification",
            "was trained to predict classes of tokens, but the task needs a",
        ),
        ("token_classification", "regression", "but the task needs classes of tokens"),
        ("regression", "classification", r"has no weight classifier\.bias for task regression"),
    ],
)
def test_a_teacher_of_another_kind_is_refused(task, teaching, match, of_task):
    teacher = train(of_task(teaching, "teacher", length={"steps": 1}), NullSink(), NeverStop()).checkpoint
    taught = of_task(task, "taught", model__teacher=teacher, distillation={"soft_weight": 0.5})
    with pytest.raises(BadSpecError, match=match):
        train(taught, NullSink(), NeverStop())
