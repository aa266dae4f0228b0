"""Models whose layers lie on several workers, over gloo."""

from __future__ import annotations

import pytest

from tests.trainers.conftest import Recorder
from trainers.entrypoint import train
from trainers.reporting import NeverStop

PIPELINE = {"strategy": "pipeline", "workers": 2}
SMALL = {"model__dropout": 0.0, "length": {"steps": 14}, "batch": {"global_size": 8, "micro_size": 2}}


def losses(run) -> dict[int, float]:
    assert "losses" in run, run
    return {int(step): loss for step, loss in run["losses"].items()}


@pytest.fixture(scope="module")
def pair(launch, config_in, tmp_path_factory):
    """Results by rank of several runs of one pair of workers."""
    folder = tmp_path_factory.mktemp("pipelines")
    runs = {
        "ddp": {"parallel": {"strategy": "ddp", "workers": 2}},
        "pipeline": {"parallel": PIPELINE},
        "gpipe": {"parallel": {**PIPELINE, "schedule": "gpipe"}},
        "interleaved": {"parallel": {**PIPELINE, "schedule": "interleaved"}, "model__student": "mini"},
        "zero_bubble": {"parallel": {**PIPELINE, "schedule": "zero_bubble"}, "model__student": "mini"},
    }
    configs = {name: config_in(folder / name, **{**SMALL, **changes}) for name, changes in runs.items()}
    ended = launch(list(configs.values()))
    assert ended.codes == [0, 0]
    return {name: [result["runs"][i] for result in ended.results] for i, name in enumerate(configs)}


@pytest.fixture(scope="module")
def alone(config_in, tmp_path_factory):
    """Losses of one worker, by student."""

    found = {}
    for student in ("tiny", "mini"):
        recorder = Recorder()
        train(
            config_in(tmp_path_factory.mktemp(student), **{**SMALL, "model__student": student}),
            recorder,
            NeverStop(),
        )
        found[student] = recorder.series("loss")
    return found


@pytest.mark.parametrize("name", ["ddp", "pipeline", "gpipe", "interleaved", "zero_bubble"])
def test_schedule_has_the_loss_curve_of_one_worker(pair, alone, name):
    expected = alone["mini" if name in ("interleaved", "zero_bubble") else "tiny"]
    assert losses(pair[name][0]) == pytest.approx(expected, rel=1e-4)
