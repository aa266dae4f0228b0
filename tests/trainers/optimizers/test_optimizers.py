"""The choice of implementations and the schedule; the update itself is tested in tests/cuda_ext."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_ext import BuildError, native
from trainers.config import Optimizer
from trainers.optimizers import OPTIMIZERS
from trainers.update import build, learning_rate, restart

IMPLEMENTATIONS = [
    ("adamw", "single_unfused"),
    ("adamw", "multi_unfused"),
    ("adamw", "multi_fused"),
    ("adan", "single_unfused"),
    ("adan", "multi_unfused"),
    ("adan", "single_fused"),
    ("adan", "multi_fused"),
]


@pytest.mark.parametrize(
    ("name", "implementation", "runs"),
    [
        *((name, implementation, implementation) for name, implementation in IMPLEMENTATIONS),
        ("adamw", "auto", "multi_fused"),
        ("adan", "auto", "multi_fused"),
    ],
)
def test_built_optimizer_says_what_runs(name, implementation, runs):
    built = build(Optimizer(name=name, implementation=implementation), torch.nn.Linear(2, 2))
    assert (built.implementation, built.fallback) == (runs, None)


def test_our_kernels_bring_the_evidence_of_their_parity():
    built = build(
        Optimizer(name="adan", implementation="multi_fused", betas=(0.9, 0.8, 0.95)), torch.nn.Linear(2, 2)
    )
    assert built.parity is not None
    assert built.parity["passed"]
    assert built.parity["implementation"] == "multi_fused"
    assert sum(built.parity["kernels_ran"].values()) > 0


def test_without_a_compiler_the_unfused_twin_runs_and_says_why(monkeypatch):
    monkeypatch.setattr(native, "require", _no_compiler)
    built = build(Optimizer(name="adan"), torch.nn.Linear(2, 2))
    assert built.implementation == "multi_unfused"
    assert built.fallback == "no C++ compiler was found"
    assert built.parity is None


def _no_compiler(device_type):
    raise BuildError("no C++ compiler was found")


def test_biases_and_norms_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    decaying, rest = build(Optimizer(weight_decay=0.1), model).optimizer.param_groups
    assert [p.ndim for p in decaying["params"]] == [2]
    assert [p.ndim for p in rest["params"]] == [1, 1, 1]
    assert (decaying["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)


def take_steps(optimizer: torch.optim.Optimizer, model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()


@pytest.mark.parametrize(("name", "implementation"), IMPLEMENTATIONS)
def test_restarted_optimizer_goes_on_as_a_new_one(name, implementation):
    config = Optimizer(name=name, implementation=implementation, learning_rate=0.1)
    model = torch.nn.Linear(3, 3)
    optimizer = build(config, model).optimizer
    take_steps(optimizer, model, seed=0)
    other = copy.deepcopy(model)
    restart(optimizer)
    take_steps(optimizer, model, seed=1)
    take_steps(build(config, other).optimizer, other, seed=1)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


@pytest.mark.parametrize(
    ("name", "dtype", "masters"),
    [
        ("adan", torch.bfloat16, "split"),
        ("adan", torch.float16, "fp32"),
        ("adan", torch.float32, None),
        ("adamw", torch.bfloat16, "fp32"),
        ("adamw", torch.float16, "fp32"),
    ],
)
def test_masters_are_split_unless_set_where_optimizer_and_format_have_it(name, dtype, masters):
    assert build(Optimizer(name=name), torch.nn.Linear(3, 3).to(dtype)).masters == masters
    whole = build(Optimizer(name=name, masters="fp32"), torch.nn.Linear(3, 3).to(dtype))
    assert whole.masters == (None if masters is None else "fp32")


def test_the_masters_of_a_run_that_sets_none_are_bitwise_fp32_masters():
    found = []
    for chosen in ({}, {"masters": "fp32"}):
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64).bfloat16()
        optimizer = build(Optimizer(name="adan", learning_rate=1e-4, **chosen), model).optimizer
        for seed in range(20):
            take_steps(optimizer, model, seed=seed)
        state = optimizer.state[model.weight]
        upper = model.weight.detach().view(torch.int16).int() << 16
        found.append(state["master"] if chosen else (upper + state["remainder"]).view(torch.float32))
    split, whole = found
    assert torch.equal(split, whole)
    assert not torch.equal(whole, whole.bfloat16().float())


@pytest.mark.parametrize("name", ["adamw", "adan"])
def test_restart_keeps_masters(name):
    model = torch.nn.Linear(3, 3).bfloat16()
    optimizer = build(Optimizer(name=name, learning_rate=1e-4, masters="fp32"), model).optimizer
    take_steps(optimizer, model, seed=0)
    before = {i: state["master"].clone() for i, state in optimizer.state_dict()["state"].items()}
    restart(optimizer)
    after = {i: state["master"] for i, state in optimizer.state_dict()["state"].items()}
    assert not torch.equal(before[0], before[0].bfloat16().float())
    assert [i for i in before if not torch.equal(before[i], after[i])] == []


@pytest.mark.parametrize(
    ("options", "stored", "each"),
    [
        ({"name": "adamw"}, "fp32", 8),
        ({"name": "adamw"}, "bf16", 12),
        ({"name": "adan"}, "fp32", 16),
        ({"name": "adan"}, "bf16", 16),
        ({"name": "adan", "masters": "fp32"}, "bf16", 18),
        ({"name": "adan", "masters": "split"}, "bf16", 16),
        ({"name": "adan", "masters": "split", "moments": "bf16"}, "bf16", 12),
    ],
)
def test_memory_that_is_planned_for_the_state_is_what_the_state_takes(configure, options, stored, each):
    half = {"precision": stored, "numerics": {"parameters": "half"}} if stored != "fp32" else {}
    config = configure(optimizer=options, **half)
    model = torch.nn.Linear(64, 64, bias=False)
    if half:
        model.bfloat16()
    optimizer = build(config.optimizer, model).optimizer
    take_steps(optimizer, model, seed=0)
    state = optimizer.state_dict()["state"][0]
    held = sum(value.nbytes for value in state.values() if value.ndim)
    assert config.state_bytes == each == held / model.weight.numel()


def test_the_page_has_the_optimizers_as_they_are():
    page = (Path(__file__).parents[3] / "docs/optimizer.md").read_text(encoding="utf-8")
    for info in OPTIMIZERS.values():
        words = (info.implementations, info.masters, info.moments, info.options)
        cells = [f"`{info.name}`", info.summary, str(info.betas)]
        cells += [str(info.states.size_bytes("fp32", "fp32", "fp32"))]
        cells += [", ".join(f"`{word}`" for word in choices) for choices in words]
        line = f"| {' | '.join(cells)} |"
        assert line in page, f"docs/optimizer.md lacks the line:\n{line}"


@pytest.mark.parametrize("shape", ["linear", "constant"])
def test_warmup_in_steps_is_the_warmup_of_the_fraction_that_they_are(shape):
    steps = Optimizer(learning_rate=1.0, warmup_steps=25, schedule=shape)
    share = Optimizer(learning_rate=1.0, warmup_fraction=0.25, schedule=shape)
    assert [learning_rate(steps, i, 100) for i in range(100)] == [
        learning_rate(share, i, 100) for i in range(100)
    ]
    assert learning_rate(steps, 24, 1000) == 25 / 26
    assert learning_rate(Optimizer(warmup_steps=25, schedule="constant"), 25, 1000) == 1e-4


def test_a_stage_shorter_than_the_warmup_rises_to_its_end():
    config = Optimizer(learning_rate=1.0, warmup_steps=10)
    assert [learning_rate(config, i, 4) for i in range(4)] == [1 / 11, 2 / 11, 3 / 11, 4 / 11]


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
