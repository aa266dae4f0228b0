"""Every way to spread a run over workers trains the same model, in bf16 as far as rounding lets it."""

from __future__ import annotations

import statistics
from importlib.util import find_spec

import pytest

from tests.trainers.conftest import Recorder
from trainers.entrypoint import train
from trainers.reporting import NeverStop

SEEDS = range(5)
STEPS = 24
SPREAD = {
    "ddp": {"strategy": "ddp", "workers": 2},
    "pipeline by torch": {"strategy": "pipeline", "workers": 2},
}
if find_spec("deepspeed") is not None:
    SPREAD["pipeline by deepspeed"] = {"strategy": "pipeline", "workers": 2, "engine": "deepspeed"}


def changes(seed):
    return {
        "seed": seed,
        "precision": "bf16",
        "model__dropout": 0.0,
        "length": {"steps": STEPS},
        "batch": {"global_size": 8, "micro_size": 2},
    }


@pytest.fixture(scope="module")
def spread(launch, config_in, tmp_path_factory):
    """Losses by step of each strategy and seed."""
    folder = tmp_path_factory.mktemp("spread")
    configs = {
        (name, seed): config_in(folder / f"{name}-{seed}", **changes(seed), parallel=parallel)
        for name, parallel in SPREAD.items()
        for seed in SEEDS
    }
    ended = launch(list(configs.values()))
    assert ended.codes == [0, 0]
    return {
        key: [run["losses"][step] for step in sorted(run["losses"], key=int)]
        for key, run in zip(configs, ended.results[0]["runs"], strict=True)
    }


@pytest.fixture(scope="module")
def alone(config_in, tmp_path_factory):
    """Losses by step of one worker, for each seed."""
    found = []
    for seed in SEEDS:
        recorder = Recorder()
        train(config_in(tmp_path_factory.mktemp("alone"), **changes(seed)), recorder, NeverStop())
        found.append([loss for _, loss in sorted(recorder.series("loss").items())])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SPREAD)
def test_bf16_curves_of_five_seeds_differ_by_less_than_the_seeds_do(spread, alone, name):
    """The difference to one worker, at any step and averaged over it, is a fraction of what a seed makes."""
    apart = [
        statistics.fmean(abs(a - b) for a, b in zip(alone[seed], spread[name, seed], strict=True))
        for seed in SEEDS
    ]
    by_seed = statistics.fmean(statistics.stdev(at_step) for at_step in zip(*alone, strict=True))
    assert max(apart) < 0.1 * by_seed
