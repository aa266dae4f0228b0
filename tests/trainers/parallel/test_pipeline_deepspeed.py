"""Pipelines that DeepSpeed runs, over gloo."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.trainers.conftest import Recorder, chosen
from trainers.entrypoint import train
from trainers.errors import BadSpecError
from trainers.parallel.pipeline.deepspeed_engine import load
from trainers.reporting import NeverStop

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

DEEPSPEED = {"strategy": "pipeline", "engine": "deepspeed", "workers": 2}
SMALL = {"model__dropout": 0.0, "batch": {"global_size": 8, "micro_size": 2}}
VARIANTS = {
    "long": {"length": {"steps": 30}},
    "bf16": {"precision": "bf16"},
    "adan": {"optimizer__name": "adan"},
    "mlm": {"task": {"name": "mlm", "path": "texts", "max_length": 24}, "batch": {"global_size": 8}},
}
"""What is trained by one worker and by two stages."""
DROPOUT = {"model__dropout": 0.1}


def losses(run) -> dict[int, float]:
    assert "losses" in run, run
    return {int(step): loss for step, loss in run["losses"].items()}


@pytest.fixture(scope="module")
def texts(shared) -> Path:
    """A folder of plain text for `mlm`."""
    folder = shared / "data" / "texts"
    folder.mkdir(exist_ok=True)
    words = "ka lo mi ne su ra ti vo xe"
    (folder / "train.txt").write_text("\n".join(f"{words} {number}" for number in range(120)))
    (folder / "validation.txt").write_text("\n".join(f"{words} {number}" for number in range(40)))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Where each run of a pair of workers has its checkpoints."""
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def runs_of(launch, config_in, texts, root):
    """Trains variants by one pair of workers; returns results by rank, by name."""

    def of(changes):
        ended = launch(
            [
                config_in(root / name, **{**SMALL, "parallel": DEEPSPEED, **change})
                for name, change in changes.items()
            ]
        )
        assert ended.codes == [0, 0]
        return {name: [result["runs"][i] for result in ended.results] for i, name in enumerate(changes)}

    return of


@pytest.fixture(scope="module")
def pair(runs_of):
    """The runs that tests look at which are not slow."""
    again = {**DROPOUT, "parallel": {**DEEPSPEED, "activation_checkpointing": True}}
    return runs_of({"adan": VARIANTS["adan"], "dropout": DROPOUT, "again": again})


@pytest.fixture(scope="module")
def others(request, runs_of):
    """The other runs that are compared with those of one worker alone."""
    names = chosen(request, "name") - {"adan"}
    return runs_of({name: change for name, change in VARIANTS.items() if name in names})


def alone(config_in, folder, **changes) -> dict[int, float]:
    recorder = Recorder()
    train(config_in(folder, **{**SMALL, **changes}), recorder, NeverStop())
    return recorder.series("loss")


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_two_stages_have_the_loss_curve_of_one_worker(request, config_in, tmp_path, name):
    runs = request.getfixturevalue("pair" if name == "adan" else "others")
    expected = alone(config_in, tmp_path, **VARIANTS[name])
    assert len(expected) == (30 if name == "long" else 6)
    (first, _), rel = runs[name], 1e-3 if name == "bf16" else 1e-4
    assert losses(first) == pytest.approx(expected, rel=rel)


def test_layers_computed_again_draw_the_same_dropout(pair):
    assert losses(pair["again"][0]) == losses(pair["dropout"][0])


def test_time_is_told_by_phase_on_every_stage(pair):
    for run in pair["dropout"]:
        summary = run["summary"]
        assert min(summary[f"{phase}_time_s"] for phase in ("forward", "backward", "bubble")) > 0.0


def test_both_stages_report_the_same_scores(pair):
    first, second = (run["summary"] for run in pair["dropout"])
    assert [first[name] for name in ("accuracy", "validation_loss")] == [
        second[name] for name in ("accuracy", "validation_loss")
    ]


def test_one_worker_goes_on_where_two_stages_stopped(pair, root, config_in):
    recorder = Recorder()
    config = config_in(root / "adan", **{**SMALL, **VARIANTS["adan"], "length": {"steps": 9}})
    outcome = train(config, recorder, NeverStop())
    assert recorder.resumed_from == 6
    assert (outcome.status, outcome.step) == ("completed", 9)


@pytest.mark.slow
def test_a_grid_of_two_stages_and_two_replicas_has_the_loss_curve_of_one_worker(launch, config_in, tmp_path):
    grid = {**DEEPSPEED, "workers": 4, "stages": 2}
    changes = {**SMALL, "length": {"epochs": 1}, "batch": {"global_size": 8, "micro_size": 2}}
    ended = launch([config_in(tmp_path / "grid", **{**changes, "parallel": grid})])
    assert ended.codes == [0] * 4
    expected = alone(config_in, tmp_path / "alone", **changes)
    assert len(expected) == 12  # the last step has 2 examples
    assert losses(ended.results[0]["runs"][0]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_killed_stage_resumes_bitwise(launch, config_in, tmp_path):
    changes = {
        **SMALL,
        **DROPOUT,
        "parallel": DEEPSPEED,
        "deterministic": True,
        "checkpoint": {"every_steps": 2, "every_s": 0.0},
    }
    config = config_in(tmp_path / "killed", **changes)
    killed = launch([config], kill_at=4)
    assert killed.codes[1] == -9
    whole, resumed = launch([config_in(tmp_path / "whole", **changes), config]).results[0]["runs"]
    assert resumed["resumed_from"] in (2, 4)
    assert resumed["weights"] == whole["weights"]


def test_missing_package_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(BadSpecError, match=r"parallel\.engine deepspeed .* install the package `deepspeed`"):
        load(torch.device("cpu"))


def test_half_parameters_are_refused_at_submission(config_in, tmp_path):
    with pytest.raises(ValueError, match=r"numerics\.parameters half .* parallel\.engine: torch"):
        config_in(tmp_path, parallel=DEEPSPEED, precision="bf16", numerics={"parameters": "half"})
