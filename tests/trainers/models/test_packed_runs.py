"""Runs with the encoders that pack: every task, a teacher, several workers, pipelines and a kill."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product

import pytest

from tests.trainers.conftest import Recorder, chosen
from tests.trainers.corpora import EACH_HEAD, write_task
from trainers.config import RunConfig
from trainers.entrypoint import train
from trainers.reporting import NeverStop

TWO = {"strategy": "ddp", "workers": 2}
PIPELINE = {"strategy": "pipeline", "workers": 2}
ENGINES = ["torch"] if find_spec("deepspeed") is None else ["torch", "deepspeed"]
PIPELINES = list(product(("packed", "fused"), ENGINES))
SMALL = {"global_size": 8, "micro_size": 2}
INSIDE = {"hidden_weight": 1.0, "embedding_weight": 0.5, "relation_weight": 1.0, "cosine_weight": 0.5}

pytestmark = pytest.mark.slow


def trained(config: RunConfig) -> tuple[dict[int, float], dict[str, object]]:
    recorder = Recorder()
    outcome = train(config, recorder, NeverStop())
    assert recorder.facts.get("encoder_parity", {"passed": True})["passed"]
    return recorder.series("loss"), outcome.summary


def model(encoder: str, **changes: object) -> dict[str, object]:
    return {"name": "tiny", "dropout": 0.0, "encoder": encoder, **changes}


@pytest.mark.parametrize("task", EACH_HEAD)
def test_a_task_of_each_head_has_the_losses_and_scores_of_the_default(config_in, tmp_path, task):
    write_task(tmp_path / "data" / task, task)
    found = {}
    for encoder in ("huggingface", "packed"):
        config = config_in(
            tmp_path / encoder,
            task={"name": task, "path": task, "max_length": 40},
            model=model(encoder),
            length={"steps": 3},
            workspace__cache=str(tmp_path / "cache"),
            workspace__data_roots=(str(tmp_path / "data"),),
        )
        found[encoder] = trained(config)
    (losses, summary), (expected, default) = found["packed"], found["huggingface"]
    assert losses == pytest.approx(expected, rel=1e-4)
    assert summary["validation_loss"] == pytest.approx(default["validation_loss"], rel=1e-3)
    assert summary["score"] == pytest.approx(default["score"], rel=0.05, abs=0.02)
    assert summary["padding_pct"] == 0.0


def test_a_student_learns_the_same_from_a_teacher(config_in, tmp_path):
    teacher = train(
        config_in(tmp_path / "teacher", model__name="mini", length={"steps": 2}), Recorder(), NeverStop()
    ).checkpoint
    found = {}
    for encoder in ("huggingface", "packed"):
        config = config_in(
            tmp_path / encoder,
            model=model(encoder, teacher=teacher),
            distillation={"soft_weight": 0.5, "teacher_precision": "fp32", **INSIDE},
            length={"steps": 3},
            workspace__model_roots=(str(tmp_path),),
        )
        recorder = Recorder()
        train(config, recorder, NeverStop())
        found[encoder] = recorder
    names = ("loss", "soft_loss", "hidden_loss", "embedding_loss", "relation_loss", "cosine_loss")
    for name in names:
        expected = found["huggingface"].series(name)
        assert expected
        assert found["packed"].series(name) == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_a_step_computed_again_from_its_inputs_is_bitwise_the_same(config_in, tmp_path):
    changes = {"model": model("packed", dropout=0.1), "deterministic": True, "length": {"steps": 3}}
    plain = trained(config_in(tmp_path / "plain", **changes))[0]
    again = {"strategy": "single", "activation_checkpointing": True}
    assert trained(config_in(tmp_path / "again", parallel=again, **changes))[0] == plain


@pytest.mark.parametrize(
    ("encoder", "precision"), [("packed", "fp32"), ("packed", "bf16"), ("fused", "fp32")]
)
def test_a_killed_run_resumes_bitwise(launch, config_in, tmp_path, encoder, precision):
    changes = {
        "model": model(encoder, dropout=0.1),
        "precision": precision,
        "deterministic": True,
        "length": {"steps": 8},
        "batch": {"global_size": 8, "micro_tokens": 100},
        "checkpoint": {"every_steps": 1, "every_s": 0.0},
    }
    config = config_in(tmp_path / "killed", **changes)
    assert launch([config], kill_at=5).codes != [0]
    whole, resumed = launch([config_in(tmp_path / "whole", **changes), config]).results[0]["runs"]
    assert resumed["resumed_from"] > 0
    assert {**whole["losses"], **resumed["losses"]} == whole["losses"]
    assert resumed["weights"] == whole["weights"]


@pytest.fixture(scope="module")
def pair(request, launch, config_in, tmp_path_factory):
    """Losses by name of several runs of one pair of workers."""
    names = chosen(request, "how")
    folder = tmp_path_factory.mktemp("pair")
    changes = {"length": {"epochs": 1}, "deterministic": True}
    configs = {
        "ddp": {"parallel": TWO, "model": model("packed")},
        "budget": {
            "parallel": TWO,
            "model": model("packed"),
            "batch": {"global_size": 8, "micro_tokens": 60},
        },
        "eager": {"parallel": PIPELINE, "model": model("eager"), "batch": SMALL},
        **{
            f"{encoder}, {engine}": {
                "parallel": {**PIPELINE, "engine": engine},
                "model": model(encoder),
                "batch": SMALL,
            }
            for encoder, engine in PIPELINES
        },
    }
    configs = {name: own for name, own in configs.items() if name in names}
    ended = launch([config_in(folder / name, **changes, **own) for name, own in configs.items()])
    failed = [run for result in ended.results if result for run in result["runs"] if "failure" in run]
    assert (ended.codes, failed) == ([0, 0], [])
    runs = ended.results[0]["runs"]
    return {
        name: {int(step): loss for step, loss in run["losses"].items()}
        for name, run in zip(configs, runs, strict=True)
    }


@pytest.fixture(scope="module")
def alone(config_in, tmp_path_factory):
    """Losses of one worker that pads."""
    folder = tmp_path_factory.mktemp("alone")
    return trained(config_in(folder, model=model("huggingface"), length={"epochs": 1}, deterministic=True))[0]


@pytest.mark.parametrize(
    "how", ["ddp", "budget", "eager", *(f"{encoder}, {engine}" for encoder, engine in PIPELINES)]
)
def test_two_workers_have_the_losses_of_one_that_pads(pair, alone, how):
    assert len(alone) == 12  # 90 examples in batches of 8: the last batch has 2
    assert pair[how] == pytest.approx(alone, rel=2e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_backward_pass_in_two_parts_has_the_losses_of_one_that_pads(launch, config_in, tmp_path, precision):
    changes = {"length": {"steps": 6}, "precision": precision, "batch": SMALL}
    sizes = {"name": "mini"}  # two stages with two chunks each
    schedule = {**PIPELINE, "schedule": "zero_bubble", "partition": "time"}
    ended = launch(
        [
            config_in(tmp_path / encoder, parallel=schedule, model=model(encoder, **sizes), **changes)
            for encoder in ("packed", "fused")
        ]
    )
    assert ended.codes == [0, 0], ended.results
    expected = trained(config_in(tmp_path / "one", model=model("huggingface", **sizes), **changes))[0]
    for run in ended.results[0]["runs"]:
        losses = {int(step): loss for step, loss in run["losses"].items()}
        assert losses == pytest.approx(expected, rel=2e-4 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize("encoder", ["packed", "fused"])
def test_stages_with_dropout_resume_bitwise(launch, config_in, tmp_path, encoder):
    changes = {
        "model": model(encoder, dropout=0.1),
        "parallel": {**PIPELINE, "activation_checkpointing": True},
        "deterministic": True,
        "length": {"steps": 6},
        "batch": SMALL,
        "checkpoint": {"every_steps": 1, "every_s": 0.0},
    }
    config = config_in(tmp_path / "killed", **changes)
    assert launch([config], kill_at=3).codes != [0, 0]
    whole, resumed = launch([config_in(tmp_path / "whole", **changes), config]).results[0]["runs"]
    assert resumed["resumed_from"] > 0
    assert resumed["weights"] == whole["weights"]
