"""Every implementation against the float64 reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cuda_ext import counters, native
from tests.cuda_ext.paired import MOVEMENT_BOUNDS, SIZES, VALUE_BOUNDS, Paired, misaligned

STORAGE: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16-master": (torch.bfloat16, {}),
    "bf16-split": (torch.bfloat16, {"master_weights": "split"}),
    "fp16-master": (torch.float16, {}),
}


def zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=dtype) for size in sizes]


@pytest.mark.parametrize("storage", STORAGE)
def test_follows_the_reference_at_steps_1_2_and_100(implementation: str, storage: str) -> None:
    dtype, options = STORAGE[storage]
    paired = Paired(
        [(zeros(*SIZES, dtype=dtype), {"weight_decay": 0.01})], implementation=implementation, **options
    )
    for steps in (1, 1, 98):
        paired.step(steps)
        assert paired.worst_error() < MOVEMENT_BOUNDS[dtype]
        assert paired.worst_error(of="value") < VALUE_BOUNDS[dtype]


@pytest.mark.parametrize(
    "options",
    [
        {"no_prox": True, "weight_decay": 0.1},
        {"maximize": True},
        {"max_grad_norm": 0.5, "weight_decay": 0.02},
        {"betas": (0.0, 0.0, 0.0)},
        {"eps": 1e-2},
    ],
    ids=lambda options: next(iter(options)),
)
def test_follows_the_reference_with_each_option(implementation: str, options: dict[str, Any]) -> None:
    paired = Paired([(zeros(3, 1025, 4100), {})], implementation=implementation, **options)
    paired.step(5)
    assert paired.worst_error() < 1e-3


def test_a_large_norm_is_not_the_reason_that_clipping_passes(implementation: str) -> None:
    clipped = Paired([(zeros(1025), {})], implementation=implementation, max_grad_norm=1e-3)
    clipped.step(1)
    gradient = clipped.optimizer.state[clipped.flat()[0]]["g_prev"]
    assert float(gradient.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_misaligned_views_follow_the_reference(implementation: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        paired = Paired([([misaligned(size, dtype) for size in SIZES], {})], implementation=implementation)
        paired.step(3)
        assert paired.worst_error() < 1e-3


def test_mixed_dtypes_and_groups_share_one_norm(implementation: str) -> None:
    paired = Paired(
        [
            (zeros(1025, 7) + zeros(1023, dtype=torch.bfloat16), {"lr": 1e-2, "weight_decay": 0.1}),
            (zeros(3, dtype=torch.bfloat16) + zeros(130), {"lr": 1e-3, "betas": (0.9, 0.8, 0.95)}),
            (zeros(64, dtype=torch.float16), {"no_prox": True, "maximize": True}),
        ],
        implementation=implementation,
        max_grad_norm=0.1,
    )
    paired.step(1)
    # Clipped gradients are kept in 16 bits, so only the first step is exact.
    assert paired.worst_error() < 1e-3
    paired.step(4)
    assert paired.worst_error() < 5e-2


def test_more_groups_than_fit_one_launch(implementation: str) -> None:
    groups = [(zeros(5), {"lr": 1e-3 * (index + 1)}) for index in range(40)]
    paired = Paired(groups, implementation=implementation)
    paired.step(3)
    assert paired.worst_error() < 1e-3


def test_bfloat16_moments_stay_near_the_reference(implementation: str) -> None:
    paired = Paired([(zeros(1025), {})], implementation=implementation, moments_dtype=torch.bfloat16)
    paired.step(50)
    assert 1e-5 < paired.worst_error() < 5e-2
    assert paired.optimizer.state[paired.flat()[0]]["exp_avg"].dtype == torch.bfloat16
    assert paired.optimizer.state[paired.flat()[0]]["exp_avg_sq"].dtype == torch.float32


def test_split_master_is_the_fp32_master(implementation: str) -> None:
    """Upper and lower 16 bits together are the same number that an fp32 master holds."""
    results, parameters = [], []
    for kind in ("fp32", "split"):
        paired = Paired(
            [(zeros(4099, dtype=torch.bfloat16), {})], implementation=implementation, master_weights=kind
        )
        paired.step(20)
        param = paired.flat()[0]
        state = paired.optimizer.state[param]
        if kind == "split":
            bits = (param.detach().view(torch.int16).int() << 16) + state["remainder"].int()
            results.append(bits.view(torch.float32))
        else:
            results.append(state["master"])
            assert torch.equal(state["master"].bfloat16(), param)
        parameters.append(param.detach())
    assert torch.equal(*results)
    # Of two values equally near, fp32 masters take the even one.
    between = (results[0].view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(*(values[~between] for values in parameters))


def test_parameters_without_masters_round_at_every_step(implementation: str) -> None:
    param = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    from cuda_ext import Adan

    optimizer = Adan([param], lr=1e-4, implementation=implementation, master_weights="none")
    for _ in range(5):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert torch.equal(param, torch.ones_like(param)), "1e-4 is below half a unit of bfloat16 at 1"
    assert "master" not in optimizer.state[param]


def test_half_overflows_to_infinity_and_keeps_nan(fused: str) -> None:
    from cuda_ext import Adan

    values = torch.tensor([65504.0, -65504.0, 6e-8, 1.0, float("nan")], dtype=torch.float16)
    param = torch.nn.Parameter(values.clone())
    optimizer = Adan([param], lr=64.0, implementation=fused)
    param.grad = torch.tensor([-1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float16)
    optimizer.step()
    expected = torch.tensor([float("inf"), float("-inf"), 6e-8, 1.0, float("nan")], dtype=torch.float16)
    assert torch.equal(param.detach().nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("capability", ["scalar", "avx2", "avx512"])
def test_every_instruction_set_follows_the_reference(
    capability: str, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STILLHOUSE_CPU_CAPABILITY", capability)
    if native.cpu_capability() != capability:
        pytest.skip(f"this processor has no {capability}")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        paired = Paired([(zeros(3, 1025, 40000, dtype=dtype), {})], implementation="multi_fused")
        paired.step(3)
        assert paired.worst_error() < MOVEMENT_BOUNDS[dtype]


def test_fused_results_do_not_depend_on_launches_or_threads(kernels: None) -> None:
    outcomes = []
    threads = torch.get_num_threads()
    for implementation, count in (("single_fused", 1), ("multi_fused", 1), ("multi_fused", 2)):
        torch.set_num_threads(count)
        try:
            paired = Paired([(zeros(*SIZES, 100_000), {})], implementation=implementation, max_grad_norm=0.5)
            paired.step(3)
        finally:
            torch.set_num_threads(threads)
        outcomes.append(torch.cat([param.detach() for param in paired.flat()]))
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2])


def test_the_named_implementation_really_ran(implementation: str) -> None:
    before = counters()
    paired = Paired([(zeros(3, 5, 7), {})], implementation=implementation)
    paired.step(2)
    assert paired.optimizer.implementation == implementation
    ran = {name: count - before.get(name, 0) for name, count in counters().items()}
    expected = {
        "single_unfused": {"single_unfused": 6},
        "multi_unfused": {"multi_unfused": 6},
        "single_fused": {"cpu_calls": 6, "cpu_tensors": 6, "cpu_elements": 30},
        "multi_fused": {"cpu_calls": 2, "cpu_tensors": 6, "cpu_elements": 30},
    }[implementation]
    assert {name: count for name, count in ran.items() if count} == expected
