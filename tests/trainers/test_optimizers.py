"""Adan against its equations in float64, the choice of implementations, and the schedule."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainers.config import Optimizer
from trainers.optimizers import build
from trainers.optimizers.adan import Adan
from trainers.optimizers.schedule import learning_rate

SIZES = (1, 2, 3, 1023, 1025, 30522)


def reference(theta, grads, *, lr, betas, eps, decay, no_prox):
    """The update of arXiv 2208.06677 over a list of gradients, in float64, term by term."""
    b1, b2, b3 = betas
    theta = theta.double()
    m, v, n = torch.zeros_like(theta), torch.zeros_like(theta), torch.zeros_like(theta)
    before = None
    for t, grad in enumerate(grads, 1):
        g = grad.double()
        d = torch.zeros_like(g) if before is None else g - before
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * d
        n = b3 * n + (1 - b3) * (g + b2 * d) ** 2
        denominator = n.sqrt() / math.sqrt(1 - b3**t) + eps
        u = (m / (1 - b1**t) + b2 * v / (1 - b2**t)) / denominator
        theta = (1 - lr * decay) * theta - lr * u if no_prox else (theta - lr * u) / (1 + lr * decay)
        before = g
    return theta


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("no_prox", [False, True], ids=["proximal", "no_prox"])
def test_adan_follows_its_equations(foreach, no_prox):
    generator = torch.Generator().manual_seed(0)
    hyper = {"lr": 0.01, "betas": (0.98, 0.92, 0.99), "eps": 1e-8}
    starts = [torch.randn(size, generator=generator) for size in SIZES]
    grads = [[torch.randn(size, generator=generator) for size in SIZES] for _ in range(7)]
    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = Adan(parameters, **hyper, weight_decay=0.02, no_prox=no_prox, foreach=foreach)
    for step in grads:
        for parameter, grad in zip(parameters, step, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
    for i, parameter in enumerate(parameters):
        expected = reference(starts[i], [step[i] for step in grads], **hyper, decay=0.02, no_prox=no_prox)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
def test_adan_updates_misaligned_views(foreach):
    whole = torch.arange(12.0)
    view = torch.nn.Parameter(whole[1:].view(11))
    start = view.detach().clone()
    view.grad = torch.ones(13)[2:]
    Adan([view], lr=0.1, foreach=foreach).step()
    torch.testing.assert_close(view.detach(), start - 0.1)  # u = g / (|g| + eps) at step 1
    assert whole[0] == 0.0


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
def test_adan_counts_steps_per_parameter(foreach):
    early, late = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = Adan([early, late], lr=0.1, foreach=foreach)
    early.grad = torch.ones(4)
    optimizer.step()
    early.grad, late.grad = torch.ones(4), torch.full((4,), 3.0)
    optimizer.step()
    torch.testing.assert_close(late.detach(), torch.full((4,), 0.9))  # its own first step
    assert [optimizer.state[p]["step"].item() for p in (early, late)] == [2.0, 1.0]


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
def test_adan_continues_bitwise_from_its_state(foreach):
    def steps(optimizer, parameter, seeds):
        for seed in seeds:
            parameter.grad = torch.randn(33, generator=torch.Generator().manual_seed(seed))
            optimizer.step()

    whole = torch.nn.Parameter(torch.ones(33))
    optimizer = Adan([whole], foreach=foreach)
    steps(optimizer, whole, range(3))
    resumed = torch.nn.Parameter(whole.detach().clone())
    second = Adan([resumed], foreach=foreach)
    second.load_state_dict({**optimizer.state_dict()})
    assert "previous_grad" in second.state[resumed]
    saved = {name: value.clone() for name, value in second.state[resumed].items()}
    steps(optimizer, whole, range(3, 6))
    second.state[resumed] = saved
    steps(second, resumed, range(3, 6))
    assert torch.equal(whole, resumed)


def test_adan_keeps_the_gradient():
    parameter = torch.nn.Parameter(torch.ones(5))
    parameter.grad = torch.arange(5.0)
    optimizer = Adan([parameter])
    optimizer.step()
    assert parameter.grad.tolist() == [0, 1, 2, 3, 4]
    assert optimizer.state[parameter]["previous_grad"].data_ptr() != parameter.grad.data_ptr()


@pytest.mark.parametrize(
    ("name", "implementation", "runs"),
    [
        ("adamw", "auto", "torch.AdamW/multi_fused"),
        ("adamw", "single_unfused", "torch.AdamW/single_unfused"),
        ("adamw", "multi_unfused", "torch.AdamW/multi_unfused"),
        ("adan", "single_unfused", "trainers.Adan/single_unfused"),
        ("adan", "multi_unfused", "trainers.Adan/multi_unfused"),
    ],
)
def test_built_optimizer_says_what_runs(name, implementation, runs):
    built = build(Optimizer(name=name, implementation=implementation), torch.nn.Linear(2, 2))
    assert built.implementation == runs


def test_biases_and_norms_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    decaying, rest = build(Optimizer(weight_decay=0.1), model).optimizer.param_groups
    assert [p.ndim for p in decaying["params"]] == [2]
    assert [p.ndim for p in rest["params"]] == [1, 1, 1]
    assert (decaying["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)


@given(st.integers(1, 2000), st.floats(0.0, 0.99), st.sampled_from(["linear", "constant"]))
def test_schedule_rises_then_falls_and_is_never_zero(total, warmup, shape):
    config = Optimizer(learning_rate=1.0, warmup_fraction=warmup, schedule=shape)
    rates = [learning_rate(config, step, total) for step in range(total)]
    assert all(0.0 < rate <= 1.0 for rate in rates)
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_schedule_without_warmup_begins_at_the_peak():
    config = Optimizer(learning_rate=0.5, warmup_fraction=0.0)
    assert [learning_rate(config, step, 4) for step in range(4)] == [0.5, 0.375, 0.25, 0.125]
