"""Two workers in processes of their own, over gloo."""

from __future__ import annotations

import pytest

from trainers.entrypoint import train
from trainers.errors import BadSpecError
from trainers.reporting import NeverStop, NullSink

TWO = {"strategy": "ddp", "workers": 2}


@pytest.fixture(scope="module")
def pair(launch, config_in, tmp_path_factory):
    """Configurations and results by rank of several runs of one pair of workers."""
    folder = tmp_path_factory.mktemp("pair")
    configs = {
        name: config_in(
            folder / name,
            parallel=TWO,
            model__dropout=0.0,
            length={"epochs": 1},
            deterministic=True,
            batch={"global_size": 8, "micro_size": micro},
        )
        for name, micro in (("plain", "auto"), ("accumulated", 2))
    }
    ended = launch(list(configs.values()))
    assert ended.codes == [0, 0]
    runs = {name: [result["runs"][i] for result in ended.results] for i, name in enumerate(configs)}
    return configs, runs


@pytest.mark.slow
def test_two_workers_have_the_loss_curve_of_one(pair, tmp_path, config_in, recorder):
    _, runs = pair
    alone = config_in(tmp_path, model__dropout=0.0, length={"epochs": 1}, deterministic=True)
    train(alone, recorder, NeverStop())
    losses = recorder.series("loss")
    assert len(losses) == 12  # 90 examples in batches of 8: the last batch has 2
    together = {int(step): loss for step, loss in runs["plain"][0]["losses"].items()}
    assert together == pytest.approx(losses, rel=2e-3)


def test_accumulation_over_two_workers_has_the_same_loss_curve(pair):
    _, runs = pair
    plain, accumulated = (runs[name][0]["losses"] for name in ("plain", "accumulated"))
    assert accumulated == pytest.approx(plain, rel=2e-3)


def test_both_workers_evaluate_to_the_same_scores(pair):
    _, runs = pair
    first, second = (run["summary"] for run in runs["plain"])
    names = ("accuracy", "f1", "validation_loss", "steps")
    assert [first[name] for name in names] == [second[name] for name in names]


def test_time_waiting_for_the_other_worker_is_measured(pair):
    _, runs = pair
    summary = runs["plain"][0]["summary"]
    assert 0.0 < summary["communication_time_s"] < summary["total_time_s"]


def test_a_loss_that_is_not_finite_on_one_worker_ends_both_without_a_checkpoint(launch, config_in, tmp_path):
    config = config_in(tmp_path, parallel=TWO, checkpoint={"every_steps": 1, "every_s": 0.0})
    ended = launch([config], poison_step=2)
    assert [result["runs"][0]["failure"] for result in ended.results] == ["not_finite", "not_finite"]
    assert sorted(path.name for path in tmp_path.glob("*/step-*")) == ["step-00000001", "step-00000002"]


def test_one_workers_stop_stops_both(launch, config_in, tmp_path):
    ended = launch([config_in(tmp_path, parallel=TWO)], stop_after=3)
    assert [(result["runs"][0]["status"], result["runs"][0]["step"]) for result in ended.results] == [
        ("stopped", 3),
        ("stopped", 3),
    ]
    assert [path.name for path in tmp_path.glob("*/step-*")] == ["step-00000003"]


def test_wrong_group_size_is_said(configure):
    with pytest.raises(BadSpecError, match=r"parallel\.workers is 2, but the process group has 1"):
        train(configure(parallel=TWO), NullSink(), NeverStop())
