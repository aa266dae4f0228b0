"""Products with packed binary weights next to the simulated layer, bit for bit in every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cuda_ext import ConfigurationError, binary
from tests.cuda_ext.binary_reference import (
    binary_linear,
    binary_weight_linear,
    reference_weight_linear,
    unpack,
)

hypothesis = pytest.importorskip("hypothesis")  # not on every machine that these tests are carried to
st = hypothesis.strategies

SETS = ("scalar", "neon", "avx2", "avx512")
SIZES = ((1, 1, 1), (2, 33, 17), (3, 31, 15), (5, 64, 16), (1, 768, 48), (9, 1023, 70), (4, 8200, 5))
"""Rows, inputs, outputs: odd ones, more words than a byte or a short counts, and tails of every block."""


def available() -> list[str]:
    """Sets that this processor has."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for name in SETS:
            patch.setenv("STILLHOUSE_CPU_CAPABILITY", name)
            try:
                found.append(binary.capability())
            except ConfigurationError:
                continue
    return found


@pytest.fixture(autouse=True)
def operators(kernels: None) -> None:
    binary.require("cpu")
    torch.manual_seed(11)


@pytest.fixture(params=SETS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set that this processor has."""
    monkeypatch.setenv("STILLHOUSE_CPU_CAPABILITY", request.param)
    try:
        assert binary.capability() == request.param
    except ConfigurationError as error:
        pytest.skip(str(error))
    return str(request.param)


class Layer:
    """A binary layer with random weights, simulated and packed."""

    def __init__(
        self, inputs: int, outputs: int, *, by_row: bool = True, bias: bool = True, by_input: bool = False
    ) -> None:
        self.outputs = outputs
        self.signs = torch.rand(outputs, inputs) < 0.5
        self.scale = torch.rand(outputs if by_row else 1) + 0.1
        self.bias = torch.randn(outputs) if bias else None
        self.threshold = torch.randn(inputs if by_input else 1) / 4
        self.weight = binary.pack(self.signs)

    def simulated(self, x: Tensor, low: int) -> Tensor:
        """Levels times signs in fp32, exact in any order; scale and bias one after the other."""
        levels = torch.where(x.float() >= self.threshold, 1.0, float(low))
        scaled = functional.linear(levels, torch.where(self.signs, 1.0, -1.0)) * self.scale
        return (scaled if self.bias is None else scaled + self.bias).to(x.dtype)

    def packed(self, x: Tensor, low: int) -> Tensor:
        return binary_linear(
            x,
            self.weight,
            self.scale,
            self.threshold,
            outputs=self.outputs,
            bias=self.bias,
            positives=binary.positives_of(self.signs) if low == 0 else None,
        )

    def weight_only(self, x: Tensor) -> Tensor:
        return binary_weight_linear(x, self.weight, self.scale, outputs=self.outputs, bias=self.bias)

    def weight_only_simulated(self, x: Tensor) -> Tensor:
        return reference_weight_linear(x, self.signs, self.scale, self.bias)


@pytest.mark.parametrize("low", [-1, 0])
@pytest.mark.parametrize("size", SIZES)
def test_xnor_equals_the_simulated_layer(size: tuple[int, int, int], low: int, instructions: str) -> None:
    rows, inputs, outputs = size
    layer, x = Layer(inputs, outputs), torch.randn(rows, inputs)
    before = binary.calls()["binary_linear"][instructions]
    assert torch.equal(layer.packed(x, low), layer.simulated(x, low))
    assert binary.calls()["binary_linear"][instructions] == before + 1


@pytest.mark.parametrize("size", SIZES)
def test_signed_sums_equal_the_reference(size: tuple[int, int, int], instructions: str) -> None:
    rows, inputs, outputs = size
    layer, x = Layer(inputs, outputs), torch.randn(rows, inputs)
    before = binary.calls()["binary_weight_linear"][instructions]
    assert torch.equal(layer.weight_only(x), layer.weight_only_simulated(x))
    assert binary.calls()["binary_weight_linear"][instructions] == before + 1


@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples * 3 // 5, deadline=None)
@hypothesis.given(
    rows=st.integers(0, 20),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 100),
    low=st.sampled_from([-1, 0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    form=st.fixed_dictionaries({name: st.booleans() for name in ("by_row", "bias", "by_input")}),
    which=st.integers(0, len(SETS) - 1),
    seed=st.integers(0, 2**32),
)
def test_packed_equals_simulated_at_any_size(
    rows: int,
    inputs: int,
    outputs: int,
    low: int,
    dtype: torch.dtype,
    form: dict[str, bool],
    which: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    layer, x = Layer(inputs, outputs, **form), torch.randn(rows, inputs).to(dtype)
    sets = available()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STILLHOUSE_CPU_CAPABILITY", sets[which % len(sets)])
        assert torch.equal(layer.packed(x, low), layer.simulated(x, low))
        assert torch.equal(layer.weight_only(x), layer.weight_only_simulated(x))


def test_signed_sums_of_integers_equal_any_product(instructions: str) -> None:
    """The levels of 2, 4 and 8 bits: every partial sum is an integer, so no order rounds."""
    layer, levels = Layer(777, 50), torch.randint(-128, 128, (6, 777)).float()
    product = functional.linear(levels, torch.where(layer.signs, 1.0, -1.0))
    assert torch.equal(layer.weight_only(levels), product * layer.scale + layer.bias)


def test_signed_sums_follow_float64(instructions: str) -> None:
    layer, x = Layer(3072, 64), torch.randn(8, 3072)
    exact = functional.linear(x.double(), torch.where(layer.signs, 1.0, -1.0).double())
    exact = exact * layer.scale.double() + layer.bias.double()  # type: ignore[union-attr]
    assert float((layer.weight_only(x).double() - exact).abs().max() / exact.abs().max()) < 3e-6


def test_results_do_not_depend_on_threads(instructions: str) -> None:
    layer, x = Layer(512, 400), torch.randn(300, 512)
    threads = torch.get_num_threads()
    outcomes = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outcomes.append((layer.packed(x, -1), layer.weight_only(x)))
    finally:
        torch.set_num_threads(threads)
    for outcome in outcomes[1:]:
        assert all(torch.equal(one, other) for one, other in zip(outcomes[0], outcome, strict=True))


def test_misaligned_and_strided_activations_give_the_same(instructions: str) -> None:
    layer, x = Layer(70, 33), torch.randn(6, 70)
    moved = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    strided = x.t().contiguous().t()
    for other in (moved, strided, x.view(2, 3, 70)):
        assert torch.equal(layer.packed(other, 0).view(6, 33), layer.packed(x, 0))
        assert torch.equal(layer.weight_only(other).view(6, 33), layer.weight_only(x))


@pytest.mark.parametrize("size", [(0, 40, 20), (3, 0, 20), (3, 40, 0)])
def test_what_is_empty_gives_the_bias_alone(size: tuple[int, int, int], instructions: str) -> None:
    rows, inputs, outputs = size
    layer, x = Layer(inputs, outputs), torch.randn(rows, inputs)
    for result in (layer.packed(x, -1), layer.packed(x, 0), layer.weight_only(x)):
        assert result.shape == (rows, outputs)
        if not inputs:
            assert torch.equal(result, layer.bias.expand(rows, outputs))  # type: ignore[union-attr]


@pytest.mark.parametrize("by_input", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("low", [-1, 0])
def test_nan_makes_the_outputs_of_its_row_nan(
    low: int, dtype: torch.dtype, by_input: bool, instructions: str
) -> None:
    layer, x = Layer(75, 20, by_input=by_input), torch.randn(200, 75).to(dtype)
    expected = layer.packed(x, low)
    lost = torch.zeros(200, dtype=torch.bool)
    # In the first and the last place of a register, a word and the tail, and in neighbouring rows.
    for row, place in ((0, 0), (3, 7), (4, 8), (5, 31), (6, 32), (100, 63), (101, 64), (199, 74)):
        x[row, place] = torch.nan
        lost[row] = True
    found = layer.packed(x, low)
    assert torch.equal(found.isnan().all(1), lost)
    assert torch.equal(found[~lost], expected[~lost])
    x[1, 2] = torch.inf
    assert not layer.packed(x, low)[1].isnan().any()
    assert torch.equal(layer.weight_only(x).isnan().all(1), lost)
    layer.threshold[-1] = torch.nan
    assert layer.packed(x, low).isnan().all()


def test_what_is_packed_is_unpacked() -> None:
    for outputs, inputs in ((1, 1), (16, 32), (17, 33), (70, 100)):
        signs = torch.rand(outputs, inputs) < 0.5
        weight = binary.pack(signs)
        assert weight.shape == (-(-outputs // 16), -(-inputs // 32), 16)
        assert torch.equal(unpack(weight, outputs, inputs), signs)


def test_opcheck_of_both_operators() -> None:
    layer, x = Layer(70, 33), torch.randn(2, 3, 70)
    ops: Any = torch.ops.stillhouse
    positives = binary.positives_of(layer.signs)
    samples = (
        (ops.binary_linear, (x, layer.weight, None, layer.scale, layer.bias, layer.threshold, 33)),
        (ops.binary_linear, (x, layer.weight, positives, layer.scale, None, layer.threshold, 33)),
        (ops.binary_weight_linear, (x.bfloat16(), layer.weight, layer.scale, layer.bias, 33)),
    )
    for operator, sample in samples:
        torch.library.opcheck(operator.default, sample)


def bad_calls() -> Iterator[tuple[str, Any]]:
    """Mistakes, and what their message must have."""
    layer, x = Layer(70, 33), torch.randn(4, 70)
    weight, scale, threshold = layer.weight, layer.scale, layer.threshold
    linear = binary_linear
    yield "x is Double", lambda: linear(x.double(), weight, scale, threshold, outputs=33)
    yield "weight is Int of shape", lambda: linear(x[:, :64], weight, scale, threshold, outputs=33)
    yield "weight is Int of shape", lambda: linear(x, weight, scale, threshold, outputs=49)
    yield "scale has 32 elements", lambda: linear(x, weight, scale[:32], threshold, outputs=33)
    yield "threshold has 2 elements", lambda: linear(x, weight, scale, torch.zeros(2), outputs=33)
    yield "bias is Double", lambda: linear(x, weight, scale, threshold, outputs=33, bias=scale.double())
    yield "x has no dimension", lambda: binary_weight_linear(x[0, 0], weight, scale, outputs=33)


def test_a_mistake_is_refused_before_memory_is_touched() -> None:
    for message, call in bad_calls():
        with pytest.raises(RuntimeError, match=message):
            call()


def test_instructions_that_the_processor_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = [name for name in SETS if name not in available()]
    assert lacking, "NEON and AVX are never on one processor"
    for name in (*lacking, "sse9"):
        monkeypatch.setenv("STILLHOUSE_CPU_CAPABILITY", name)
        with pytest.raises(ConfigurationError, match=f"STILLHOUSE_CPU_CAPABILITY is {name}") as caught:
            binary.capability()
        assert "\n" not in str(caught.value)
        assert "unset it" in str(caught.value)
