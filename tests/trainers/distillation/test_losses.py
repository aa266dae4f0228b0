"""The losses of distillation against their formulas in float64, one example and one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainers.config import Distillation
from trainers.distillation import losses, plan

LENGTHS = (7, 3, 5)
WIDTH = 7
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(3)


def softmax(values):
    shifted = np.exp(np.asarray(values, dtype=np.float64) - np.max(values))
    return shifted / shifted.sum()


def divergence(student, teacher):
    p, q = softmax(teacher), softmax(student)
    return float(sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True)))


def pair(*shape: int, other: int | None = None):
    return torch.randn(*shape) * 2, torch.randn(*shape[:-1], other or shape[-1]) * 2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_soft_targets(temperature):
    student, teacher = pair(5, 3)
    expected = sum(
        temperature**2 * divergence(s.numpy() / temperature, t.numpy() / temperature)
        for s, t in zip(student, teacher, strict=True)
    )
    assert float(losses.soft_targets(student, teacher, temperature)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_soft_spans_leave_padding_out(temperature):
    student, teacher = pair(3, WIDTH, 2)
    expected = sum(
        temperature**2
        * divergence(
            student[i, :length, end].numpy() / temperature, teacher[i, :length, end].numpy() / temperature
        )
        / 2
        for i, length in enumerate(LENGTHS)
        for end in (0, 1)
    )
    found = losses.soft_spans(student, teacher, temperature, MASK)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_soft_tokens_are_a_mean_within_each_sequence():
    student, teacher = pair(3, 11)
    each = [4.0 * divergence(s.numpy() / 2, t.numpy() / 2) for s, t in zip(student, teacher, strict=True)]
    found = losses.soft_tokens(student, teacher, 2.0, torch.tensor([2, 2, 1]))
    assert float(found) == pytest.approx((each[0] + each[1]) / 2 + each[2], rel=1e-5)


def test_squared_distance_leaves_padding_out():
    student, teacher = pair(3, WIDTH, 4)
    expected = sum(
        float(np.mean((student[i, :n].double().numpy() - teacher[i, :n].double().numpy()) ** 2))
        for i, n in enumerate(LENGTHS)
    )
    assert float(losses.squared_distance(student, teacher, MASK)) == pytest.approx(expected, rel=1e-5)


def test_cosine_distance_leaves_padding_out():
    student, teacher = pair(3, WIDTH, 4)
    expected = 0.0
    for i, length in enumerate(LENGTHS):
        rows = zip(student[i, :length].double().numpy(), teacher[i, :length].double().numpy(), strict=True)
        expected += np.mean([1 - s @ t / np.linalg.norm(s) / np.linalg.norm(t) for s, t in rows])
    assert float(losses.cosine_distance(student, teacher, MASK)) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("heads", [1, 4])
def test_relations_of_different_widths(heads):
    student, teacher = pair(3, WIDTH, 8, other=12)
    expected = 0.0
    for i, length in enumerate(LENGTHS):
        each = []
        for head in range(heads):
            scores = []
            for states in (student, teacher):
                width = states.shape[-1] // heads
                part = states[i, :length, head * width : (head + 1) * width].double().numpy()
                scores.append(part @ part.T / math.sqrt(width))
            each += [divergence(s, t) for s, t in zip(*scores, strict=True)]
        expected += float(np.mean(each))
    assert float(losses.relations(student, teacher, heads, MASK)) == pytest.approx(expected, rel=1e-4)


LOSSES = {
    "soft_targets": lambda s, t, mask: losses.soft_targets(s[:, 0], t[:, 0], 2.0),
    "soft_spans": lambda s, t, mask: losses.soft_spans(s[:, :, :2], t[:, :, :2], 2.0, mask),
    "squared_distance": losses.squared_distance,
    "cosine_distance": losses.cosine_distance,
    "relations": lambda s, t, mask: losses.relations(s, t, 2, mask),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_sum_over_examples_whatever_is_padded_on(loss):
    student, teacher = pair(3, WIDTH, 4)
    together = loss(student, teacher, MASK)
    alone = sum(loss(student[i : i + 1, :n], teacher[i : i + 1, :n], None) for i, n in enumerate(LENGTHS))
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_zero_for_the_teacher_itself_and_padding_gets_no_gradient(loss):
    _, teacher = pair(3, WIDTH, 4)
    assert float(loss(teacher, teacher, MASK)) == pytest.approx(0.0, abs=1e-5)
    student = torch.randn(3, WIDTH, 4, requires_grad=True)
    loss(student, teacher, MASK).backward()
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    assert student.grad[~MASK].abs().sum() == 0
    assert student.grad[MASK].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_computed_in_fp32(dtype):
    student, teacher = (values.to(dtype) for values in pair(3, WIDTH, 4))
    for loss in LOSSES.values():
        found = loss(student, teacher, MASK)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, loss(student.float(), teacher.float(), MASK))


def test_weights_are_constant_by_default():
    config = Distillation(soft_weight=0.25, hidden_weight=3.0)
    first, last = (plan.weights(config, step, 10) for step in (0, 9))
    assert first == last == plan.LossWeights(0.75, 0.25, 3.0, 0.0, 0.0, 0.0)
    assert first.inside


def test_linear_weights_fall_while_the_tasks_rises():
    config = Distillation(soft_weight=0.5, relation_weight=2.0, schedule="linear")
    weights = [plan.weights(config, step, 4) for step in range(4)]
    assert [one.soft for one in weights] == [0.5, 0.375, 0.25, 0.125]
    assert [one.task for one in weights] == [0.5, 0.625, 0.75, 0.875]
    assert [one.relation for one in weights] == [2.0, 1.5, 1.0, 0.5]


def test_two_stages_learn_the_inside_first_and_then_nothing_of_it():
    config = Distillation(soft_weight=0.5, hidden_weight=1.0, cosine_weight=2.0, hidden_first_fraction=0.25)
    weights = [plan.weights(config, step, 10) for step in range(10)]
    assert weights[:3] == [plan.LossWeights(0.0, 0.0, 1.0, 0.0, 0.0, 2.0)] * 3
    assert weights[3:] == [plan.LossWeights(0.5, 0.5, 0.0, 0.0, 0.0, 0.0)] * 7
    assert [one.inside for one in weights] == [True] * 3 + [False] * 7


def test_linear_schedule_of_two_stages_begins_with_the_second():
    config = Distillation(soft_weight=0.8, hidden_weight=1.0, hidden_first_fraction=0.5, schedule="linear")
    weights = [plan.weights(config, step, 8) for step in range(8)]
    assert [one.hidden for one in weights] == [1.0] * 4 + [0.0] * 4
    assert [one.soft for one in weights[4:]] == pytest.approx([0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [(2, 6, (2, 5)), (4, 6, (1, 2, 4, 5)), (4, 12, (2, 5, 8, 11)), (3, 3, (0, 1, 2)), (4, 2, (0, 0, 1, 1))],
)
def test_layers_are_spread_evenly(student, teacher, expected):
    assert plan.spread(student, teacher) == expected


@pytest.mark.parametrize(
    ("widths", "attention_heads", "expected"),
    [
        ((384, 384), (12, 12), 12),
        ((256, 384), (4, 12), 8),
        ((384, 768), (6, 12), 12),
        ((128, 30), (2, 5), 2),
    ],
)
def test_relation_heads_divide_both_widths(widths, attention_heads, expected):
    assert plan.relation_heads(widths, attention_heads) == expected
