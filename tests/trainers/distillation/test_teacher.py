"""The teacher: frozen, in its own number format, and read in full."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.distillation.conftest import (
    FP32,
    INSIDE,
    an_objective,
    assert_close,
    series,
)
from trainers.config import Precision
from trainers.distillation import teacher as teachers
from trainers.distillation.teacher import LoadedTeacher, Teacher
from trainers.entrypoint import train
from trainers.model_kinds.heads import NumberHead, SpanHead, TokenHead, VocabularyHead
from trainers.reporting import NeverStop, NullSink


def test_teacher_is_frozen(distil, teacher, monkeypatch):
    loaded: list[LoadedTeacher] = []
    load = Teacher.load
    monkeypatch.setattr(Teacher, "load", lambda self, **how: loaded.append(load(self, **how)) or loaded[-1])
    train(distil(distillation={"soft_weight": 0.5, **INSIDE, **FP32}), NullSink(), NeverStop())
    (one,) = loaded
    stored = load_file(teacher / "model.safetensors")
    after = one.model.weights()
    assert after.keys() == stored.keys()
    assert [name for name in stored if not torch.equal(after[name], stored[name])] == []
    assert [p for p in one.model.parameters() if p.requires_grad or p.grad is not None] == []
    assert not one.model.training


def test_facts_say_what_ran(distil, recorder, teacher, monkeypatch):
    monkeypatch.setattr(teachers, "has_bf16", lambda device: False)
    train(distil(distillation={"soft_weight": 0.5, "relation_weight": 1.0}), recorder, NeverStop())
    facts = recorder.facts
    assert facts["teacher"] == str(teacher)
    assert facts["teacher_precision"] == "fp32"
    assert facts["teacher_logits"] == "computed in each step"
    assert facts["layer_map"] == [1, 3]
    assert facts["relation_heads"] == 4
    assert facts["teacher_sha256"] == facts["data"]["teacher.sha256"]


def test_mfu_holds_the_teacher_against_the_peak_of_its_own_format(distil, monkeypatch):
    monkeypatch.setattr(teachers, "has_bf16", lambda device: True)
    config = distil(
        distillation={"soft_weight": 0.5, **INSIDE}, rates__peak_tflops={"fp32": 1.0, "bf16": 4.0}
    )
    summary = train(config, NullSink(), NeverStop()).summary
    asked = summary["teacher_tflops"]
    assert asked > 0
    ideal = (summary["achieved_tflops"] - asked) / 1.0 + asked / 4.0
    assert summary["mfu_pct"] == pytest.approx(100.0 * ideal / config.rates.devices_per_worker)


@pytest.mark.parametrize(
    ("wanted", "instructions", "name", "dtype"),
    [
        ("auto", False, "fp32", torch.float32),
        ("auto", True, "bf16 weights and arithmetic", torch.bfloat16),
        ("fp32", True, "fp32", torch.float32),
        ("bf16", True, "bf16 weights and arithmetic", torch.bfloat16),
        ("bf16", False, "bf16 operands and results, fp32 arithmetic", torch.float32),
    ],
)
def test_number_format_on_a_cpu(monkeypatch, wanted, instructions, name, dtype):
    monkeypatch.setattr(teachers, "has_bf16", lambda device: instructions)
    found = teachers.format_on(torch.device("cpu"), wanted)
    assert found.name.startswith(name)
    assert found.dtype is dtype


def test_number_format_on_a_gpu_is_fp16():
    found = teachers.format_on(torch.device("cuda"), "auto")
    assert (found.dtype, found.precision) == (torch.float16, Precision.fp16)


def test_fp32_teacher_of_a_run_in_tf32_computes_in_tf32():
    found = teachers.format_on(torch.device("cuda"), "fp32", Precision.tf32)
    assert (found.name, found.dtype, found.precision) == ("tf32", torch.float32, Precision.tf32)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["bf16", "auto"])
def test_half_precision_answers_are_near(distil, wanted):
    settings = {"soft_weight": 0.5, **INSIDE, "teacher_precision": wanted}
    one = {"length": {"steps": 1}, "model__dropout": 0.0}
    found = series(distil(distillation=settings, **one))
    plain = series(distil("plain", distillation={**settings, "teacher_precision": "fp32"}, **one))
    assert_close(found, plain, rel=0.05)


def test_student_in_half_precision_does_not_convert_its_teacher():
    batch, objective, projected = an_objective(soft_weight=0.5, **INSIDE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = projected(batch)
        assert output.logits.dtype == torch.bfloat16
        loss = objective.loss(output, batch)
        assert objective._teacher(batch, with_hidden=False).logits.dtype == torch.float32
    assert loss.dtype == torch.float32


def test_relations_are_read_beside_a_fused_attention():
    batch, _, projected = an_objective(relation_weight=1.0)
    attention = projected.student.encoder.encoder.layer[-1].attention.self
    assert attention.config._attn_implementation == "sdpa"
    projected.eval()
    with torch.no_grad():
        output = projected(batch)
        states = projected.student(batch, with_hidden=True).hidden[-2]
        expected = [getattr(attention, name)(states) for name in ("query", "key", "value")]
    for found, wanted in zip(output.relations, expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
# torch's compiler uses what torch deprecates, and asks hidden states for their gradients.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_relations_are_read_inside_a_compiled_encoder(distil, monkeypatch):
    from torch._dynamo.utils import counters

    # The graph alone matters here, not the C++ that it becomes, which takes a minute to compile.
    compile_layer = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, **how: compile_layer(layer, backend="aot_eager", **how)
    )
    settings = {"soft_weight": 0.0, "relation_weight": 1.0, "hidden_weight": 1.0}
    # All texts are longer, so that batches have one shape, and layers are compiled for no other.
    task = {"name": "imdb", "path": "reviews", "max_length": 12}
    changes = {"distillation": settings, "model__dropout": 0.0, "length": {"steps": 3}, "task": task}
    graphs = counters["stats"]["unique_graphs"]
    assert_close(series(distil("compiled", **changes, model__compile=True)), series(distil(**changes)))
    assert counters["stats"]["unique_graphs"] > graphs


def test_nothing_is_kept_of_an_evaluation():
    batch, _, projected = an_objective(relation_weight=1.0)
    projected.student(batch)
    assert projected._tap.take() == ()


def test_losses_of_every_head():
    """Numbers, spans, tokens and masked tokens: no task of this corpus has them."""
    for head, labels in (
        (NumberHead(mean=3.5, scale=2.0), torch.tensor([1.0, 5.0])),
        (TokenHead(("O", "B-x", "I-x")), torch.tensor([[-100, 0, 1, 2, -100], [-100, 0, -100, -100, -100]])),
        (SpanHead(), torch.tensor([[1, 2], [0, 0]])),
        (VocabularyHead(), torch.tensor([[-100, 7, -100, -100, 9], [-100, -100, 8, -100, -100]])),
    ):
        batch, objective, projected = an_objective(head=head, labels=labels, soft_weight=1.0)
        loss = objective.loss(projected(batch), batch)
        assert loss.item() > 0
        loss.backward()
        same = objective._teacher(batch, with_hidden=False)
        assert float(objective._soft(same.logits, same.logits, batch)) == pytest.approx(0.0, abs=1e-5)
