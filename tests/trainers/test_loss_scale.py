"""Loss scale and schedule in numbers: steps of the scale, what divides gradients, the rate of each step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainers.config import Numerics, Optimizer, Precision
from trainers.models.latent import Latent
from trainers.update import (
    MAXIMUM,
    RATE_FACTOR,
    DeviceLossScale,
    DynamicLossScale,
    LossScale,
    Update,
    learning_rate,
    loss_scale_for,
    restart,
)

CPU = torch.device("cpu")


class CallOrder(Latent):
    """Records the order of its calls."""

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def before_update(self) -> None:
        self._order.append("before")

    def after_update(self) -> None:
        self._order.append("after")


class Recorded(torch.optim.SGD):
    """Notes the gradients and the fields that each step was taken with."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, lr=0.0)
        self.steps: list[tuple[list[float], float | None, float | None]] = []
        self.order: list[str] = []
        for name, value in options.items():
            setattr(self, name, value)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.order.append("step")
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]).tolist()
        fields = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        self.steps.append((flat, *(None if one is None else one.item() for one in fields)))


def weight(*gradient: float) -> nn.Module:
    """A module with one parameter and its gradient."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(len(gradient)))
    module.weight.grad = torch.tensor(gradient)
    return module


def update_of(module: nn.Module, scale: LossScale, limit: float, **options: Any) -> tuple[Update, Recorded]:
    optimizer = Recorded([*module.parameters()], **options)
    return Update(
        module, optimizer, scale, torch.float16, limit, latent=CallOrder(optimizer.order)
    ), optimizer


# -- The scale -------------------------------------------------------------------------------


def test_a_run_without_fp16_has_the_scale_1_for_good() -> None:
    scale = LossScale()
    scale.applied()
    assert (scale.value, scale.dynamic, scale.back_off(), scale.to_state()) == (1.0, False, False, {})
    scale.restore({"value": 2.0})
    assert scale == LossScale(1.0)


def test_the_scale_is_dynamic_in_fp16_alone_and_begins_as_configured(configure: Any) -> None:
    assert [
        precision for precision in Precision if loss_scale_for(configure(precision=precision)).dynamic
    ] == [Precision.fp16]
    numerics = {"initial_loss_scale": 512.0, "loss_scale_growth_steps": 7}
    found = loss_scale_for(configure(precision="fp16", numerics=numerics))
    assert found == DynamicLossScale(512.0, 7, 0)


def test_the_scale_of_torch_and_apex_is_the_default() -> None:
    assert (DynamicLossScale().growth_steps, DynamicLossScale().clean_steps) == (2000, 0)
    assert (MAXIMUM, Numerics().loss_scale_growth_steps) == (2.0**24, 2000)


def test_the_scale_grows_after_exactly_its_clean_steps_and_counts_again() -> None:
    scale = DynamicLossScale(4.0, growth_steps=2)
    seen = []
    for _ in range(5):
        scale.applied()
        seen.append((scale.value, scale.clean_steps))
    assert seen == [(4.0, 1), (8.0, 0), (8.0, 1), (16.0, 0), (16.0, 1)]


def test_an_overflow_forgets_the_clean_steps_even_at_the_least_scale() -> None:
    for value, after, lowered in ((8.0, 4.0, True), (1.5, 1.0, True), (1.0, 1.0, False), (0.5, 0.5, False)):
        scale = DynamicLossScale(value, 9, clean_steps=3)
        assert scale.back_off() is lowered
        assert (scale.value, scale.clean_steps) == (after, 0)


def test_the_scale_never_exceeds_its_maximum() -> None:
    scale = DynamicLossScale(MAXIMUM * 0.75, growth_steps=1)
    scale.applied()
    assert scale.value == MAXIMUM


def test_a_scale_continues_from_its_state_and_stays_without_one() -> None:
    saved = DynamicLossScale(32.0, 5, clean_steps=3).to_state()
    assert saved == {"value": 32.0, "clean_steps": 3}
    scale = DynamicLossScale(2.0, 5, 1)
    scale.restore({})
    assert scale == DynamicLossScale(2.0, 5, 1)
    scale.restore(saved)
    assert scale == DynamicLossScale(32.0, 5, 3)


def test_the_scale_of_the_device_begins_and_follows_as_the_hosts_stands() -> None:
    host = DynamicLossScale(32.0, 5, clean_steps=3)
    device = DeviceLossScale(host, CPU)
    assert (device.value, device._clean) == (torch.tensor(32.0).double(), torch.tensor(3.0).double())
    assert device.value.dtype == device._clean.dtype == torch.float64
    assert device.value.shape == device._clean.shape == ()
    host.value, host.clean_steps = 4.0, 1
    device.follow()
    assert (device.value.item(), device._clean.item()) == (4.0, 1.0)


def test_the_scale_of_the_device_goes_to_the_device_of_the_gradients() -> None:
    device = DeviceLossScale(DynamicLossScale(32.0), torch.device("meta"))
    assert device.value.device.type == device._clean.device.type == "meta"


def test_the_scale_of_the_device_takes_each_step_as_the_hosts_does() -> None:
    yes, no = torch.tensor(True), torch.tensor(False)
    device = DeviceLossScale(DynamicLossScale(8.0, growth_steps=2), CPU)
    seen = []
    for loss_finite, finite in ((yes, yes), (yes, yes), (yes, yes), (no, no), (yes, no), (yes, yes)):
        device.step(loss_finite, finite)
        seen.append((device.value.item(), device._clean.item()))
    assert seen == [(8.0, 1.0), (16.0, 0.0), (16.0, 1.0), (16.0, 1.0), (8.0, 0.0), (8.0, 1.0)]


@pytest.mark.parametrize(("value", "step", "after"), [(1.5, False, 1.0), (MAXIMUM * 0.75, True, MAXIMUM)])
def test_the_scale_of_the_device_stays_within_its_bounds(value: float, step: bool, after: float) -> None:
    device = DeviceLossScale(DynamicLossScale(value, growth_steps=1), CPU)
    device.step(torch.tensor(True), torch.tensor(step))
    assert device.value.item() == after


# -- What a step does with it ----------------------------------------------------------------


@pytest.mark.parametrize("divides", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize(
    ("scale", "limit", "norm", "divisor"),
    [(8.0, 0.0, 50.0, 8.0), (8.0, 10.0, 50.0, 40.0), (8.0, 100.0, 50.0, 8.0), (1.0, 0.5, 5.0, 10.0)],
)
def test_a_step_divides_by_scale_and_clipping_and_returns_what_clipping_did(
    divides: bool, scale: float, limit: float, norm: float, divisor: float
) -> None:
    module = weight(3.0, 4.0)
    options = {"_step_supports_amp_scaling": True} if divides else {}
    update, optimizer = update_of(module, DynamicLossScale(scale), limit, **options)
    assert update.apply(norm, 0.25) == pytest.approx(divisor / scale)
    ((gradient, grad_scale, _),) = optimizer.steps
    assert gradient == pytest.approx([3.0, 4.0] if divides else [3.0 / divisor, 4.0 / divisor])
    assert grad_scale == (divisor if divides else None)
    assert getattr(optimizer, "grad_scale", None) is None
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.order == ["before", "step", "after"]


def test_a_step_without_scale_or_clipping_is_the_optimizers_own() -> None:
    update, optimizer = update_of(weight(3.0), DynamicLossScale(1.0), 4.0, _step_supports_amp_scaling=True)
    assert update.apply(4.0, 0.5) == 1.0
    assert optimizer.steps == [([3.0], None, None)]


def test_an_optimizer_with_a_field_for_it_divides_as_a_fused_one_does() -> None:
    update, optimizer = update_of(weight(3.0), DynamicLossScale(2.0), 0.0, grad_scale=None)
    update.apply(1.0, 0.5)
    assert optimizer.steps == [([3.0], 2.0, None)]


def test_groups_have_their_own_factor_of_the_rate() -> None:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        [{"params": [module.weight]}, {"params": [module.bias], RATE_FACTOR: 0.5}], lr=0.0
    )
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    Update(module, optimizer, LossScale(), None, 0.0).apply(1.0, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]


def test_the_norm_is_that_of_the_counted_parameters_in_double() -> None:
    module = nn.ModuleDict({"mine": weight(3.0, 4.0), "theirs": weight(7.0), "idle": weight(1.0)})
    module["idle"].weight.grad = None
    optimizer = torch.optim.SGD([*module.parameters()])
    every = Update(module, optimizer, LossScale(), None, 0.0).squares()
    assert (every.item(), every.dtype) == (9.0 + 16.0 + 49.0, torch.float64)
    counted = Update(module, optimizer, LossScale(), None, 0.0, counted=[module["mine"].weight])
    assert counted.squares().item() == 25.0


def test_the_norm_of_half_gradients_is_beyond_their_range() -> None:
    module = weight(6e4, 6e4, 6e4, 6e4).half()
    module.weight.grad = torch.full_like(module.weight, 6e4)
    update, _ = update_of(module, DynamicLossScale(), 0.0)
    assert update.squares().item() == pytest.approx(4 * 6e4**2, rel=1e-2)


@pytest.mark.parametrize(
    ("scale", "limit", "divisor"),
    [(8.0, 0.0, 8.0), (8.0, 0.125, 40.0), (8.0, 1.0, 8.0), (1.0, 0.5, 10.0)],
)
def test_a_step_on_the_device_divides_as_on_the_host(scale: float, limit: float, divisor: float) -> None:
    """The gradients' norm is 5, with the scale."""
    for on_device in (True, False):
        update, optimizer = update_of(weight(3.0, 4.0), DynamicLossScale(scale), limit)
        if on_device:
            update.decide_on_device()
        update.apply_if_finite(torch.tensor(1.0), update.squares(), 0.25)
        assert optimizer.steps == [([3.0, 4.0], pytest.approx(divisor), 0.0)]
        assert (optimizer.grad_scale, optimizer.found_inf) == (None, None)
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert optimizer.order == ["before", "step", "after"]


def test_a_step_on_the_device_is_clipped_without_a_scale() -> None:
    update, optimizer = update_of(weight(3.0, 4.0), LossScale(), 0.5)
    update.apply_if_finite(torch.tensor(1.0), update.squares(), 0.25)
    assert optimizer.steps == [([3.0, 4.0], pytest.approx(10.0), 0.0)]


class Placed(torch.optim.SGD):
    """Notes where the divisor of each step is."""

    grad_scale: torch.Tensor | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.grad_scale is not None
        self.places = [*getattr(self, "places", []), self.grad_scale.device.type]


def test_a_step_on_the_device_reads_nothing_and_keeps_its_numbers_there() -> None:
    """Tensors of the meta device have no values that could be read."""
    module = nn.Linear(2, 2, device="meta")
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = Placed(module.parameters())
    update = Update(module, optimizer, DynamicLossScale(8.0), torch.float16, 0.5)
    update.apply(1.0, 0.25)
    update.decide_on_device()
    assert update.next_scale.device.type == "meta"  # type: ignore[union-attr]
    update.apply_if_finite(torch.zeros((), device="meta"), update.squares(), 0.25)
    assert optimizer.places == ["meta", "meta"]
    assert update.next_scale.device.type == "meta"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("loss", "squares"), [(torch.inf, 1.0), (torch.nan, 1.0), (1.0, torch.inf), (1.0, torch.nan)]
)
def test_a_step_on_the_device_is_skipped_where_loss_or_gradients_are_not_finite(
    loss: float, squares: float
) -> None:
    scale = DynamicLossScale(8.0, 5, clean_steps=2)
    update, optimizer = update_of(weight(3.0), scale, 0.0)
    update.decide_on_device()
    update.apply_if_finite(torch.tensor(loss), torch.tensor(squares).double(), 0.25)
    assert optimizer.steps == [([3.0], 8.0, 1.0)]
    lowered = torch.tensor(loss).isfinite().item()
    assert update.next_scale.item() == (4.0 if lowered else 8.0)  # type: ignore[union-attr]
    assert scale.value == 8.0  # The host's follows when it reads the step.
    update.follow_scale()
    assert update.next_scale.item() == 8.0  # type: ignore[union-attr]


def test_a_step_on_the_device_without_scale_or_limit_divides_nothing() -> None:
    update, optimizer = update_of(weight(3.0), LossScale(), 0.0)
    update.decide_on_device()
    assert update.next_scale == 1.0
    update.follow_scale()
    update.apply_if_finite(torch.tensor(1.0), update.squares(), 0.25)
    assert optimizer.steps == [([3.0], None, 0.0)]


def test_a_fixed_scale_other_than_1_divides_on_the_device() -> None:
    update, optimizer = update_of(weight(3.0), LossScale(4.0), 0.0)
    update.apply_if_finite(torch.tensor(1.0), update.squares(), 0.25)
    assert optimizer.steps == [([3.0], 4.0, 0.0)]


@pytest.mark.parametrize(
    ("options", "skips"),
    [
        ({}, False), ({"_step_supports_amp_scaling": True}, True), ({"skips_on_device": True}, True),
        ({"skips_on_device": False, "_step_supports_amp_scaling": True}, False),
    ],
)  # fmt: skip
def test_an_optimizer_skips_on_the_device_where_its_kernels_can(
    options: dict[str, bool], skips: bool
) -> None:
    update, _ = update_of(weight(1.0), LossScale(), 0.0, **options)
    assert update.skips_on_device is skips


def test_forgotten_gradients_are_gone() -> None:
    update, _ = update_of(module := weight(1.0), LossScale(), 0.0)
    update.clear()
    assert module.weight.grad is None


def test_a_new_loss_begins_with_moments_of_0() -> None:
    module = weight(1.0)
    optimizer = torch.optim.SGD([*module.parameters()], momentum=0.9)
    update = Update(module, optimizer, LossScale(), None, 0.0)
    update.apply(1.0, 0.1)
    restart(update.optimizer)
    assert optimizer.state[module.weight]["momentum_buffer"].item() == 0.0


def test_underflow_is_a_share_of_what_is_trained_and_has_a_gradient() -> None:
    module = nn.ModuleList([weight(1e-9, 1.0, 1.0, 1.0), weight(1.0), weight(1e-9)])
    module[1].weight.grad = None
    module[2].weight.requires_grad = False
    update = Update(module, torch.optim.SGD([module[0].weight]), LossScale(), torch.float16, 0.0)
    share = update.underflow_pct()
    assert share is not None
    assert share.item() == pytest.approx(25.0)


# -- The rate --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "rates"),
    [("linear", [1.0, 2.0, 3.0, 2.25, 1.5, 0.75]), ("constant", [1.0, 2.0, 3.0, 3.0, 3.0, 3.0])],
)
def test_the_rate_rises_to_its_peak_and_then_falls_or_stays(shape: Any, rates: list[float]) -> None:
    config = Optimizer(learning_rate=3.0, warmup_steps=2, schedule=shape)
    assert [learning_rate(config, step, 6) for step in range(6)] == pytest.approx(rates)


def test_a_warmup_in_parts_is_of_the_steps_of_its_stage() -> None:
    config = Optimizer(learning_rate=3.0, warmup_fraction=0.3)
    assert [learning_rate(config, step, 6) for step in range(3)] == pytest.approx([1.0, 2.0, 3.0])
    assert learning_rate(config, 3, 10) == pytest.approx(3.0)
