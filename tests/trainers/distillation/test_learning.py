"""Whether students learn from their teachers, and what each stage trains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.conftest import Recorder
from tests.trainers.distillation.conftest import (
    INSIDE,
    forbidden,
    rewrite_weights,
)
from trainers.distillation.teacher import Teacher
from trainers.entrypoint import train
from trainers.reporting import NeverStop, NullSink
from trainers.update import learning_rate

LONG = {"length": {"epochs": 10}, "optimizer__learning_rate": 2e-3}


@pytest.mark.slow
def test_student_learns_from_its_teacher_alone(distil, recorder):
    config = distil(**LONG, distillation={"soft_weight": 1.0})
    outcome = train(config, recorder, NeverStop())
    soft = [recorder.series("soft_loss")[step] for step in range(1, outcome.step + 1)]
    assert np.mean(soft[-10:]) < 0.3 * np.mean(soft[:5])
    assert outcome.summary["accuracy"] > 0.85
    assert recorder.series("loss") == pytest.approx(recorder.series("soft_loss"), rel=1e-5)


@pytest.mark.slow
def test_student_follows_a_teacher_that_is_always_wrong(distil, copied):
    def swapped(weights):
        return weights | {name: weights[name].flip(0) for name in ("classifier.weight", "classifier.bias")}

    rewrite_weights(copied, swapped)
    config = distil(**LONG, model__teacher=str(copied), distillation={"soft_weight": 1.0})
    assert train(config, NullSink(), NeverStop()).summary["accuracy"] < 0.15


@pytest.mark.slow
def test_hidden_states_come_nearer_to_the_teachers(distil, recorder):
    config = distil(length={"steps": 40}, distillation={"soft_weight": 0.0, **INSIDE})
    train(config, recorder, NeverStop())
    for name in ("hidden_loss", "embedding_loss", "relation_loss", "cosine_loss"):
        found = recorder.series(name)
        assert np.mean([found[step] for step in range(36, 41)]) < 0.9 * found[1], name


def test_loss_is_the_weighted_sum_of_its_parts(distil, recorder):
    weights = {"soft_weight": 0.25, **INSIDE}
    train(distil(distillation=weights), recorder, NeverStop())
    parts = {"task": 0.75} | {name.removesuffix("_weight"): value for name, value in weights.items()}
    for step, loss in recorder.series("loss").items():
        found = sum(weight * recorder.series(f"{name}_loss")[step] for name, weight in parts.items())
        assert loss == pytest.approx(found, rel=1e-5)


def test_student_of_chosen_teacher_layers(distil, teacher):
    model = {"name": str(teacher), "teacher": str(teacher), "layers": [1, 3]}
    outcome = train(distil(model=model, optimizer__learning_rate=1e-12), NullSink(), NeverStop())
    theirs, ours = (load_file(Path(folder) / "model.safetensors") for folder in (teacher, outcome.checkpoint))
    name = "bert.encoder.layer.{}.attention.self.query.weight"
    for new, old in enumerate((1, 3)):
        torch.testing.assert_close(ours[name.format(new)], theirs[name.format(old)], atol=1e-6, rtol=0)
    assert name.format(2) not in ours
    torch.testing.assert_close(ours["classifier.weight"], theirs["classifier.weight"], atol=1e-6, rtol=0)


def test_points_are_those_of_the_stage(distil, recorder):
    settings = {"soft_weight": 0.5, "hidden_weight": 1.0, "hidden_first_fraction": 0.5}
    train(distil(distillation=settings), recorder, NeverStop())
    assert sorted(recorder.series("hidden_loss")) == [1, 2, 3]
    assert sorted(recorder.series("soft_loss")) == [4, 5, 6]
    assert sorted(recorder.series("task_loss")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_logits_and_task_are_left_alone_in_the_first_stage(distil, teacher):
    settings = {"soft_weight": 0.5, "hidden_weight": 1.0, "hidden_first_fraction": 0.9}
    model = {"name": str(teacher), "teacher": str(teacher)}
    config = distil(model=model, length={"steps": 3}, distillation=settings, optimizer__weight_decay=0.0)
    stop = Recorder(stop_after=2)
    outcome = train(config, stop, stop)
    theirs, ours = (load_file(Path(folder) / "model.safetensors") for folder in (teacher, outcome.checkpoint))
    assert torch.equal(ours["classifier.weight"], theirs["classifier.weight"])
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(ours[name], theirs[name])


@pytest.mark.slow
def test_each_stage_is_a_training_of_its_own(distil, recorder, tmp_path):
    """The head's first update is Adam's first: as large as the learning rate, which warms up again."""
    config = distil(
        length={"steps": 40},
        distillation={"soft_weight": 0.5, "hidden_weight": 1.0, "hidden_first_fraction": 0.75},
        optimizer={"learning_rate": 1e-3, "warmup_fraction": 0.2, "weight_decay": 0.0},
        checkpoint={"every_steps": 1, "every_s": 0.0, "keep": 12},
    )
    train(config, recorder, NeverStop())
    rates = [recorder.series("learning_rate")[step] for step in range(1, 41)]
    assert rates[:30] == [learning_rate(config.optimizer, i, 30) for i in range(30)]
    assert rates[30:] == [learning_rate(config.optimizer, i, 10) for i in range(10)]

    def head(step: int) -> torch.Tensor:
        folder = tmp_path / "checkpoints" / "attempt-000001" / f"step-{step:08d}"
        return load_file(folder / "model.safetensors")["classifier.weight"]

    moved = [(head(step) - head(step - 1)).abs() for step in range(31, 36)]
    torch.testing.assert_close(moved[0], torch.full_like(moved[0], rates[30]), rtol=1e-2, atol=0.0)
    for rate, distance in zip(rates[30:], moved, strict=False):
        assert distance.max() < 1.1 * rate


def test_without_weights_the_teacher_is_not_used_and_that_is_said(distil, recorder, monkeypatch):
    monkeypatch.setattr(Teacher, "load", forbidden)
    train(distil(distillation={"soft_weight": 0.0}), recorder, NeverStop())
    assert "the teacher is unused: all distillation weights are 0" in recorder.logs
    assert recorder.series("task_loss") == {}


@pytest.mark.slow
def test_teacher_no_larger_than_its_student_is_warned_of(distil, recorder, teacher):
    config = distil(model__name=str(teacher), length={"steps": 1})
    train(config, recorder, NeverStop())
    (said,) = [line for line in recorder.logs if "no larger than its student" in line]
    assert said.endswith("(4 layers of width 256, and 4 of 256); is this the intended model?")
    smaller = Recorder()
    train(distil("smaller", length={"steps": 1}), smaller, NeverStop())
    assert not [line for line in smaller.logs if "no larger" in line]
