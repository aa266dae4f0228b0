"""Losses of classes: against formulas in float64, as a part of a run, and where they do not belong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.trainers.conftest import Recorder
from tests.trainers.corpora import write_task
from tests.trainers.distillation.conftest import an_objective
from trainers.config import TaskConfig
from trainers.data.batches import Batch
from trainers.entrypoint import train
from trainers.model_kinds.heads import IGNORED
from trainers.reporting import NeverStop
from trainers.tasks.base import build, trained_as


def of(name, loss, **options):
    return trained_as(TaskConfig(name=name, loss=loss, **options))


def batch_of(labels, weights=None):
    ids = torch.ones((len(labels), labels.shape[1] if labels.dim() > 1 else 1), dtype=torch.int64)
    return Batch(ids, None, None, labels, torch.arange(len(labels)), len(labels), 1, 1, weights=weights)


LOGITS = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.2, -3.0], [-40.0, 40.0, 0.0]])
LABELS = torch.tensor([0, 2, 1])
PROBABILITIES = np.exp(LOGITS.double().numpy()) / np.exp(LOGITS.double().numpy()).sum(1, keepdims=True)
OF_LABEL = PROBABILITIES[np.arange(3), LABELS.numpy()]


def smoothed(share):
    targets = np.eye(3)[LABELS.numpy()] * (1 - share) + share / 3
    return -(targets * np.log(PROBABILITIES)).sum(1)


@pytest.mark.parametrize(
    ("loss", "options", "expected"),
    [
        ("cross_entropy", {}, -np.log(OF_LABEL)),
        ("label_smoothing", {}, smoothed(0.1)),
        ("label_smoothing", {"label_smoothing": 0.3}, smoothed(0.3)),
        ("focal", {}, -((1 - OF_LABEL) ** 2) * np.log(OF_LABEL)),
        ("focal", {"focal_gamma": 0.5}, -((1 - OF_LABEL) ** 0.5) * np.log(OF_LABEL)),
    ],
)
@pytest.mark.parametrize("weights", [None, torch.tensor([1.0, 3.0, 0.5])])
def test_loss_of_one_class_is_its_formula_with_each_texts_weight(loss, options, expected, weights):
    logits = LOGITS.clone().requires_grad_()
    found = of("classification", loss, **options).loss(logits, batch_of(LABELS, weights))
    factors = np.ones(3) if weights is None else weights.numpy()
    assert found.item() == pytest.approx(float((expected * factors).sum()), rel=1e-5, abs=1e-6)
    found.backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("loss", ["label_smoothing", "focal"])
def test_loss_of_several_labels_is_the_mean_over_classes(loss):
    labels = torch.tensor([[1, 0, 1], [IGNORED] * 3, [0, 0, 0]])
    logits = LOGITS.clone().requires_grad_()
    found = of("classification", loss, multi_label=True).loss(logits, batch_of(labels))
    exact, targets = LOGITS.double().numpy(), labels.clamp(min=0).numpy()
    present, absent = np.logaddexp(0, -exact), np.logaddexp(0, exact)  # -log p and -log (1 - p)
    if loss == "focal":
        each = np.where(targets == 1, present, absent)
        each *= (1 - np.exp(-each)) ** 2
    else:
        targets = targets * 0.9 + 0.05
        each = targets * present + (1 - targets) * absent
    assert found.item() == pytest.approx(float(each[[0, 2]].sum() / 3), rel=1e-4)
    found.backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[1].any()


@pytest.mark.parametrize("loss", ["label_smoothing", "focal"])
def test_words_without_a_tag_cost_nothing(loss):
    labels = torch.tensor([[IGNORED, 0, 2]])
    found = of("token_classification", loss).loss(LOGITS[None], batch_of(labels))
    alone = of("classification", loss).loss(LOGITS[1:], batch_of(labels[0, 1:]))
    assert found.item() == pytest.approx(alone.item() / 2)


def test_only_cross_entropy_is_left_to_the_encoder():
    def kernel(logits, labels, ignored):
        return torch.full((len(labels),), 7.0)

    plain = trained_as(TaskConfig(name="imdb"), kernel)
    assert plain.loss(LOGITS, batch_of(LABELS)).item() == 21.0
    assert trained_as(TaskConfig(name="imdb", loss="focal"), kernel).loss(LOGITS, batch_of(LABELS)) < 21.0


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"focal_gamma": 2.0},
            "focal_gamma belongs to loss focal, not cross_entropy; remove task.focal_gamma",
        ),
        (
            {"loss": "focal", "label_smoothing": 0.1},
            "label_smoothing belongs to loss label_smoothing, not focal",
        ),
        ({"loss": "hinge"}, "'cross_entropy', 'label_smoothing' or 'focal'"),
    ],
)
def test_fields_of_another_loss_are_refused(fields, match):
    with pytest.raises(ValidationError, match=match):
        TaskConfig(name="classification", **fields)


@pytest.mark.parametrize("task", ["regression", "squad_v2", "mlm"])
def test_tasks_without_classes_refuse_a_loss_in_one_line(task):
    with pytest.raises(
        ValidationError, match=rf"loss belongs to task classification, .*, not {task}; remove"
    ):
        TaskConfig(name=task, loss="focal")


@pytest.mark.parametrize("task", ["classification", "token_classification", "wikiqa", "tariff"])
def test_training_minimises_it_and_evaluations_do_not_depend_on_it(task, configure, tmp_path):
    write_task(tmp_path / "data", task)
    seen = {}
    for loss in ("cross_entropy", "focal"):
        recorder = Recorder()
        config = configure(
            task={"name": task, "path": "data", "max_length": 24, "loss": loss},
            length={"steps": 1},
            evaluation={"at_start": True},
            workspace={
                "checkpoints": str(tmp_path / loss),
                "cache": str(tmp_path / "cache"),
                "data_roots": (str(tmp_path),),
            },
        )
        train(config, recorder, NeverStop())
        seen[loss] = recorder.series("loss")[1], recorder.series("validation_loss")[0]
    assert seen["focal"][0] < 0.9 * seen["cross_entropy"][0]
    assert seen["focal"][1] == seen["cross_entropy"][1]


@pytest.mark.parametrize("loss", ["label_smoothing", "focal"])
def test_a_teacher_shares_with_the_chosen_loss(loss):
    batch, objective, projected = an_objective(soft_weight=0.4)
    output = projected(batch)
    objective.task = build("imdb")
    soft = (objective.loss(output, batch) - 0.6 * objective.task.loss(output.logits, batch)).item()
    objective.task = of("imdb", loss)
    own = objective.task.loss(output.logits, batch).item()
    assert objective.loss(output, batch).item() == pytest.approx(0.6 * own + soft, rel=1e-5)
