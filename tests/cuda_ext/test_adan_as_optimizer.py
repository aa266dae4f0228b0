"""What users of torch's optimizers rely on, after torch's own tests, for every implementation."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler

from cuda_ext import Adan, HyperParameterError, LayoutError, StateDictError, TensorMismatchError
from tests.cuda_ext.paired import Paired


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (5,), dtype=dtype))


def stepped(implementation: str, *params: nn.Parameter, **options: Any) -> Adan:
    """An optimizer after a first step."""
    optimizer = Adan(params, implementation=implementation, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


class TestMemoryOrder:
    def test_the_first_gradient_may_lie_in_another_order(self, implementation: str) -> None:
        """Copied before anything is launched: no parameter of the step is stepped twice."""
        params = [
            parameter(3),
            nn.Parameter(torch.zeros(7, 5).t()),
            nn.Parameter(torch.zeros(7, 5, dtype=torch.bfloat16).t()),
        ]
        optimizer = Adan(params, lr=0.5, implementation=implementation, max_grad_norm=100.0)
        for param in params:
            param.grad = torch.ones(param.shape, dtype=param.dtype)
        optimizer.step()
        assert [float(optimizer.state[param]["step"]) for param in params] == [1.0, 1.0, 1.0]
        torch.testing.assert_close(params[0].detach(), torch.full((3,), 0.5))
        assert params[1].stride() == (1, 5)

    def test_a_gap_is_refused_before_any_parameter_is_stepped(self, fused: str) -> None:
        params = [parameter(3), nn.Parameter(torch.zeros(6, 8)[:, ::2])]
        optimizer = Adan(params, implementation=fused)
        for param in params:
            param.grad = torch.ones_like(param)
        with pytest.raises(LayoutError, match="make it contiguous"):
            optimizer.step()
        assert torch.equal(params[0], torch.ones(3))


class TestState:
    def test_what_a_pre_hook_returns_is_restored(self, implementation: str) -> None:
        param = parameter()
        optimizer = stepped(implementation, param)

        def doubled(_optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            changed = copy.deepcopy(given)
            changed["state"][0]["exp_avg"] *= 2.0
            changed["param_groups"][0]["lr"] = 7.0
            return changed

        before = optimizer.state[param]["exp_avg"].clone()
        optimizer.register_load_state_dict_pre_hook(doubled)
        optimizer.load_state_dict(optimizer.state_dict())
        assert torch.equal(optimizer.state[param]["exp_avg"], 2.0 * before)
        assert optimizer.param_groups[0]["lr"] == 7.0

    def test_a_pre_hook_may_complete_a_checkpoint(self, implementation: str) -> None:
        param = parameter()
        optimizer = stepped(implementation, param)
        lacking = copy.deepcopy(optimizer.state_dict())
        del lacking["state"][0]["g_prev"]

        def complete(_optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
            given["state"] = {0: {**given["state"][0], "g_prev": torch.full((5,), 3.0)}}

        optimizer.register_load_state_dict_pre_hook(complete)
        optimizer.load_state_dict(lacking)
        assert torch.equal(optimizer.state[param]["g_prev"], torch.full((5,), 3.0))

    def test_a_post_hook_finds_the_state_restored(self, implementation: str) -> None:
        param = parameter(dtype=torch.bfloat16)
        optimizer = stepped(implementation, param)
        seen: list[torch.dtype] = []
        optimizer.register_load_state_dict_post_hook(
            lambda given: seen.append(given.state[param]["master"].dtype)
        )
        optimizer.load_state_dict(optimizer.state_dict())
        assert seen == [torch.float32]

    @pytest.mark.parametrize("option", ["maximize", "no_prox"])
    def test_a_group_saved_before_an_option_existed_has_it_off(
        self, implementation: str, option: str
    ) -> None:
        param = parameter()
        optimizer = stepped(implementation, param, lr=0.5)
        older = copy.deepcopy(optimizer.state_dict())
        del older["param_groups"][0][option]
        optimizer.load_state_dict(older)
        optimizer.step()
        assert optimizer.param_groups[0][option] is False
        assert float(param.detach().max()) < 0.5

    def test_a_group_without_a_learning_rate_is_refused(self, implementation: str) -> None:
        optimizer = stepped(implementation, parameter())
        lacking = copy.deepcopy(optimizer.state_dict())
        del lacking["param_groups"][0]["lr"]
        with pytest.raises(StateDictError, match="group 0 of the checkpoint lacks lr"):
            optimizer.load_state_dict(lacking)

    def test_a_step_count_may_be_a_number(self, implementation: str) -> None:
        param = parameter()
        optimizer = stepped(implementation, param)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["step"] = 4.0
        optimizer.load_state_dict(saved)
        optimizer.step()
        assert float(optimizer.state[param]["step"]) == 5.0
        optimizer.state[param]["step"] = 7
        optimizer.step()
        assert float(optimizer.state[param]["step"]) == 8.0

    def test_state_of_others_survives_a_load(self, implementation: str) -> None:
        param = parameter()
        optimizer = stepped(implementation, param)
        optimizer.state[param]["ema"] = torch.ones(2)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert torch.equal(optimizer.state[param]["ema"], torch.ones(2))

    def test_masters_that_are_not_kept_are_dropped(self, implementation: str) -> None:
        param = parameter(dtype=torch.bfloat16)
        saved = stepped(implementation, param).state_dict()
        optimizer = Adan([param], implementation=implementation, master_weights="none")
        optimizer.load_state_dict(saved)
        assert "master" not in optimizer.state[param]

    def test_parameters_cast_after_a_step_are_refused(self, implementation: str) -> None:
        param = parameter()
        optimizer = stepped(implementation, param)
        param.data = param.data.bfloat16()
        param.grad = torch.ones(5, dtype=torch.bfloat16)
        with pytest.raises(TensorMismatchError, match="its state was made for another dtype"):
            optimizer.step()
        assert torch.equal(param, torch.ones_like(param))

    def test_parameters_may_have_names(self, implementation: str) -> None:
        model = nn.Linear(3, 2)
        optimizer = Adan(model.named_parameters(), implementation=implementation)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
        optimizer.load_state_dict(optimizer.state_dict())


class TestHalfPrecision:
    def test_a_small_previous_gradient_of_fp16_survives(self, implementation: str) -> None:
        """Unscaled it is 3e-8, which is 0 in fp16; two equal gradients then differ by themselves."""
        param = parameter(64, dtype=torch.float16)
        optimizer = Adan([param], implementation=implementation)
        optimizer.grad_scale = torch.tensor(65536.0)
        for _ in range(2):
            param.grad = torch.full((64,), 2e-3, dtype=torch.float16)
            optimizer.step()
        state = optimizer.state[param]
        unscaled = float(param.grad[0]) / 65536.0
        torch.testing.assert_close(
            state["g_prev"].float(), torch.full((64,), unscaled), rtol=2.0**-8, atol=0.0
        )
        assert float(state["exp_avg_diff"].abs().max()) < 0.01 * unscaled

    def test_a_checkpoint_with_an_fp16_previous_gradient_loads(self, implementation: str) -> None:
        param = parameter(dtype=torch.float16)
        optimizer = stepped(implementation, param)
        older = copy.deepcopy(optimizer.state_dict())
        older["state"][0]["g_prev"] = older["state"][0]["g_prev"].half()
        optimizer.load_state_dict(older)
        optimizer.step()
        assert optimizer.state[param]["g_prev"].dtype == torch.bfloat16


class TestHyperParameters:
    @pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
    def test_a_learning_rate_tensor_has_the_same_range(self, rate: float) -> None:
        with pytest.raises(HyperParameterError, match="lr is "):
            Adan([parameter()], lr=torch.tensor(rate))

    @pytest.mark.parametrize("implementation", ["single_unfused", "multi_unfused"])
    def test_double_precision_is_clipped(self, implementation: str) -> None:
        values = [torch.zeros(33, dtype=torch.float64), torch.zeros(7)]
        paired = Paired([(values, {})], implementation=implementation, max_grad_norm=1e-3)
        paired.step(3)
        assert paired.worst_error() < 1e-4

    def test_no_parameters_and_repeated_ones_are_refused(self, implementation: str) -> None:
        with pytest.raises(ValueError, match="empty parameter list"):
            Adan([], implementation=implementation)
        param = parameter()
        with pytest.raises(ValueError, match="more than one parameter group"):
            Adan([{"params": [param]}, {"params": [param]}], implementation=implementation)

    def test_groups_are_like_optimizers_of_their_own(self, implementation: str) -> None:
        options: list[dict[str, Any]] = [
            {"lr": 0.1, "weight_decay": 0.5},
            {"lr": 0.2, "betas": (0.9, 0.8, 0.7), "no_prox": True},
            {"lr": 0.3, "eps": 1e-2, "maximize": True},
        ]
        together, alone = [[parameter(33) for _ in options] for _ in range(2)]
        grouped = Adan(
            [{"params": [param], **own} for param, own in zip(together, options, strict=True)],
            implementation=implementation,
        )
        own = [Adan([p], implementation=implementation, **o) for p, o in zip(alone, options, strict=True)]
        for step in range(3):
            for param in (*together, *alone):
                param.grad = torch.linspace(-1.0, 2.0, 33) * (step + 1)
            for optimizer in (grouped, *own):
                optimizer.step()
        for first, second in zip(together, alone, strict=True):
            assert torch.equal(first, second)


class TestHooks:
    def test_step_hooks_run_around_the_step(self, implementation: str) -> None:
        param = parameter()
        optimizer = Adan([param], lr=0.5, implementation=implementation)
        seen: list[tuple[str, float]] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(("before", float(param.detach()[0]))))
        optimizer.register_step_post_hook(lambda *_: seen.append(("after", float(param.detach()[0]))))
        param.grad = torch.ones(5)
        optimizer.step()
        assert seen == [("before", 1.0), ("after", pytest.approx(0.5))]

    def test_state_dict_hooks_run(self, implementation: str) -> None:
        optimizer = stepped(implementation, parameter())
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "run": 12})
        assert optimizer.state_dict()["run"] == 12


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.2, total_steps=9, cycle_momentum=False
    ),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [3],
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_schedulers_set_the_rate_that_a_step_takes(
    implementation: str, scheduler: Callable[[torch.optim.Optimizer], Any], as_tensor: bool
) -> None:
    """A rate that the reference takes as well; a tensor is changed in place and read at each step."""
    begin = torch.tensor(0.1) if as_tensor else 0.1
    paired = Paired([([torch.zeros(33)], {})], implementation=implementation, lr=begin)
    with warnings.catch_warnings():
        # Schedulers of schedulers step once before the optimizer does, as torch itself warns.
        warnings.simplefilter("ignore")
        schedule = scheduler(paired.optimizer)
        rates = set()
        for _ in range(6):
            rates.add(round(float(paired.optimizer.param_groups[0]["lr"]), 6))
            drawn = paired.set_gradients()
            paired.optimizer.step()
            with torch.no_grad():
                rate = paired.optimizer.param_groups[0]["lr"]
                paired.optimizer.param_groups[0]["lr"] = float(rate)
                paired.advance_reference(drawn)
                paired.optimizer.param_groups[0]["lr"] = rate
            schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
    assert len(rates) > 1
    assert paired.worst_error() < 1e-3


class TestDistributedCheckpoint:
    def test_state_is_saved_and_loaded_by_name(self, implementation: str, tmp_path: Path) -> None:
        def made() -> tuple[nn.Module, Adan]:
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)).bfloat16()
            return model, Adan(model.parameters(), implementation=implementation, weight_decay=0.1)

        def train(model: nn.Module, optimizer: Adan, steps: range) -> None:
            for step in steps:
                optimizer.zero_grad()
                batch: Tensor = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).bfloat16()
                model(batch).square().mean().backward()
                optimizer.step()

        whole, optimizer = made()
        train(whole, optimizer, range(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # saved without a process group, as torch remarks
            saved = {"model": whole.state_dict(), "optimizer": get_optimizer_state_dict(whole, optimizer)}
            checkpoint.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
            other, second = made()
            empty = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, second)}
            checkpoint.load(empty, checkpoint_id=tmp_path / "saved", no_dist=True)
        other.load_state_dict(empty["model"])
        set_optimizer_state_dict(other, second, empty["optimizer"])
        train(whole, optimizer, range(3, 6))
        train(other, second, range(3, 6))
        for first, resumed in zip(whole.parameters(), other.parameters(), strict=True):
            assert torch.equal(first, resumed)
