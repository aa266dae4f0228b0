"""The CUDA kernels, compiled for the CPU: their results, whatever the order of blocks and threads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.adan_variants import VARIANTS, Variant
from cuda_ext import BuildError, adan_state, build
from cuda_ext.parity import ReferenceState, clip_coefficient, reference_step
from tests.cuda_ext.adan_on_host import ORDERS, HostCuda, Problem, compiled
from tests.cuda_ext.paired import MOVEMENT_BOUNDS, SIZES, VALUE_BOUNDS

hypothesis = pytest.importorskip("hypothesis")  # not on every machine that these tests are carried to
st = hypothesis.strategies

FORMATS = (
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, "master"),
    (torch.bfloat16, "remainder"),
    (torch.float16, None),
    (torch.float16, "master"),
)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostCuda:
    try:
        build.compiler()
    except BuildError as error:
        pytest.skip(str(error))
    return compiled(tmp_path_factory.mktemp("adan-on-host"))


@st.composite
def problems(draw: Any) -> Problem:
    dtype, completing = draw(st.sampled_from(FORMATS))
    return Problem(
        sizes=draw(st.lists(st.sampled_from((0, 1, 2, 5, 1023, 8191, 8193, 20_001)), min_size=1, max_size=6)),
        dtype=dtype,
        completing=completing,
        moments=draw(st.sampled_from((torch.float32, torch.bfloat16))),
        offsets=draw(st.sampled_from(((0,), (1,), (0, 0, 0, 0, 1)))),
        steps=draw(st.sampled_from(((0,), (7,), (0, 3, 3)))),
        groups=draw(
            st.sampled_from(
                (
                    ({},),
                    ({"no_prox": True}, {"maximize": True, "betas": (0.0, 0.5, 0.9)}),
                    ({"lr_tensor": 0.5}, {"lr_tensor": 0.25, "weight_decay": 0.0}, {"lr_tensor": 0.125}),
                )
            )
        ),
        max_grad_norm=draw(st.sampled_from((0.0, 0.5))),
        grad_scale=draw(st.sampled_from((None, 1024.0))),
        found_inf=draw(st.sampled_from((None, 0.0, 1.0))),
        seed=draw(st.integers(0, 1000)),
    )


devices = st.fixed_dictionaries(
    {"multiprocessors": st.integers(1, 2), "order": st.sampled_from(ORDERS), "seed": st.integers(0, 1000)}
)
# A share of what the profile draws: 40 of 100.
settings = hypothesis.settings(max_examples=hypothesis.settings.default.max_examples * 2 // 5, deadline=None)


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant.name)
def variant(host: HostCuda, request: pytest.FixtureRequest) -> Iterator[Variant]:
    host.choose(VARIANTS.index(request.param))
    yield request.param
    host.choose(0)


@pytest.mark.parametrize(
    ("order", "step"),
    [
        ("random", 7),
        *(
            pytest.param(order, step, marks=pytest.mark.slow)
            for order in ORDERS
            for step in (0, 7)
            if (order, step) != ("random", 7)
        ),
    ],
)
def test_every_variant_takes_the_scalar_cpu_kernels_step_to_the_last_bit(
    host: HostCuda, variant: Variant, order: str, step: int
) -> None:
    """With sizes around its turns and chunks, aligned and not, and guards around every buffer."""
    turn = variant.threads * variant.width * variant.ahead
    problem = Problem(
        sizes=(1, 3, turn - 1, turn + 5, 3 * turn, variant.chunk - 4, variant.chunk + 4, 2 * variant.chunk),
        offsets=(0, 0, 0, 0, 0, 0, 0, 0, 0, 1),
        steps=(step,),
        groups=({}, {"no_prox": True, "betas": (0.9, 0.8, 0.95)}),
        max_grad_norm=0.5,
    )
    expected = copy.deepcopy(problem)
    host.set_device(multiprocessors=2, order=order)
    assert host.chunk == variant.chunk
    norm = host.norm(problem)
    host.step(problem, norm)
    host.step_on_cpu(expected, norm)
    for buffers, reference in zip(problem.buffers, expected.buffers, strict=True):
        assert buffers.keys() == reference.keys()
        assert [name for name, values in buffers.items() if not torch.equal(values, reference[name])] == []


@settings
@hypothesis.given(problem=problems(), device=devices)
def test_the_step_is_the_scalar_cpu_kernels_to_the_last_bit(
    host: HostCuda, problem: Problem, device: dict[str, Any]
) -> None:
    """Guards included: nothing is written next to a buffer, and nothing at all after an overflow."""
    host.set_device(**device)
    expected, before = copy.deepcopy(problem), copy.deepcopy(problem)
    norm = host.norm(problem) if problem.max_grad_norm else None
    host.step(problem, norm)
    host.step_on_cpu(expected, norm)
    skipped = problem.found_inf == 1.0
    for index, buffers in enumerate(problem.buffers):
        assert buffers["step"] == before.buffers[index]["step"] + (0 if skipped else 1)
        for name, values in buffers.items():
            reference = (before if skipped else expected).buffers[index][name]
            assert torch.equal(values, reference), (index, name)


@settings
@hypothesis.given(problem=problems(), device=devices)
def test_the_norm_is_right_and_the_same_in_every_order(
    host: HostCuda, problem: Problem, device: dict[str, Any]
) -> None:
    host.set_device(device["multiprocessors"])
    norm = host.norm(problem)
    gradients = [problem.inside(index, "grad").double() for index in range(len(problem.sizes))]
    torch.testing.assert_close(norm.double(), torch.cat(gradients).norm(), rtol=1e-5, atol=0.0)
    host.set_device(**device)
    assert torch.equal(host.norm(problem), norm)


@pytest.mark.parametrize("table", [True, False])
def test_a_single_tensor_needs_no_table(host: HostCuda, table: bool) -> None:
    problem = Problem(sizes=(20_001,), max_grad_norm=0.5)
    expected = copy.deepcopy(problem)
    host.set_device()
    norm = host.norm(problem, table=table)
    host.step(problem, norm, table=table)
    host.step_on_cpu(expected, norm)
    assert torch.equal(problem.buffers[0]["param"], expected.buffers[0]["param"])
    assert problem.buffers[0]["step"] == 1.0


@pytest.mark.parametrize(("dtype", "completing"), FORMATS)
def test_follows_the_reference(host: HostCuda, dtype: torch.dtype, completing: str | None) -> None:
    """To the bounds of `tests/gpu`; without a master, to the last places of the parameter.

    Clipped gradients do not fit 16 bits, so that the stored previous gradient would be a rounded one.
    """
    scale, clip = 8.0, 0.5 if dtype == torch.float32 else 0.0
    options = {"lr": 1e-3, "weight_decay": 0.01}
    problem = Problem(
        sizes=SIZES,
        dtype=dtype,
        completing=completing,
        offsets=(0, 1),
        groups=(options,),
        max_grad_norm=clip,
        grad_scale=scale,
    )
    states = []
    for index, buffers in enumerate(problem.buffers):
        for name in ("exp_avg", "exp_avg_diff", "exp_avg_sq"):
            buffers[name].zero_()
        if completing == "remainder":
            buffers[completing].zero_()
        if completing == "master":
            problem.inside(index, "master").copy_(problem.inside(index, "param"))
        states.append(ReferenceState(problem.inside(index, "param")))
    begin = [state.theta for state in states]
    host.set_device(order="random")
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        gradients = []
        for index, size in enumerate(problem.sizes):
            gradient = problem.inside(index, "grad")
            gradient.copy_(torch.randn(size, generator=generator) * scale)
            gradients.append(gradient.clone())
        host.step(problem, host.norm(problem) if clip else None)
        factor = clip_coefficient([gradient.double() / scale for gradient in gradients], clip) / scale
        for state, gradient in zip(states, gradients, strict=True):
            reference_step(state, gradient, factor=factor, **options)
    for index, (state, first) in enumerate(zip(states, begin, strict=True)):
        parts = {} if completing is None else {completing: problem.inside(index, completing)}
        theta = adan_state.load(problem.inside(index, "param"), parts).double()
        error = float((theta - state.theta).abs().max())
        if completing is None and dtype != torch.float32:
            assert error < 3 * torch.finfo(dtype).eps * float(state.theta.abs().max())
            continue
        assert error < MOVEMENT_BOUNDS[dtype] * float((state.theta - first).abs().max())
        assert error < VALUE_BOUNDS[dtype] * float(state.theta.abs().max())
