"""Students with a teacher: what is refused, kept, frozen and resumed, and whether they learn from it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainers.conftest import Recorder
from trainers.config import Distillation, Precision
from trainers.data import tokenizers
from trainers.data.batches import Batch
from trainers.distillation import teacher as teachers
from trainers.distillation.logit_cache import CachedLogits
from trainers.distillation.objective import DistillationObjective
from trainers.distillation.projected_student import ProjectedStudent
from trainers.distillation.taps import RelationTap
from trainers.distillation.teacher import LoadedTeacher, Teacher
from trainers.entrypoint import train
from trainers.errors import BadDataError, BadSpecError, NotFiniteError
from trainers.models.heads import IGNORED, ClassHead, SpanHead, VocabularyHead
from trainers.models.origin import Preset
from trainers.models.student import build
from trainers.optimizers.schedule import learning_rate
from trainers.reporting import NeverStop, NullSink
from trainers.tasks import TASKS
from trainers.tasks.imdb.task import Imdb

FP32 = {"teacher_precision": "fp32"}
"""The same on CPUs with and without bf16, which `auto` would use."""
INSIDE = {"hidden_weight": 1.0, "embedding_weight": 0.5, "relation_weight": 1.0, "cosine_weight": 0.5}
TWO = {"strategy": "ddp", "workers": 2}
STEPS = 9
LONG = {"length": {"epochs": 10}, "optimizer__learning_rate": 2e-3}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A model root."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def teacher(models, config_in) -> Path:
    """A model that was trained on the corpus: 4 layers, width 256."""
    config = config_in(
        models / "mini", model__student="mini", length={"epochs": 4}, optimizer__learning_rate=5e-4
    )
    outcome = train(config, NullSink(), NeverStop())
    assert outcome.summary["accuracy"] > 0.9
    return Path(outcome.checkpoint)


@pytest.fixture
def distil(config_in, models, teacher, tmp_path):
    """Make the configuration of a run with a teacher, with checkpoints and a cache of the test's own."""

    def make(to: str = "checkpoints", **changes):
        return config_in(
            tmp_path / to,
            **{
                "model__teacher": str(teacher),
                "workspace__model_roots": (str(models), str(tmp_path)),
                "workspace__cache": str(tmp_path / "cache"),
                **changes,
            },
        )

    return make


@pytest.fixture
def copied(teacher, tmp_path) -> Path:
    """A copy of the teacher, to be changed: without the manifest that seals it."""
    ignored = shutil.ignore_patterns("manifest.json")
    return Path(shutil.copytree(teacher, tmp_path / "copied", ignore=ignored))


def rewrite_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def rewrite_weights(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(weights), file)


def without_head(weights):
    return {name: tensor for name, tensor in weights.items() if not name.startswith("classifier.")}


def with_span_head(weights):
    return without_head(weights) | {
        "qa_outputs.weight": torch.zeros(2, 256),
        "qa_outputs.bias": torch.zeros(2),
    }


def series(config) -> dict[str, dict[int, float]]:
    """Losses of a run by name and step."""
    recorder = Recorder()
    train(config, recorder, NeverStop())
    names = {point.name for point in recorder.seen if point.name.endswith("loss")}
    return {name: recorder.series(name) for name in names - {"validation_loss"}}


def assert_close(one, other, rel=2e-3):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name] == pytest.approx(other[name], rel=rel, abs=1e-5), name


# What is learned


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
    model = {"student": str(teacher), "teacher": str(teacher), "layers": [1, 3]}
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
    model = {"student": str(teacher), "teacher": str(teacher)}
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
    config = distil(model__student=str(teacher), length={"steps": 1})
    train(config, recorder, NeverStop())
    (said,) = [line for line in recorder.logs if "no larger than its student" in line]
    assert said.endswith("(4 layers of width 256, and 4 of 256); is this the intended model?")
    smaller = Recorder()
    train(distil("smaller", length={"steps": 1}), smaller, NeverStop())
    assert not [line for line in smaller.logs if "no larger" in line]


# Workers and micro-batches


@pytest.fixture(scope="module")
def shapes(config_in, models, teacher, tmp_path_factory):
    """Configurations of one computation, cut in different ways."""
    folder = tmp_path_factory.mktemp("shapes")

    def of(name: str, **changes):
        return config_in(
            folder / name,
            model={"student": "tiny", "teacher": str(teacher), "dropout": 0.0},
            workspace__model_roots=(str(models),),
            distillation={"soft_weight": 0.5, **INSIDE},
            length={"epochs": 1},
            deterministic=True,
            **changes,
        )

    return {
        "whole": of("whole"),
        "accumulated": of("accumulated", batch={"global_size": 8, "micro_size": 2}),
        "together": of("together", parallel=TWO),
    }


@pytest.fixture(scope="module")
def whole(shapes) -> dict[str, dict[int, float]]:
    """Losses of one worker whose micro-batch is the global batch."""
    return series(shapes["whole"])


@pytest.mark.slow
def test_accumulation_changes_nothing(shapes, whole):
    assert set(whole) == {"loss", "task_loss", "soft_loss", *(f"{name[:-7]}_loss" for name in INSIDE)}
    assert_close(series(shapes["accumulated"]), whole)


@pytest.mark.slow
def test_two_workers_have_the_losses_of_one(shapes, whole, launch):
    ended = launch([shapes["together"]])
    losses = {
        name: {int(step): loss for step, loss in found.items()}
        for name, found in ended.results[0]["runs"][0]["losses_by_name"].items()
    }
    assert len(losses["loss"]) == 12  # the last batch has 2 examples
    assert_close(losses, whole)


def test_points_are_documented(whole):
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = page.split("## Points of distillation\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(whole) - {"loss"}


def test_a_workers_stand_in_counts_nothing():
    batch, objective, projected = an_objective(soft_weight=0.5, **INSIDE)
    idle = Batch(batch.input_ids, None, None, batch.labels, batch.rows, 0, 0, 0)
    assert objective.loss(projected(idle), idle).item() == 0.0
    assert objective.local_sums() == [0] * 7


# The teacher


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
    attention = projected.student.bert.bert.encoder.layer[-1].attention.self
    assert attention.config._attn_implementation == "sdpa"
    projected.eval()
    with torch.no_grad():
        output = projected(batch)
        states = projected.student(batch, with_hidden=True).hidden[-2]
        expected = [getattr(attention, name)(states) for name in ("query", "key", "value")]
    for found, wanted in zip(output.relations, expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses what torch deprecates
def test_relations_are_read_inside_a_compiled_encoder(distil):
    settings = {"soft_weight": 0.0, "relation_weight": 1.0, "hidden_weight": 1.0}
    changes = {"distillation": settings, "model__dropout": 0.0, "length": {"steps": 3}}
    assert_close(series(distil("compiled", **changes, model__compile=True)), series(distil(**changes)))


def test_nothing_is_kept_of_an_evaluation():
    batch, _, projected = an_objective(relation_weight=1.0)
    projected.student(batch)
    assert projected._tap.take() == ()


def test_losses_of_every_head():
    """Spans and masked tokens: no task of this corpus has them."""
    for head, labels in (
        (SpanHead(), torch.tensor([[1, 2], [0, 0]])),
        (VocabularyHead(), torch.tensor([[-100, 7, -100, -100, 9], [-100, -100, 8, -100, -100]])),
    ):
        batch, objective, projected = an_objective(head=head, labels=labels, soft_weight=1.0)
        loss = objective.loss(projected(batch), batch)
        assert loss.item() > 0
        loss.backward()
        same = objective._teacher(batch, with_hidden=False)
        assert float(objective._soft(same.logits, same.logits, batch)) == pytest.approx(0.0, abs=1e-5)


# Kept logits


def forbidden(*_arguments: object, **_settings: object):
    raise AssertionError("the teacher was loaded")


@pytest.mark.slow
def test_second_run_does_not_load_the_teacher(distil, recorder, monkeypatch):
    train(distil(), recorder, NeverStop())
    assert recorder.facts["teacher_logits"] == "computed once, cached on disk"
    assert any("logits for 90 examples" in line for line in recorder.logs)
    first = recorder.series("loss")
    monkeypatch.setattr(Teacher, "load", forbidden)
    for seed in (0, 1):
        again = Recorder()
        train(distil(f"again-{seed}", seed=seed), again, NeverStop())
        assert (again.series("loss") == first) is (seed == 0)


@pytest.mark.slow
@pytest.mark.parametrize("precision, rel", [("fp32", 1e-4), ("auto", 2e-3)])
def test_kept_logits_are_those_of_each_step(distil, precision, rel):
    # Rounding depends on the width of a batch, which is another where logits are kept.
    kept, computed = (
        series(distil(str(cache), distillation={"cache_logits": cache, "teacher_precision": precision}))
        for cache in (True, False)
    )
    assert_close(kept, computed, rel=rel)


def test_changed_teacher_is_asked_anew(distil, copied, tmp_path, monkeypatch):
    config = distil(model__teacher=str(copied))
    train(config, NullSink(), NeverStop())
    rewrite_weights(copied, lambda weights: weights | {"classifier.bias": weights["classifier.bias"] + 1})
    monkeypatch.setattr(Teacher, "load", forbidden)
    with pytest.raises(AssertionError, match="the teacher was loaded"):
        train(config, NullSink(), NeverStop())
    assert len(list((tmp_path / "cache" / "teacher-logits").glob("*/logits.npy"))) == 1


def test_logits_that_are_not_finite_are_not_kept(distil, copied, tmp_path):
    rewrite_weights(copied, lambda weights: weights | {"classifier.weight": torch.full((2, 256), 3e38)})
    with pytest.raises(NotFiniteError, match="non-finite logits in fp32; its weights are damaged"):
        train(distil(model__teacher=str(copied), distillation=FP32), NullSink(), NeverStop())
    assert not list((tmp_path / "cache" / "teacher-logits").glob("*/logits.npy"))


@pytest.mark.slow
def test_second_stage_reads_kept_logits(distil, monkeypatch):
    settings = {"soft_weight": 0.5, "hidden_weight": 1.0, "hidden_first_fraction": 0.5}
    asked = []
    call = LoadedTeacher.__call__

    def counted(self, batch, *, with_hidden):
        asked.append(with_hidden)
        return call(self, batch, with_hidden=with_hidden)

    train(distil(distillation=settings), NullSink(), NeverStop())
    monkeypatch.setattr(LoadedTeacher, "__call__", counted)
    train(distil("again", distillation=settings, seed=1), NullSink(), NeverStop())
    assert asked == [True] * 3


def test_kept_span_logits_are_ragged(tmp_path):
    logits = np.arange(16, dtype=np.float32).reshape(8, 2)
    kept = CachedLogits(logits, np.array([0, 3, 8]))
    rows = torch.tensor([1, 0])
    batch = Batch(torch.zeros(2, 6, dtype=torch.long), None, None, rows, rows, 2, 8, 12)
    found = kept(batch, seed=0, epoch=0).teacher_logits.numpy()
    assert found.shape == (2, 6, 2)
    assert (found[0, :5] == logits[3:]).all()
    assert (found[1, :3] == logits[:3]).all()
    assert found[0, 5:].sum() == found[1, 3:].sum() == 0


# Resuming


def tensors(checkpoint: str) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": tensor.clone()
        for name in ("model", "projections", "optimizer", "random")
        for key, tensor in load_file(Path(checkpoint) / f"{name}.safetensors").items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adan"])
def test_stopped_run_resumes_bitwise(config_in, models, teacher, tmp_path, optimizer):
    changes = {
        "optimizer": {"name": optimizer, "learning_rate": 1e-3},
        "model": {"student": "tiny", "teacher": str(teacher)},
        "workspace__model_roots": (str(models),),
        "distillation": {"soft_weight": 0.5, **INSIDE, "hidden_first_fraction": 0.6, "schedule": "linear"},
        "length": {"steps": STEPS},
        "deterministic": True,
    }
    whole = Recorder()
    ended = train(config_in(tmp_path / "whole", **changes), whole, NeverStop())
    config = config_in(tmp_path / "parts", **changes)
    points: dict[str, dict[int, float]] = {}
    resumed = []
    for stop_after in (3, 5, 7, None):
        part = Recorder(stop_after=stop_after)
        outcome = train(config, part, part)
        resumed.append(part.resumed_from)
        for name in ("loss", "task_loss", "soft_loss", "hidden_loss", "relation_loss"):
            points[name] = points.get(name, {}) | part.series(name)
    assert resumed == [0, 4, 6, 8]  # in the first stage, between the two, and in the second
    assert points == {name: whole.series(name) for name in points}
    one, other = tensors(ended.checkpoint), tensors(outcome.checkpoint)
    assert "projections/2.weight" in one
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_projections_are_kept_apart_from_the_model(distil):
    outcome = train(distil(distillation={"soft_weight": 0.5, **INSIDE}), NullSink(), NeverStop())
    names = set(load_file(Path(outcome.checkpoint) / "model.safetensors"))
    assert {name for name in names if not name.startswith(("bert.", "classifier."))} == set()
    assert set(load_file(Path(outcome.checkpoint) / "projections.safetensors")) == {
        "0.weight", "1.weight", "2.weight",
    }  # fmt: skip


@pytest.mark.slow
def test_teacher_that_changed_between_attempts_is_refused(distil, copied):
    config = distil(model__teacher=str(copied))
    part = Recorder(stop_after=2)
    train(config, part, part)
    rewrite_weights(copied, lambda weights: weights | {"classifier.bias": weights["classifier.bias"] + 1})
    with pytest.raises(BadDataError, match=r"checkpoint of step 3: teacher\.sha256 was .* and is"):
        train(config, NullSink(), NeverStop())


# Refusals


def refused(config, match: str) -> None:
    with pytest.raises(BadSpecError, match=match) as caught:
        train(config, NullSink(), NeverStop())
    assert "\n" not in str(caught.value)


def test_preset_as_a_teacher(distil):
    refused(distil(model__teacher="mini"), r"model\.teacher 'mini' is a preset, whose weights are random")


def test_missing_teacher(distil):
    refused(
        distil(model__teacher="nobody"), r"model\.teacher 'nobody' is not a preset .* does not exist under"
    )


def test_another_vocabulary(distil, copied, teacher):
    tokenizer = tokenizers.train_wordpiece(["Only these few words."], 60)
    tokenizer.save(str(copied / tokenizers.FILE))
    pieces = tokenizer.get_vocab_size()
    refused(
        distil(model__student=str(teacher), model__teacher=str(copied)),
        rf"different vocabulary than the student: {pieces} and \d+ pieces, first difference at \d+ \('",
    )


def test_same_vocabulary_in_another_file_is_accepted(distil, copied, teacher):
    file = copied / tokenizers.FILE
    file.write_text(json.dumps(json.loads(file.read_text()), indent=3))
    assert file.read_bytes() != (teacher / tokenizers.FILE).read_bytes()
    config = distil(model__student=str(teacher), model__teacher=str(copied), length={"steps": 1})
    assert train(config, NullSink(), NeverStop()).status == "completed"


@pytest.mark.slow
def test_headless_teacher_is_refused_for_its_logits_alone(distil, copied):
    rewrite_weights(copied, without_head)
    refused(
        distil(model__teacher=str(copied)),
        r"was trained to predict nothing, as it has no head, but the task needs classes.*fine-tune it",
    )
    settings = {"soft_weight": 0.0, "hidden_weight": 1.0}
    config = distil(model__teacher=str(copied), distillation=settings, length={"steps": 1})
    assert train(config, NullSink(), NeverStop()).status == "completed"


def test_teacher_of_another_kind_of_task(distil, copied):
    rewrite_weights(copied, with_span_head)
    refused(
        distil(model__teacher=str(copied)),
        r"trained to predict spans of a text, but the task needs classes",
    )


def test_teacher_of_other_classes(distil, copied):
    rewrite_config(copied, id2label={"0": "cat", "1": "dog"})
    refused(distil(model__teacher=str(copied)), r"calls class 0 'cat', but the task calls it 'negative'")


def test_teacher_may_spell_classes_as_files_do(distil, copied):
    rewrite_config(copied, id2label={"0": "NEG", "1": "POS"})
    config = distil(model__teacher=str(copied), length={"steps": 1})
    assert train(config, NullSink(), NeverStop()).status == "completed"


def test_teacher_of_swapped_classes(distil, copied):
    rewrite_config(copied, id2label={"0": "POS", "1": "NEG"})
    refused(distil(model__teacher=str(copied)), r"calls class 0 'POS', but the task calls it 'negative'")


@pytest.mark.parametrize("keys", [("a", "b"), ("0", "5")])
def test_teacher_whose_classes_are_not_numbered(distil, copied, keys):
    rewrite_config(copied, id2label=dict(zip(keys, ("negative", "positive"), strict=True)))
    refused(
        distil(model__teacher=str(copied)),
        rf"id2label has the keys {keys[0]}, {keys[1]}; number its classes 0 to 1",
    )


def test_teacher_without_layers(distil, copied):
    rewrite_config(copied, num_hidden_layers=0)
    settings = {"soft_weight": 0.0, "hidden_weight": 1.0}
    refused(
        distil(model__teacher=str(copied), distillation=settings),
        r"num_hidden_layers is 0; give a whole number of at least 1",
    )


def test_teacher_of_more_classes(distil, copied):
    rewrite_config(copied, id2label={"0": "negative", "1": "positive", "2": "neutral"})
    refused(distil(model__teacher=str(copied)), r"has 3 classes, but the task has 2")


@pytest.mark.slow
def test_teacher_of_unnamed_classes_is_taken_at_its_numbers(distil, copied, recorder):
    rewrite_config(copied, id2label={"0": "LABEL_0", "1": "LABEL_1"})
    train(distil(model__teacher=str(copied), length={"steps": 1}), recorder, NeverStop())
    assert any("classes have no names" in line for line in recorder.logs)


def test_teacher_whose_pooler_is_gone(distil, copied):
    rewrite_weights(
        copied, lambda weights: {name: w for name, w in weights.items() if not name.startswith("bert.pooler")}
    )
    refused(distil(model__teacher=str(copied)), r"has no weight bert\.pooler.* for task imdb; fine-tune")


@pytest.mark.parametrize("settings", [{"soft_weight": 0.5}, {"soft_weight": 0.0, "hidden_weight": 1.0}])
def test_teacher_with_too_few_positions(distil, copied, settings):
    rewrite_config(copied, max_position_embeddings=32)
    refused(
        distil(model__teacher=str(copied), distillation=settings),
        r"has 32 positions, fewer than task\.max_length 48; lower task\.max_length to 32",
    )


@pytest.mark.parametrize(
    ("layers", "match"),
    [
        ([0], r"layer_map has 1 layers, but the student has 2"),
        ([0, 1, 2], r"layer_map has 3 layers, but the student has 2"),
        ([0, 4], r"layer_map has layer 4, but the teacher has 4; use 0 to 3"),
    ],
)
def test_layer_map_that_does_not_fit(distil, layers, match):
    refused(distil(distillation={"hidden_weight": 1.0, "layer_map": layers}), match)


def test_fp16_teacher_on_a_cpu(distil):
    refused(
        distil(distillation={"teacher_precision": "fp16"}),
        r"distillation\.teacher_precision fp16 needs a GPU",
    )


def test_first_stage_without_anything_to_learn():
    with pytest.raises(ValueError, match=r"hidden_first_fraction 0\.5 has no loss to train first"):
        Distillation(hidden_first_fraction=0.5)


# Small models in memory


class Zero(Imdb):
    """A task whose loss is nothing, for heads of other shapes."""

    def loss(self, logits, batch):
        return logits.float().sum() * 0.0


def an_objective(*, head=None, labels=None, **weights):
    """A batch of two, the objective and what is trained: 2 layers of 128 from 4 layers of 256."""
    torch.manual_seed(0)
    ids = torch.randint(5, 50, (2, 5))
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    found = labels if labels is not None else torch.tensor([0, 1])
    guessed = (found != IGNORED).flatten().nonzero()[:, 0] if isinstance(head, VocabularyHead) else None
    batch = Batch(ids * mask, mask, None, found, torch.arange(2), 2, 8, 10, guessed=guessed)
    head = head or ClassHead(("negative", "positive"))
    shape = {"head": head, "vocabulary_size": 60, "dropout": 0.0, "max_length": 16, "pad_id": 0}
    student, big = build(Preset("tiny"), **shape), build(Preset("mini"), **shape)
    config = Distillation(**{"soft_weight": 0.0, **weights})
    levels = range(3) if config.hidden_weight else ()
    projected = ProjectedStudent(student, 256, levels=levels, relations=bool(config.relation_weight))
    tap = RelationTap(big, 3) if config.relation_weight else None
    loaded = LoadedTeacher(big.eval(), tap, torch.device("cpu"), with_head=True)
    task = (Imdb if isinstance(head, ClassHead) else Zero)(TASKS["imdb"])
    objective = DistillationObjective(
        task,
        config,
        head,
        projected,
        loaded,
        batches_bring_logits=False,
        layer_map=(1, 3),
        relation_heads=4,
    )
    objective.begin_step(0, 1)
    return batch, objective, projected
