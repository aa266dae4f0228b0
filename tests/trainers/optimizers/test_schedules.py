"""Learning rate schedules against torch's and transformers', step by step, and in runs."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import transformers
from torch.optim import lr_scheduler

from tests.trainers.checkpoints.test_resume import assert_bitwise_equal
from trainers.config import Optimizer
from trainers.entrypoint import train
from trainers.optimizers import SCHEDULES
from trainers.reporting import NeverStop
from trainers.update import Plateau, learning_rate, rate_factor_for

STEPS, EPOCH, PEAK = 40, 6, 3e-4
EVERY_STEP = {"every_steps": 1, "every_s": 0.0}


def stand_in(rate=PEAK):
    return torch.optim.SGD([torch.zeros(())], lr=rate)


def rates_of(optimizer, schedule, steps):
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def ours(warmup, schedule, **options):
    config = Optimizer(learning_rate=PEAK, warmup_steps=warmup, schedule=schedule, **options)
    return [learning_rate(config, step, STEPS, EPOCH) for step in range(STEPS)]


TORCH = {
    "linear": (
        {},
        lambda steps: partial(lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=steps),
    ),
    "constant": ({}, lambda steps: partial(lr_scheduler.ConstantLR, factor=1.0)),
    "cosine": ({}, lambda steps: partial(lr_scheduler.CosineAnnealingLR, T_max=steps)),
    "cosine to a floor": (
        {"schedule_floor": 0.1},
        lambda steps: partial(lr_scheduler.CosineAnnealingLR, T_max=steps, eta_min=0.1 * PEAK),
    ),
    "polynomial": (
        {"schedule_power": 2.0},
        lambda steps: partial(lr_scheduler.PolynomialLR, total_iters=steps, power=2.0),
    ),
    "step": (
        {"schedule_step_epochs": 1.5, "schedule_factor": 0.5},
        lambda steps: partial(lr_scheduler.StepLR, step_size=9, gamma=0.5),
    ),
}


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("case", TORCH)
def test_rates_are_torchs_at_every_step(case, warmup):
    options, theirs = TORCH[case]
    optimizer = stand_in()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about how SequentialLR calls its parts
        schedule = theirs(STEPS - warmup)(optimizer)
        if warmup:
            optimizer = stand_in()
            rise = lr_scheduler.LinearLR(optimizer, 1 / (warmup + 1), 1.0, total_iters=warmup)
            parts = [rise, theirs(STEPS - warmup)(optimizer)]
            schedule = lr_scheduler.SequentialLR(optimizer, parts, milestones=[warmup])
        expected = rates_of(optimizer, schedule, STEPS)
    assert ours(warmup, case.split()[0], **options) == pytest.approx(expected, rel=1e-9, abs=1e-15)


TRANSFORMERS = {
    "linear": ({}, transformers.get_linear_schedule_with_warmup, {}),
    "cosine": ({}, transformers.get_cosine_schedule_with_warmup, {}),
    "polynomial": (
        {"schedule_power": 3.0, "schedule_floor": 0.2},
        transformers.get_polynomial_decay_schedule_with_warmup,
        {"power": 3.0, "lr_end": 0.2 * PEAK},
    ),
    "warmup_stable_decay": (
        {"schedule_decay_fraction": 0.25},
        transformers.get_wsd_schedule,
        {"num_decay_steps": 10, "decay_type": "linear"},
    ),
}


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_rates_are_those_of_transformers_whose_warm_up_begins_at_rate_0(name, warmup):
    options, schedule_of, theirs = TRANSFORMERS[name]
    optimizer = stand_in()
    schedule = schedule_of(optimizer, num_warmup_steps=warmup + 1, num_training_steps=STEPS + 1, **theirs)
    first, *expected = rates_of(optimizer, schedule, STEPS + 1)
    assert first == 0.0
    assert ours(warmup, name, **options) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_the_last_steps_fall_to_the_floor():
    rates = ours(7, "warmup_stable_decay", schedule_decay_fraction=0.25, schedule_floor=0.2)
    assert rates[7:31] == [PEAK] * 24
    assert rates[30:] == pytest.approx([PEAK * (0.2 + 0.8 * left / 10) for left in range(10, 0, -1)])


LOSSES = [0.9, 0.8, 0.81, 0.82, 0.83, 0.7, 0.71, 0.7, 0.7, 0.72, float("nan"), 0.71, 0.9, 0.9, 0.9, 0.9, 0.6]
PLATEAU = {"schedule_factor": 0.3, "schedule_patience": 1, "schedule_floor": 0.02}


def test_a_plateau_lowers_the_rate_when_torch_does():
    factor = rate_factor_for(Optimizer(schedule="plateau", **PLATEAU))
    optimizer = stand_in()
    theirs = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1, min_lr=0.02 * PEAK, eps=0.0)
    values = []
    for loss in LOSSES:
        factor.evaluated(loss)
        theirs.step(loss)
        values.append(factor.value)
        assert PEAK * factor.value == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    assert values[0] == 1.0
    assert values[-1] == 0.02


@pytest.mark.parametrize("saved_after", range(len(LOSSES)))
def test_a_plateau_continues_from_its_state(saved_after):
    whole, part = Plateau(PLATEAU), Plateau(PLATEAU)
    for loss in LOSSES[:saved_after]:
        whole.evaluated(loss)
        part.evaluated(loss)
    resumed = Plateau(PLATEAU)
    resumed.restore(part.to_state())
    for loss in LOSSES[saved_after:]:
        whole.evaluated(loss)
        resumed.evaluated(loss)
    assert resumed.to_state() == whole.to_state()
    resumed.restore({})
    assert resumed.value == 1.0


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "plateau"])
def test_schedules_without_state_have_the_factor_1(name):
    factor = rate_factor_for(Optimizer(schedule=name))
    factor.evaluated(3.0)
    assert (factor.value, factor.to_state()) == (1.0, {})


def test_a_run_on_a_plateau_resumes_bitwise(config_in, tmp_path, recorder):
    changes = {
        "optimizer": {
            **PLATEAU, "schedule": "plateau", "schedule_patience": 0, "warmup_steps": 1, "learning_rate": 0.02
        },
        "length": {"steps": 9},
        "evaluation": {"every_steps": 2},
        "checkpoint": EVERY_STEP,
        "deterministic": True,
    }  # fmt: skip
    whole = train(config_in(tmp_path / "whole", **changes), recorder, NeverStop())
    rates = recorder.series("learning_rate")
    assert rates[1] == 0.01
    assert rates[2] == 0.02
    assert rates[9] < rates[2]  # so much that some evaluation was worse than the one before
    config = config_in(tmp_path / "parts", **changes)
    resumed = {}
    for stop_after in (3, 6, None):
        part = type(recorder)(stop_after=stop_after)
        outcome = train(config, part, part)
        resumed |= part.series("learning_rate")
    assert resumed == rates
    assert_bitwise_equal(whole.checkpoint, outcome.checkpoint)


def test_each_step_of_a_run_has_the_rate_of_its_epoch(configure, recorder):
    optimizer = {"schedule": "step", "schedule_step_epochs": 0.25, "schedule_factor": 0.5, "warmup_steps": 0}
    config = configure(optimizer=optimizer, batch={"global_size": 8}, length={"steps": 7})
    train(config, recorder, NeverStop())
    # An epoch of 90 examples has 12 steps.
    expected = [1e-4 * 0.5 ** (step // 3) for step in range(7)]
    assert list(recorder.series("learning_rate").values()) == pytest.approx(expected)
