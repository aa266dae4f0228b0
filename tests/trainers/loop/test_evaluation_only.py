"""Runs that do not train: `length: {steps: 0}` evaluates the model that is given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from tests.trainers.corpora import write_task
from trainers.entrypoint import train
from trainers.reporting import NeverStop
from trainers.tasks import TASKS

NONE = {"length": {"steps": 0}}
TRAINED = {"samples_per_s", "tokens_per_s", "achieved_tflops", "padding_pct", "goodput", "noise_scale"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for task in TASKS:
        write_task(folder / task, task)
    return folder


@pytest.fixture
def of_task(config_in, data, tmp_path):
    """The configuration of a run of a task that trains nothing."""

    def make(task: str, name: str = "run", **changes):
        level = {"level": 4} if task == "tariff" else {}
        fields = {"name": task, "path": task, "max_length": 32, **level}
        roots = {"workspace__data_roots": (str(data),)}
        return config_in(tmp_path / name, **{**NONE, "task": fields, **roots, **changes})

    return make


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_weights_halve_for_every_task_and_scores_stay(of_task, recorder, task):
    found = {}
    for word in ("fp32", "fp16", "bf16"):
        heard = type(recorder)()
        outcome = train(of_task(task, word, numerics={"evaluation": word}), heard, NeverStop())
        assert (outcome.status, outcome.step, outcome.total_steps) == ("completed", 0, 0)
        summary = found[word] = outcome.summary
        assert heard.facts["evaluation_precision"].startswith(word)
        assert heard.facts["optimizer_implementation"] is None
        assert not TRAINED & summary.keys()
        assert summary["train_loss"] is None
        assert 0.0 < summary["example_ms_p50"] <= summary["example_ms_p95"]
        assert summary["evaluation_memory_mib"] > 0.0
        assert "loss" not in {point.name for point in heard.seen}
        assert "training" not in heard.phases
    whole = found["fp32"]["weight_memory_mib"]
    assert whole * 2**20 == 4 * found["fp32"]["parameters"]
    for word in ("fp16", "bf16"):
        assert found[word]["weight_memory_mib"] == whole / 2
        assert found[word]["validation_loss"] == pytest.approx(found["fp32"]["validation_loss"], rel=2e-2)


def test_the_loss_is_that_of_the_model_that_a_training_begins_with(configure, config_in, tmp_path, recorder):
    evaluated = train(config_in(tmp_path / "none", **NONE), recorder, NeverStop())
    still = train(
        configure(length={"steps": 1}, optimizer={"learning_rate": 1e-12, "weight_decay": 0.0}),
        type(recorder)(),
        NeverStop(),
    )
    assert evaluated.summary["validation_loss"] == pytest.approx(still.summary["validation_loss"], rel=1e-6)


def test_the_best_checkpoint_is_the_given_model(configure, recorder):
    outcome = train(configure(**NONE, numerics={"evaluation": "bf16"}), recorder, NeverStop())
    assert (outcome.summary["best_step"], recorder.saved) == (0, [0])
    assert outcome.summary["best_checkpoint"] == outcome.checkpoint
    stored = load_file(Path(outcome.checkpoint) / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert load_file(Path(outcome.checkpoint) / "optimizer.safetensors") == {}


def test_a_trained_model_scores_as_its_own_run_did_and_nothing_is_written_again(
    config_in, tmp_path, recorder
):
    no_test = {"task": {"name": "imdb", "path": "reviews", "max_length": 48, "test": "none"}}
    trained = train(config_in(tmp_path / "trained", **no_test), recorder, NeverStop())
    heard = type(recorder)()
    config = config_in(
        tmp_path / "evaluated",
        **NONE,
        **no_test,
        model={"name": trained.checkpoint},
        workspace__model_roots=(str(tmp_path / "trained"),),
    )
    evaluated = train(config, heard, NeverStop())
    for name in ("accuracy", "validation_loss"):
        assert evaluated.summary[name] == trained.summary[name]
    assert (heard.saved, evaluated.checkpoint, evaluated.summary["best_checkpoint"]) == ([], None, None)
    assert not list((tmp_path / "evaluated").glob("*/step-*"))


@pytest.mark.slow
def test_an_evaluation_that_was_stopped_begins_again(configure, recorder):
    recorder.stop_after = 0
    stopped = train(configure(**NONE), recorder, recorder)
    assert (stopped.status, stopped.summary["best_step"]) == ("stopped", None)
    done = train(configure(**NONE), type(recorder)(), NeverStop())
    assert done.status == "completed"
    again = train(configure(**NONE), type(recorder)(), NeverStop())
    assert again.summary["validation_loss"] == done.summary["validation_loss"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"name": "tiny", "teacher": "x"}},
            "length.steps 0 .*, but model.teacher x",
        ),
        ({"telemetry": {"profile_steps": 2}}, "but telemetry.profile_steps 2 profiles training steps"),
        ({"telemetry": {"trace_steps": 2}}, "but telemetry.trace_steps 2 traces training steps"),
        (
            {"parallel": {"strategy": "pipeline", "workers": 2, "partition": "time"}},
            "but parallel.partition time measures training steps",
        ),
    ],
)
def test_what_only_training_has_is_refused(configure, changes, message):
    with pytest.raises(ValidationError, match=message):
        configure(**NONE, **changes)


@pytest.mark.slow
def test_any_strategy_evaluates_as_one_worker_does(launch, config_in, tmp_path, recorder):
    alone = train(config_in(tmp_path / "alone", **NONE), recorder, NeverStop())
    ways = {
        "ddp": {"strategy": "ddp", "workers": 2},
        "pipeline": {"strategy": "pipeline", "workers": 2},
    }
    configs = [
        config_in(tmp_path / f"{name}-{word}", **NONE, parallel=parallel, numerics={"evaluation": word})
        for name, parallel in ways.items()
        for word in ("same", "fp16")
    ]
    ended = launch(configs)
    assert ended.codes == [0, 0]
    of_pairs = [[result["runs"][i]["summary"] for result in ended.results] for i in range(len(configs))]
    for first, second in of_pairs:
        assert first["validation_loss"] == second["validation_loss"]
        assert first["validation_loss"] == pytest.approx(alone.summary["validation_loss"], rel=1e-2)
    whole, half, stages, half_stages = (first["weight_memory_mib"] for first, _ in of_pairs)
    assert whole == alone.summary["weight_memory_mib"] == 2 * half
    assert stages == 2 * half_stages < whole
