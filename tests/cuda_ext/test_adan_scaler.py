"""Gradient scaling: the traps that an optimizer which unscales in its own kernel can fall into."""

from __future__ import annotations

import pytest
import torch

from cuda_ext import Adan


def stepped(implementation: str, **options: float) -> tuple[torch.nn.Parameter, Adan]:
    param = torch.nn.Parameter(torch.ones(1025))
    optimizer = Adan([param], lr=0.1, implementation=implementation, **options)
    param.grad = torch.linspace(-1.0, 1.0, 1025)
    optimizer.step()
    return param, optimizer


def snapshot(param: torch.nn.Parameter, optimizer: Adan) -> list[torch.Tensor]:
    return [param.detach().clone(), *(value.clone() for value in optimizer.state[param].values())]


def test_found_inf_is_honoured_without_a_scale(implementation: str) -> None:
    """After `unscale_` a scaler hands over found_inf and no grad_scale."""
    param, optimizer = stepped(implementation)
    before = snapshot(param, optimizer)
    optimizer.grad_scale = None
    optimizer.found_inf = torch.ones(1)
    param.grad = torch.full((1025,), float("inf"))
    optimizer.step()
    for old, new in zip(before, snapshot(param, optimizer), strict=True):
        assert torch.equal(old, new)
    optimizer.found_inf = torch.zeros(1)
    param.grad = torch.ones(1025)
    optimizer.step()
    assert float(optimizer.state[param]["step"]) == 2


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_a_scaler_changes_nothing_but_the_range(
    implementation: str, unscale_first: bool, max_grad_norm: float
) -> None:
    """With `unscale_` before the step the gradients are unscaled once, not twice."""
    results = []
    for scaled in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Linear(17, 3)
        optimizer = Adan(
            model.parameters(), lr=0.01, implementation=implementation, max_grad_norm=max_grad_norm
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(4):
            batch = torch.randn(8, 17, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            if unscale_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        results.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)


def test_a_scaler_skips_a_step_with_infinities_and_halves_its_scale(implementation: str) -> None:
    param, optimizer = stepped(implementation, max_grad_norm=1.0)
    before = snapshot(param, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(1))  # a scaler begins with its first loss
    param.grad = torch.full((1025,), float("nan"))
    scaler.step(optimizer)
    scaler.update()
    for old, new in zip(before, snapshot(param, optimizer), strict=True):
        assert torch.equal(old, new)
    assert scaler.get_scale() == 512.0


def test_a_users_own_scale_is_used_and_kept(implementation: str) -> None:
    plain, _ = stepped(implementation)
    param = torch.nn.Parameter(torch.ones(1025))
    optimizer = Adan([param], lr=0.1, implementation=implementation)
    optimizer.grad_scale = torch.tensor(8.0)
    param.grad = 8.0 * torch.linspace(-1.0, 1.0, 1025)
    optimizer.step()
    assert torch.equal(optimizer.grad_scale, torch.tensor(8.0))
    torch.testing.assert_close(param.detach(), plain.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(optimizer.state[param]["g_prev"], torch.linspace(-1.0, 1.0, 1025))


def test_without_a_scaler_nan_shows_in_its_own_element_only(implementation: str) -> None:
    param = torch.nn.Parameter(torch.ones(1025))
    optimizer = Adan([param], implementation=implementation)
    param.grad = torch.ones(1025)
    param.grad[7] = float("nan")
    optimizer.step()
    assert torch.isnan(param.detach()).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_with_clipping_a_norm_that_is_not_finite_shows(implementation: str, bad: float) -> None:
    param = torch.nn.Parameter(torch.ones(1025))
    optimizer = Adan([param], implementation=implementation, max_grad_norm=1.0)
    param.grad = torch.ones(1025)
    param.grad[7] = bad
    optimizer.step()
    assert torch.isnan(param.detach()[7])
