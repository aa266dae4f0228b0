"""Models whose layers lie on several workers, over gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainers.conftest import Recorder
from tests.trainers.corpora import write_task
from tests.trainers.tasks.test_mlm import sentences
from trainers.entrypoint import train
from trainers.reporting import NeverStop

PAIR = {"strategy": "pipeline", "workers": 2}
SMALL = {"model__dropout": 0.0, "length": {"steps": 14}, "batch": {"global_size": 8, "micro_size": 2}}
LONG = {**SMALL, "length": {"steps": 30}, "optimizer__name": "adan"}
MINI = {**SMALL, "model__name": "mini"}
EVERY_STEP = {"every_steps": 1, "every_s": 0.0}


def losses(run) -> dict[int, float]:
    assert "losses" in run, run
    return {int(step): loss for step, loss in run["losses"].items()}


def tensors(checkpoint: str | Path) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": tensor
        for name in ("model", "optimizer")
        for key, tensor in load_file(Path(checkpoint) / f"{name}.safetensors").items()
    }


@pytest.fixture(scope="module")
def variants(shared, config_in, tmp_path_factory):
    """Changes of a configuration by name: those of the model and task, which one worker has as well."""
    (shared / "data" / "lines").mkdir()
    (shared / "data" / "lines" / "train.txt").write_text("\n".join(sentences(120)), encoding="utf-8")
    teacher = config_in(tmp_path_factory.mktemp("teacher"), length={"steps": 2})
    folder = train(teacher, Recorder(), NeverStop()).checkpoint
    assert folder is not None
    taught = {
        **SMALL,
        "model": {"name": "tiny", "teacher": folder, "dropout": 0.0},
        "workspace__model_roots": (str(Path(folder).parent),),
    }
    return {
        "long": LONG,
        "mini": MINI,
        "mlm": {**SMALL, "task": {"name": "mlm", "path": "lines", "max_length": 24}},
        "bf16": {**SMALL, "precision": "bf16"},
        "half": {**SMALL, "precision": "bf16", "numerics": {"parameters": "half", "evaluation": "half"}},
        "split": {
            **SMALL,
            "precision": "bf16",
            "numerics": {"parameters": "half"},
            "optimizer": {"name": "adan", "learning_rate": 1e-3, "masters": "split", "moments": "bf16"},
        },
        "taught": taught,
        "asked": {**taught, "distillation": {"cache_logits": False}},
    }


FAST = {
    ("mini", "gpipe"): {**PAIR, "schedule": "gpipe", "partition": "uniform"},
    ("split", "1f1b"): PAIR,
    ("taught", "1f1b"): PAIR,
}
"""How variants are spread over two workers in tests that are not slow."""
SPREAD = {
    ("long", "ddp"): {"strategy": "ddp", "workers": 2},
    ("long", "1f1b"): PAIR,
    ("mini", "interleaved"): {**PAIR, "schedule": "interleaved"},
    ("mini", "zero_bubble"): {**PAIR, "schedule": "zero_bubble", "partition": "time"},
    ("mini", "recomputed"): {**PAIR, "schedule": "zero_bubble", "activation_checkpointing": True},
    ("mlm", "1f1b"): PAIR,
    ("bf16", "1f1b"): PAIR,
    ("half", "1f1b"): PAIR,
    ("asked", "gpipe"): {**PAIR, "schedule": "gpipe"},
}


@pytest.fixture(scope="module")
def pair(launch, config_in, variants, tmp_path_factory):
    """Results by rank of runs of one pair of workers, of a variant and how it is spread.

    Those of `FAST` are trained when the first of them is asked for, and so are the others.
    """
    folder = tmp_path_factory.mktemp("pair")
    found = {}

    def of(variant, how):
        if (variant, how) not in found:
            spread = FAST if (variant, how) in FAST else SPREAD
            ended = launch(
                [
                    config_in(folder / "-".join(key), **{**variants[key[0]], "parallel": parallel})
                    for key, parallel in spread.items()
                ]
            )
            assert ended.codes == [0, 0]
            for i, key in enumerate(spread):
                found[key] = [result["runs"][i] for result in ended.results]
        return found[variant, how]

    return of


@pytest.fixture(scope="module")
def alone(config_in, variants, tmp_path_factory):
    """What one worker gives, by variant; each is trained when it is first asked for."""
    found: dict[str, tuple[dict[str, dict[int, float]], dict[str, float]]] = {}

    def of(variant: str):
        if variant not in found:
            recorder = Recorder()
            config = config_in(tmp_path_factory.mktemp(variant), **variants[variant])
            outcome = train(config, recorder, NeverStop())
            names = {point.name for point in recorder.seen}
            found[variant] = ({name: recorder.series(name) for name in names}, dict(outcome.summary))
        return found[variant]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "how"),
    [
        ("long", "ddp"),
        ("long", "1f1b"),
        ("mini", "gpipe"),
        ("mini", "interleaved"),
        ("mini", "zero_bubble"),
        ("mini", "recomputed"),
        ("mlm", "1f1b"),
        ("taught", "1f1b"),
        ("asked", "gpipe"),
    ],
)
def test_two_workers_have_the_loss_curve_and_scores_of_one(pair, alone, variant, how):
    series, summary = alone(variant)
    run = pair(variant, how)[0]
    assert losses(run) == pytest.approx(series["loss"], rel=2e-4)
    assert run["summary"]["validation_loss"] == pytest.approx(summary["validation_loss"], rel=2e-4)
    assert run["summary"]["parameters"] == summary["parameters"]
    if how != "ddp":  # whose workers divide micro-batches of their own
        assert run["summary"]["padding_pct"] == summary["padding_pct"]


@pytest.mark.slow
def test_numbers_tags_and_weighted_labels_have_the_loss_curve_of_one_worker(launch, config_in, tmp_path):
    changes = {**SMALL, "length": {"steps": 6}, "workspace__data_roots": (str(tmp_path),)}
    spread = {
        "regression": ({}, PAIR),
        "token_classification": ({}, PAIR),
        "classification": ({"class_weights": {"1": 5}}, {"strategy": "ddp", "workers": 2}),
    }
    pairs, alone = [], []
    for name, (own, parallel) in spread.items():
        write_task(tmp_path / name, name)
        task = {"name": name, "path": name, "max_length": 24, **own}
        recorder = Recorder()
        train(config_in(tmp_path / f"{name}-alone", **{**changes, "task": task}), recorder, NeverStop())
        alone.append(recorder.series("loss"))
        pairs.append(config_in(tmp_path / f"{name}-pair", **{**changes, "task": task, "parallel": parallel}))
    ended = launch(pairs)
    assert ended.codes == [0, 0]
    for run, expected in zip(ended.results[0]["runs"], alone, strict=True):
        assert losses(run) == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize(
    "variant",
    [pytest.param("bf16", marks=pytest.mark.slow), pytest.param("half", marks=pytest.mark.slow), "split"],
)
def test_half_precision_follows_one_worker(pair, alone, variant):
    series, summary = alone(variant)
    run = pair(variant, "1f1b")[0]
    assert losses(run) == pytest.approx(series["loss"], rel=2e-2)
    assert run["summary"]["validation_loss"] == pytest.approx(summary["validation_loss"], rel=2e-2)


@pytest.mark.parametrize(
    ("variant", "how"), [("taught", "1f1b"), pytest.param("asked", "gpipe", marks=pytest.mark.slow)]
)
def test_the_first_stage_reports_the_parts_of_the_last_stages_loss(pair, alone, variant, how):
    series, _ = alone(variant)
    by_name = pair(variant, how)[0]["losses_by_name"]
    for name in ("task_loss", "soft_loss"):
        assert {int(step): value for step, value in by_name[name].items()} == pytest.approx(
            series[name], rel=2e-4
        )


@pytest.mark.parametrize(
    "spread", [FAST, pytest.param(SPREAD, marks=pytest.mark.slow)], ids=["few", "others"]
)
def test_all_stages_have_the_same_scores(pair, spread):
    for key in spread:
        first, last = (run["summary"] for run in pair(*key))
        names = ("validation_loss", "accuracy", "steps", "train_loss")
        assert [first.get(name) for name in names] == [last.get(name) for name in names]


def test_waiting_is_measured_beside_its_formula(pair):
    summary = pair("mini", "gpipe")[0]["summary"]
    assert summary["bubble_formula_pct"] == pytest.approx(100 / 5)  # 2 stages, 4 micro-batches
    assert 0.0 < summary["bubble_pct"] < 100.0
    assert 0.0 < summary["bubble_time_s"] < summary["total_time_s"]


@pytest.mark.slow
def test_each_schedule_has_a_formula_of_its_own_or_none(pair):
    assert pair("mini", "interleaved")[0]["summary"]["bubble_formula_pct"] == pytest.approx(100 / 9)
    assert "bubble_formula_pct" not in pair("mini", "zero_bubble")[0]["summary"]
    assert "bubble_pct" not in pair("long", "ddp")[0]["summary"]


@pytest.mark.slow
def test_four_workers_in_a_grid_have_the_loss_curve_of_one(launch, config_in, variants, alone, tmp_path):
    grid = {"strategy": "pipeline", "workers": 4, "stages": 2}
    names = ("long", "mlm")
    short = {"length": {"steps": 13}}  # past the epoch's last step, in which a replica has a single example
    configs = [config_in(tmp_path / name, **{**variants[name], **short, "parallel": grid}) for name in names]
    ended = launch(configs)
    assert ended.codes == [0, 0, 0, 0]
    for i, name in enumerate(names):
        expected = Recorder()
        train(config_in(tmp_path / f"{name}-alone", **{**variants[name], **short}), expected, NeverStop())
        assert losses(ended.results[0]["runs"][i]) == pytest.approx(expected.series("loss"), rel=2e-4)


@pytest.mark.slow
def test_four_stages_of_a_layer_each_have_the_loss_curve_of_one_worker(launch, config_in, tmp_path):
    short = {**MINI, "length": {"steps": 6}}
    four = {"strategy": "pipeline", "workers": 4}
    ways = {
        "1f1b": {"schedule": "1f1b"},
        "gpipe": {"schedule": "gpipe"},
        "deepspeed": {"engine": "deepspeed"},
    }
    ended = launch(
        [config_in(tmp_path / name, **short, parallel={**four, **way}) for name, way in ways.items()]
    )
    assert ended.codes == [0, 0, 0, 0]
    expected = Recorder()
    outcome = train(config_in(tmp_path / "alone", **short), expected, NeverStop())
    for run, how in enumerate(ways):
        stages = [result["runs"][run] for result in ended.results]
        assert "losses" in stages[0], (how, stages[0])
        assert losses(stages[0]) == pytest.approx(expected.series("loss"), rel=2e-4)
        assert stages[0]["summary"]["bubble_formula_pct"] == pytest.approx(100 * 3 / 7)  # 4 micro-batches
        assert 0.0 < stages[0]["summary"]["bubble_pct"] < 100.0
        for stage in stages:
            validation_loss = stage["summary"]["validation_loss"]
            assert validation_loss == pytest.approx(outcome.summary["validation_loss"], rel=2e-4)


@pytest.mark.slow
def test_run_whose_stage_was_killed_ends_bitwise_where_a_whole_run_ends(launch, config_in, tmp_path):
    changes = {
        "deterministic": True,
        "length": {"steps": 7},
        "model__name": "mini",
        "batch": {"global_size": 8, "micro_size": 2},
        "parallel": {**PAIR, "schedule": "zero_bubble"},
        "checkpoint": {"every_steps": 2, "every_s": 0.0},
    }
    victim = config_in(tmp_path / "victim", **changes)
    killed = launch([victim], kill_at=4)
    assert killed.codes[-1] == -9
    said = killed.results[0]["runs"][0]
    assert said["failure"] == "infrastructure"
    assert re.match(r"stage 0 of 2 gave up waiting: stage 1 died or was stopped", said["message"])
    whole, resumed = launch([config_in(tmp_path / "whole", **changes), victim]).results[0]["runs"]
    assert resumed["resumed_from"] == 2
    assert resumed["weights"] == whole["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adan"])
def test_checkpoints_are_one_model_for_any_number_of_workers(launch, config_in, tmp_path, optimizer):
    changes = {**SMALL, "length": {"steps": 6}, "checkpoint": EVERY_STEP, "optimizer__name": optimizer}
    whole = Recorder()
    expected = tensors(train(config_in(tmp_path / "whole", **changes), whole, NeverStop()).checkpoint)
    divided = {**changes, "parallel": PAIR}

    first = launch([config_in(tmp_path / "joined", **divided)], stop_after=3).results[0]["runs"][0]
    recorder = Recorder()
    joined = train(config_in(tmp_path / "joined", **changes), recorder, NeverStop())
    assert (first["step"], recorder.resumed_from) == (3, 3)
    assert {**losses(first), **recorder.series("loss")} == pytest.approx(whole.series("loss"), rel=2e-4)

    part = Recorder(stop_after=2)  # asked before it hears of the step that was made
    train(config_in(tmp_path / "cut", **changes), part, part)
    second = launch([config_in(tmp_path / "cut", **divided)]).results[0]["runs"][0]
    assert second["resumed_from"] == 3
    assert {**part.series("loss"), **losses(second)} == pytest.approx(whole.series("loss"), rel=2e-4)
    for found in (tensors(joined.checkpoint), tensors(tmp_path / "cut" / "attempt-000001" / "step-00000006")):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=2e-2, atol=2e-5, msg=name)


@pytest.mark.slow
def test_stage_that_stalls_is_named_and_nobody_hangs(launch, config_in, tmp_path):
    config = config_in(tmp_path, **{**SMALL, "parallel": {**PAIR, "stage_timeout_s": 3.0}})
    ended = launch([config], stall_at=3)
    said = ended.results[0]["runs"][0]
    assert said["failure"] == "infrastructure"
    assert re.match(
        r"stage 0 of 2 gave up waiting: stage 1 has been in phase data_wait for \d+ s, "
        r"longer than parallel.stage_timeout_s 3 allows",
        said["message"],
    )
