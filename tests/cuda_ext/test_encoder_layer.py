"""A layer's two operations next to the single operators that they stand for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from cuda_ext import encoder, encoder_layer
from cuda_ext.encoder_layer import NormAfter, adjoin, after_attention, projections

ROWS, WIDTH, INNER, EPS = 9, 8, 24, 1e-5
SEEDS = (torch.tensor(5), torch.tensor(2**62 + 1))
Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def operators(kernels: None) -> None:
    encoder.require("cpu")
    torch.manual_seed(7)


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


PROJECTED = ((2, ROWS, WIDTH), *[(WIDTH, WIDTH)] * 3, *[(WIDTH,)] * 3)
AFTER = (
    (2, ROWS, WIDTH), (2, ROWS, WIDTH),
    (WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,),
    (INNER, WIDTH), (INNER,),
    (WIDTH, INNER), (WIDTH,), (WIDTH,), (WIDTH,),
)  # fmt: skip


def results(function: Function, arguments: list[Tensor]) -> list[Tensor]:
    """Output, and the gradient of each argument for one fixed gradient of the output."""
    leaves = [argument.clone().requires_grad_() for argument in arguments]
    output = function(*leaves)
    gradient = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape).cos()
    output.backward(gradient.to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def in_one(x: Tensor, *rest: Tensor) -> Tensor:
    return torch.cat(projections(x, rest[:3], rest[3:]), -1)


def apart(x: Tensor, *rest: Tensor) -> Tensor:
    products = (functional.linear(x, rest[i], rest[3 + i]) for i in range(3))
    return torch.cat([*products, x], -1)


def together(rate: float) -> Function:
    def function(x: Tensor, residual: Tensor, *rest: Tensor) -> Tensor:
        mix, outer = (
            NormAfter(*given, EPS, rate, seed)
            for given, seed in zip((rest[:4], rest[6:]), SEEDS, strict=True)
        )
        return after_attention(x, residual, mix, (rest[4], rest[5]), outer)

    return function


def one_by_one(rate: float) -> Function:
    def function(x: Tensor, residual: Tensor, *rest: Tensor) -> Tensor:
        w1, b1, g1, s1, w2, b2, w3, b3, g2, s2 = rest
        drop = {"eps": EPS, "rate": rate}
        product = functional.linear(x, w1)
        hidden = encoder.dropout_add_norm(
            product, b1, residual.to(product.dtype), g1, s1, seed=SEEDS[0], **drop
        )
        activated = encoder.bias_gelu(functional.linear(hidden, w2), b2)
        product = functional.linear(activated, w3)
        return encoder.dropout_add_norm(product, b3, hidden, g2, s2, seed=SEEDS[1], **drop)

    return function


def agree(mine: Function, theirs: Function, shapes: tuple[tuple[int, ...], ...]) -> None:
    given = parameters(*shapes)
    for own, expected in zip(results(mine, given), results(theirs, given), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


def test_one_product_has_the_gradients_of_three() -> None:
    agree(in_one, apart, PROJECTED)


def test_a_projection_without_a_residual_has_its_gradient() -> None:
    def in_one(x: Tensor, *rest: Tensor) -> Tensor:
        return torch.cat(projections(x, rest[:3], rest[3:])[:3], -1)

    agree(in_one, lambda *given: apart(*given)[..., :-WIDTH], PROJECTED)


def test_a_projection_that_no_one_reads_has_no_gradient() -> None:
    def only_the_first(function: Function) -> Function:
        return lambda *given: function(*given)[..., :WIDTH] * 1.0

    x, *rest = (given.requires_grad_() for given in parameters(*PROJECTED))
    projections(x, rest[:3], rest[3:])[0].sum().backward()
    assert all(not part.grad.any() for part in (rest[1], rest[2], rest[4], rest[5]))
    agree(only_the_first(in_one), only_the_first(apart), PROJECTED)


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_what_follows_attention_has_the_gradients_of_its_operators(rate: float) -> None:
    agree(together(rate), one_by_one(rate), AFTER)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_computes_in_the_dtype_of_autocast(dtype: torch.dtype) -> None:
    half = torch.float16 if dtype is torch.float16 else torch.bfloat16
    given = parameters(*AFTER, dtype=torch.float32)
    given[:2] = [x.to(dtype) for x in given[:2]]
    with torch.autocast("cpu", half):
        mine, theirs = results(together(0.25), given), results(one_by_one(0.25), given)
    assert mine[0].dtype is half
    for own, expected, leaf in zip(mine[1:], theirs[1:], given, strict=True):
        assert own.dtype is leaf.dtype
        assert float((own - expected).abs().max()) <= 0.05 * float(expected.abs().max())


def test_frozen_parameters_have_no_gradient() -> None:
    given = parameters(*AFTER)
    leaves = [leaf.requires_grad_(number != 6) for number, leaf in enumerate(given)]
    together(0.0)(*leaves).sum().backward()
    assert [leaf.grad is None for leaf in leaves] == [number == 6 for number in range(len(leaves))]


def test_adjacent_parameters_are_joined_without_a_copy() -> None:
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    before = copy.deepcopy(model.state_dict())
    weights = [part.weight for part in model]
    identities = [id(weight) for weight in weights]
    assert encoder_layer._joined(weights).data_ptr() != weights[0].data_ptr()
    adjoin(weights)
    assert [id(part.weight) for part in model] == identities
    whole = encoder_layer._joined(weights)
    assert whole.data_ptr() == weights[0].data_ptr()
    assert torch.equal(whole, torch.cat([before[f"{i}.weight"] for i in range(3)]))
    with torch.no_grad():
        weights[1].fill_(3.0)
    assert bool((encoder_layer._joined(weights)[WIDTH : 2 * WIDTH] == 3.0).all())


def test_parameters_that_were_parted_are_joined_by_a_copy() -> None:
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    weights = [part.weight for part in model]
    adjoin(weights)
    weights[1].data = weights[1].data.clone()
    assert torch.equal(encoder_layer._joined(weights), torch.cat([weight.detach() for weight in weights]))


def test_adjacent_parameters_are_written_and_read_as_others(tmp_path: Path) -> None:
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    adjoin([part.weight for part in model])
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    again = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    adjoin([part.weight for part in again])
    again.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert encoder_layer._adjacent([part.weight for part in again])
