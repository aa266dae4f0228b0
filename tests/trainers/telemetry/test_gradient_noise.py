"""Where a live run sees the noise of its gradients: each source beside sums done by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cuda_ext
from trainers.entrypoint import train
from trainers.reporting import NeverStop
from trainers.telemetry.gradient_noise import (
    EVERY_STEPS,
    GradientNoise,
    MicroBatches,
    StepNorms,
    StepsInARow,
    WorkerShares,
    from_consecutive,
    from_squares,
)
from trainers.telemetry.timeline import hidden

CPU = torch.device("cpu")
FIGURES = ("noise_scale", "statistical_efficiency", "goodput")


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return (model(ids) - 0.5).square().mean()


def gradient(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    parts = torch.autograd.grad(loss_of(model, ids), list(model.parameters()))
    return torch.cat([part.flatten() for part in parts]).double()


def assert_same(found, expected):
    assert found is not None
    assert (found.sqr, found.var) == pytest.approx((expected.sqr, expected.var), rel=1e-4)


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_micro_batches_are_distinguished_on_their_way_into_the_gradient(loss_scale):
    model, ids = model_of(), torch.arange(12) % 11
    parts = [gradient(model, part) for part in ids.split(3)]
    source = MicroBatches(model.parameters(), accumulation=4, replicas=1, device=CPU)
    source.begin_step(0)
    for part in ids.split(3):
        (loss_of(model, part) * loss_scale / 4).backward()
    norm = float(torch.stack(parts).mean(0).norm())
    norms = StepNorms(float(source.sum()), norm, loss_scale, 1.0)
    mean = sum(float(part.square().sum()) for part in parts) / 4
    expected = from_squares(4, mean, norm**2, scale=3.0)
    assert_same(source.moments(norms, 3.0), expected)


def test_micro_batches_are_looked_at_in_one_step_of_several():
    model = model_of()
    source = MicroBatches(model.parameters(), accumulation=2, replicas=1, device=CPU)
    seen = []
    for step in range(2 * EVERY_STEPS):
        source.begin_step(step)
        loss_of(model, torch.arange(4)).backward()
        seen.append(source.sum() is not None)
    assert seen == ([True] + [False] * (EVERY_STEPS - 1)) * 2


def test_workers_shares_are_summed_over_buckets():
    source = WorkerShares(2, CPU)
    shares = [torch.tensor([3.0, -1.0, 2.0]), torch.tensor([1.0, 1.0, 2.0])]
    total = 0.0
    for share in shares:  # what the one exchange adds up
        source.begin_step(EVERY_STEPS)
        for bucket in share.split(2):
            source.see(bucket)
        total += float(source.sum())
    norm = float(torch.stack(shares).mean(0).norm())
    mean = sum(float(share.square().sum()) for share in shares) / 2
    expected = from_squares(2, mean, norm**2, scale=2.0)
    assert_same(source.moments(StepNorms(total, norm, 1.0, 1.0), 2.0), expected)


def test_workers_shares_are_looked_at_in_one_step_of_several():
    source = WorkerShares(2, CPU)
    seen = []
    for step in range(2 * EVERY_STEPS):
        source.begin_step(step)
        source.see(torch.ones(3))
        found = source.sum(), source.moments(StepNorms(6.0, 1.0, 1.0, 1.0), 1.0)
        assert (found[0] is None) == (found[1] is None)
        seen.append(found[0] is not None)
    assert seen == ([True] + [False] * (EVERY_STEPS - 1)) * 2


def test_what_a_lossy_exchange_gives_is_not_taken_for_the_mean():
    source = WorkerShares(2, CPU)
    source.begin_step(0)
    source.faithful = False
    assert source.moments(StepNorms(10.0, 1.0, 1.0, 1.0), 1.0) is None


@pytest.mark.parametrize("kind", ["adamw", "adan"])
def test_two_steps_in_a_row_are_compared_before_scaling_and_clipping(kind):
    model = model_of()
    parameters = list(model.parameters())
    optimizer = (
        torch.optim.AdamW(parameters, lr=1e-2) if kind == "adamw" else cuda_ext.Adan(parameters, lr=1e-2)
    )
    source, found, gradients = StepsInARow(optimizer, parameters), [], []
    for step in range(2):
        ids = torch.arange(step, step + 4)
        gradients.append(gradient(model, ids))
        norm, loss_scale = float(gradients[-1].norm()), 8.0 * (step + 1)
        divisor = 2.0 + step  # of clipping
        source.begin_step(step)
        optimizer.zero_grad()
        (loss_of(model, ids) * loss_scale).backward()
        source.before_update()
        parts = source.sum()
        norms = StepNorms(0.0 if parts is None else float(parts), norm, loss_scale, divisor)
        found.append(source.moments(norms, 1.0))
        source.remember(norms)
        for parameter in parameters:
            parameter.grad /= loss_scale * divisor
        optimizer.step()
    before, now = gradients
    expected = from_consecutive(float(now @ before), float((now - before).square().sum()), scale=1.0)
    assert found[0] is None
    assert_same(found[1], expected)


def test_a_pair_that_a_checkpoint_divides_is_left_out_also_by_the_run_that_goes_on():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    noise = GradientNoise(StepsInARow(optimizer, model.parameters()), 1.0)
    for step in range(2):
        noise.source.begin_step(step)
        loss_of(model, torch.arange(4)).backward()
        noise.source.before_update()
        assert noise.source.sum() is None
        noise.add(StepNorms(0.0, 1.0, 1.0, 1.0))
        noise.to_state()  # a checkpoint
    assert noise.figures(10.0) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer__name": "adamw"},
        {"optimizer__name": "adan"},
        {"batch": {"global_size": 8, "micro_size": 2}},
    ],
    ids=["adamw", "adan", "accumulated"],
)
def test_a_resumed_run_has_the_figures_of_the_whole_run(config_in, tmp_path, recorder, changes):
    changes = {
        **changes,
        "deterministic": True,
        "length": {"steps": EVERY_STEPS + 3},
        "checkpoint": {"every_steps": 5, "every_s": 0},
    }
    whole = train(config_in(tmp_path / "whole", **changes), recorder, NeverStop())
    part = type(recorder)(stop_after=5)
    train(config_in(tmp_path / "parts", **changes), part, part)
    again = type(recorder)()
    resumed = train(config_in(tmp_path / "parts", **changes), again, NeverStop())
    assert again.resumed_from == 6
    for name in ("noise_scale", "statistical_efficiency"):
        assert resumed.summary.get(name) == whole.summary.get(name)
        later = {step: value for step, value in recorder.series(name).items() if step > 6}
        assert again.series(name) == later
    assert whole.summary["statistical_efficiency"] > 0


def test_goodput_is_throughput_times_efficiency_and_batches_above_the_base_have_less(configure, recorder):
    config = configure(batch={"global_size": 8, "micro_size": 2, "base_size": 2}, length={"steps": 9})
    summary = train(config, recorder, NeverStop()).summary
    assert 1 / 4 <= summary["statistical_efficiency"] <= 1
    assert summary["goodput"] == summary["samples_per_s"] * summary["statistical_efficiency"]
    rates, efficiencies, goodputs = (
        recorder.series(name) for name in ("samples_per_s", "statistical_efficiency", "goodput")
    )
    assert goodputs == {step: rates[step] * efficiency for step, efficiency in efficiencies.items()}
    assert recorder.facts["gradient_noise"] == "micro-batches"


def test_without_the_estimate_nothing_is_said(configure, recorder):
    summary = train(configure(telemetry={"gradient_noise": False}), recorder, NeverStop()).summary
    assert not {*FIGURES} & {*summary, *(point.name for point in recorder.seen)}


@pytest.mark.slow
def test_two_workers_and_accumulation_in_one_see_noise_of_a_size(launch, config_in, tmp_path):
    """The same batches in two parts: as workers' shares or as micro-batches, whose lengths differ more."""
    shared = {"model__dropout": 0.0, "length": {"steps": 8}, "deterministic": True}
    workers = config_in(tmp_path / "two", parallel={"strategy": "ddp", "workers": 2}, **shared)
    ended = launch([workers])
    points = ended.results[0]["runs"][0]["points"]
    assert set(points["statistical_efficiency"]) == {str(step) for step in range(1, 9)}
    for efficiency in points["statistical_efficiency"].values():
        assert 1 / 8 <= efficiency <= 1
    both = [result["runs"][0]["summary"]["statistical_efficiency"] for result in ended.results]
    assert both[0] == both[1]


@pytest.mark.parametrize(
    ("spans", "until", "seconds"),
    [
        ([], 5.0, 0.0),
        ([(0.0, 2.0), (1.0, 3.0)], 5.0, 3.0),
        ([(0.0, 2.0), (3.0, 9.0)], 5.0, 4.0),
        ([(6.0, 7.0)], 5.0, 0.0),
        ([(0.0, 4.0), (1.0, 2.0)], 5.0, 4.0),
    ],
)
def test_time_on_the_way_counts_once_and_only_while_the_backward_pass_runs(spans, until, seconds):
    assert hidden(spans, until) == seconds
