"""State dicts, late parameters and closures."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from cuda_ext import Adan, StateDictError
from tests.cuda_ext.paired import Paired


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 2)).to(dtype)


def train(model: torch.nn.Module, optimizer: Adan, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(16, 9, generator=generator).to(dtype)
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        optimizer.step()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_grad_norm": 0.5, "weight_decay": 0.1},
    {"moments_dtype": torch.bfloat16},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "clipped", "bf16-moments"])
@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "split")]
)
def test_a_resumed_run_ends_bitwise_where_the_whole_run_ends(
    implementation: str, dtype: torch.dtype, kind: str, options: dict[str, Any]
) -> None:
    whole = model_of(dtype)
    optimizer = Adan(whole.parameters(), implementation=implementation, master_weights=kind, **options)
    train(whole, optimizer, range(8))

    first = model_of(dtype)
    optimizer = Adan(first.parameters(), implementation=implementation, master_weights=kind, **options)
    train(first, optimizer, range(3))
    file = io.BytesIO()
    torch.save((first.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    second = model_of(dtype)
    second.load_state_dict(weights)
    optimizer = Adan(second.parameters(), implementation=implementation, master_weights=kind, **options)
    optimizer.load_state_dict(state)
    train(second, optimizer, range(3, 8))

    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_state_moves_between_implementations(kernels: None) -> None:
    model = model_of()
    fused = Adan(model.parameters(), implementation="multi_fused")
    train(model, fused, range(3))
    twin = copy.deepcopy(model)
    unfused = Adan(twin.parameters(), implementation="single_unfused")
    unfused.load_state_dict(fused.state_dict())
    train(model, fused, range(3, 6))
    train(twin, unfused, range(3, 6))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_masters_and_moments_are_not_cut_to_the_parameters_dtype(implementation: str) -> None:
    model = model_of(torch.bfloat16)
    optimizer = Adan(model.parameters(), implementation=implementation)
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    for number, param in enumerate(model.parameters()):
        for name, value in state["state"][number].items():
            assert optimizer.state[param][name].dtype == value.dtype
            assert torch.equal(optimizer.state[param][name], value)


@pytest.mark.parametrize("missing", ["g_prev", "exp_avg_diff", "step", "master"])
def test_a_checkpoint_that_lacks_a_part_is_refused_and_changes_nothing(kernels: None, missing: str) -> None:
    model = model_of(torch.bfloat16)
    optimizer = Adan(model.parameters())
    train(model, optimizer, range(2))
    broken = copy.deepcopy(optimizer.state_dict())
    del broken["state"][1][missing]
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StateDictError, match=f"parameter 1 lacks '{missing}'"):
        optimizer.load_state_dict(broken)
    for number, state in before["state"].items():
        for name, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][number][name], value)


def test_a_checkpoint_of_another_shape_is_refused(kernels: None) -> None:
    model = model_of()
    optimizer = Adan(model.parameters())
    train(model, optimizer, range(1))
    other = Adan([torch.nn.Parameter(torch.zeros(5)) for _ in model.parameters()])
    with pytest.raises(StateDictError, match="has shape"):
        other.load_state_dict(optimizer.state_dict())
    fewer = Adan(list(model.parameters())[:2])
    with pytest.raises(StateDictError, match="4 parameters in the checkpoint and 2"):
        fewer.load_state_dict(optimizer.state_dict())
    two_groups = Adan([{"params": [p]} for p in model.parameters()])
    with pytest.raises(StateDictError, match="1 parameter groups"):
        two_groups.load_state_dict(optimizer.state_dict())
    with pytest.raises(StateDictError, match="not an optimizer"):
        other.load_state_dict({"weights": torch.zeros(1)})


def test_late_parameters_count_their_own_steps(implementation: str) -> None:
    """A parameter that joins at step 50 takes the first step that the reference takes: g / (|g| + eps)."""
    early, late = torch.nn.Parameter(torch.zeros(9)), torch.nn.Parameter(torch.zeros(9))
    optimizer = Adan([early], lr=0.5, implementation=implementation)
    for _ in range(50):
        early.grad = torch.ones(9)
        optimizer.step()
    optimizer.add_param_group({"params": [late], "lr": 0.25})
    early.grad, late.grad = torch.ones(9), torch.full((9,), -3.0)
    optimizer.step()
    torch.testing.assert_close(late.detach(), torch.full((9,), 0.25))
    assert float(optimizer.state[early]["step"]) == 51
    assert float(optimizer.state[late]["step"]) == 1


def test_a_parameter_without_gradient_is_left_alone(implementation: str) -> None:
    paired = Paired(
        [([torch.zeros(5), torch.zeros(7)], {"weight_decay": 0.5})], implementation=implementation
    )
    paired.step(1)
    still, moving = paired.flat()
    before = still.detach().clone()
    drawn = paired.set_gradients()
    still.grad = None
    paired.optimizer.step()
    assert torch.equal(still, before)
    assert float(paired.optimizer.state[still]["step"]) == 1
    assert float(paired.optimizer.state[moving]["step"]) == 2
    assert drawn


def test_tensors_without_elements_are_stepped_over(implementation: str) -> None:
    values = [torch.zeros(0), torch.zeros(5), torch.zeros(0, 3), torch.zeros(2), torch.zeros(0)]
    paired = Paired([(values, {})], implementation=implementation, max_grad_norm=1.0)
    paired.step(2)
    assert paired.worst_error() < 1e-3
    alone = Paired([([torch.zeros(0)], {})], implementation=implementation)
    alone.step(1)


def test_a_closure_is_called_once_with_gradients_enabled(implementation: str) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = Adan([param], implementation=implementation)
    calls = []

    def closure() -> float:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 3.0
    assert calls == [True]
    assert float(param.detach().max()) < 1.0


def test_without_any_gradient_a_step_does_nothing(implementation: str) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = Adan([param], implementation=implementation, max_grad_norm=1.0)
    optimizer.step()
    assert torch.equal(param, torch.ones(3))


def test_the_gradient_is_not_written(implementation: str) -> None:
    param = torch.nn.Parameter(torch.ones(1025))
    optimizer = Adan([param], implementation=implementation, max_grad_norm=1e-3)
    gradient = torch.randn(1025)
    param.grad = gradient.clone()
    optimizer.step()
    assert torch.equal(param.grad, gradient)


def test_loaded_weights_reach_the_masters_when_refreshed(implementation: str) -> None:
    model = model_of(torch.bfloat16)
    optimizer = Adan(model.parameters(), lr=1e-6, implementation=implementation)
    train(model, optimizer, range(1))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(2.0)
    optimizer.refresh_masters()
    train(model, optimizer, range(1, 2))
    for param in model.parameters():
        torch.testing.assert_close(param, torch.full_like(param, 2.0))


def test_a_learning_rate_tensor_is_read_at_every_step(implementation: str) -> None:
    rate = torch.tensor(0.0)
    param = torch.nn.Parameter(torch.zeros(5))
    optimizer = Adan([param], lr=rate, implementation=implementation)
    param.grad = torch.ones(5)
    optimizer.step()
    assert torch.equal(param, torch.zeros(5))
    rate.fill_(0.5)
    optimizer.step()
    assert float(param.detach().max()) < -0.1


def test_a_copied_or_pickled_optimizer_continues(implementation: str) -> None:
    model = model_of()
    optimizer = Adan(model.parameters(), implementation=implementation, max_grad_norm=0.5)
    train(model, optimizer, range(2))
    twin_model, twin = copy.deepcopy((model, optimizer))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    third_model, third = torch.load(file, weights_only=False)
    for each, step in ((model, optimizer), (twin_model, twin), (third_model, third)):
        train(each, step, range(2, 4))
        assert step.implementation == implementation
    for first, second, other in zip(
        model.parameters(), twin_model.parameters(), third_model.parameters(), strict=True
    ):
        assert torch.equal(first, second)
        assert torch.equal(first, other)


def test_a_scheduler_changes_the_rate(implementation: str) -> None:
    param = torch.nn.Parameter(torch.zeros(5))
    optimizer = Adan([param], lr=1.0, implementation=implementation)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)
    param.grad = torch.ones(5)
    optimizer.step()
    scheduler.step()
    after_first = param.detach().clone()
    optimizer.step()
    torch.testing.assert_close(after_first, torch.full((5,), -1.0))
    assert torch.equal(param, after_first)
