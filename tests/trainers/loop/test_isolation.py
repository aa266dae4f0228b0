"""Runs that share a process share nothing else."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from trainers.entrypoint import train
from trainers.errors import BadDataError
from trainers.loop import assembly
from trainers.process import reset_process
from trainers.reporting import NeverStop, NullSink


@pytest.mark.slow
def test_losses_are_bitwise_those_of_a_fresh_process(config_in, tmp_path, launch, recorder):
    fresh = launch([config_in(tmp_path / "fresh", seed=5)])
    train(
        config_in(
            tmp_path / "other",
            seed=9,
            precision="bf16",
            optimizer__name="adan",
            deterministic=True,
            threads=2,
        ),
        NullSink(),
        NeverStop(),
    )
    train(config_in(tmp_path / "after", seed=5), recorder, NeverStop())
    expected = {int(step): loss for step, loss in fresh.results[0]["runs"][0]["losses"].items()}
    assert recorder.series("loss") == expected


def test_reset_sets_what_a_run_asks_for(configure):
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_autocast_enabled("cpu", True)
    torch.set_grad_enabled(False)
    reset_process(configure(threads=1, seed=11))
    drawn = (torch.rand(1).item(), float(np.random.rand()), random.random())
    assert torch.get_default_dtype() is torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert torch.get_num_threads() == 1
    reset_process(configure(threads=1, seed=11))
    assert (torch.rand(1).item(), float(np.random.rand()), random.random()) == drawn


def test_environment_is_as_before_after_a_run(configure):
    before = dict(os.environ)
    train(configure(deterministic=True, length={"steps": 1}), NullSink(), NeverStop())
    assert dict(os.environ) == before


def test_environment_is_as_before_after_a_failed_run(configure):
    before = dict(os.environ)
    with pytest.raises(BadDataError):
        train(configure(deterministic=True, task__path="nowhere"), NullSink(), NeverStop())
    assert dict(os.environ) == before


@pytest.mark.slow
def test_peak_memory_counts_this_run_alone(config_in, tmp_path):
    first = train(config_in(tmp_path / "1"), NullSink(), NeverStop())
    ballast = torch.ones(64 * 1024 * 1024)  # 256 MiB
    ballast += 1
    del ballast
    second = train(config_in(tmp_path / "2"), NullSink(), NeverStop())
    assert second.summary["peak_memory_mib"] < first.summary["peak_memory_mib"] + 128


def test_peak_memory_is_that_of_training_and_preparing_has_its_own(configure, monkeypatch):
    build = assembly.build_optimizer

    def with_ballast(*arguments):
        ballast = torch.ones(64 * 1024 * 1024)  # 256 MiB
        del ballast
        return build(*arguments)

    monkeypatch.setattr(assembly, "build_optimizer", with_ballast)
    summary = train(configure(), NullSink(), NeverStop()).summary
    assert summary["peak_memory_mib"] < summary["preparation_memory_mib"] - 128
