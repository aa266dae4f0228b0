"""The operators themselves: schemas, torch.compile, and the bytes beside their buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cuda_ext import Adan
from cuda_ext.adan_state import state_dtypes
from cuda_ext.native import grad_norm

GUARD = 64  # elements on either side of each buffer


def arguments(
    sizes: tuple[int, ...], make: Any = None, *, dtype: torch.dtype = torch.float32
) -> tuple[Any, ...]:
    """Arguments of `adan_` for parameters of these sizes; `make(size, dtype)` gives the memory."""
    make = make or (lambda size, wanted: torch.randn(size).to(wanted))
    short = dtype is not torch.float32
    lists = [[make(size, dtype) for size in sizes] for _ in range(2)]
    moments = [[make(size, torch.float32) for size in sizes] for _ in range(2)]
    squares = [make(size, torch.float32).abs_() for size in sizes]
    previous = [make(size, state_dtypes(dtype, torch.float32)["g_prev"]) for size in sizes]
    masters = [make(size, torch.float32) for size in sizes] if short else []
    steps = [torch.tensor(float(index)) for index in range(len(sizes))]
    return (
        *lists,
        *moments,
        squares,
        previous,
        masters,
        steps,
        [len(sizes)],
        [1e-3, 0.98, 0.92, 0.99, 1e-8, 0.01],
        [0],
        [],
        torch.tensor(2.0),
        torch.tensor(0.0),
        grad_norm(lists[1]),
        1.0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_the_step(kernels: None, dtype: torch.dtype) -> None:
    torch.library.opcheck(torch.ops.stillhouse.adan_.default, arguments((3, 1025), dtype=dtype))


def test_opcheck_of_the_norm(kernels: None) -> None:
    torch.library.opcheck(torch.ops.stillhouse.grad_norm.default, ([torch.randn(3), torch.randn(1025)],))


def test_the_norm_is_the_norm(kernels: None) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensors = [torch.randn(size).to(dtype) for size in (0, 1, 3, 1023, 40000)]
        expected = torch.cat([tensor.double() for tensor in tensors]).norm()
        torch.testing.assert_close(grad_norm(tensors).double(), expected, rtol=1e-6, atol=0.0)


def test_a_compiled_function_with_the_step_inside_is_one_graph(kernels: None) -> None:
    eager, compiled = (arguments((3, 1025)) for _ in range(2))
    for mine, other in zip(compiled, eager, strict=True):
        if isinstance(mine, list) and mine and isinstance(mine[0], torch.Tensor):
            for a, b in zip(mine, other, strict=True):
                a.copy_(b)
        elif isinstance(mine, torch.Tensor):
            mine.copy_(other)

    def update(*given: Any) -> torch.Tensor:
        torch.ops.stillhouse.adan_(*given)
        return given[0][0] + torch.ops.stillhouse.grad_norm(given[1])

    expected = update(*eager)
    result = torch.compile(update, fullgraph=True, backend="aot_eager")(*compiled)
    assert torch.equal(result, expected)
    for a, b in zip(compiled[0], eager[0], strict=True):
        assert torch.equal(a, b)


def test_a_compiled_training_step_gives_the_eager_result(implementation: str) -> None:
    results = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(9, 5)
        optimizer = Adan(model.parameters(), implementation=implementation)

        def train_step(batch: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        run = torch.compile(train_step, backend="aot_eager") if compile_it else train_step
        for step in range(3):
            run(torch.full((4, 9), 0.1 * step + 0.1))
        results.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0, 1])
def test_nothing_is_written_beside_the_buffers(kernels: None, dtype: torch.dtype, offset: int) -> None:
    buffers: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def guarded(size: int, wanted: torch.dtype) -> torch.Tensor:
        memory = torch.full((GUARD + offset + size + GUARD,), -77.0).to(wanted)
        inside = memory[GUARD + offset : GUARD + offset + size]
        inside.copy_(torch.randn(size))
        buffers.append((memory, inside, size))
        return inside

    given = arguments((1, 2, 3, 1023, 1025, 33000), guarded, dtype=dtype)
    gradients = [gradient.clone() for gradient in given[1]]
    torch.ops.stillhouse.adan_(*given)
    for memory, _, size in buffers:
        assert torch.equal(memory[: GUARD + offset], torch.full_like(memory[: GUARD + offset], -77.0))
        after = memory[GUARD + offset + size :]
        assert torch.equal(after, torch.full_like(after, -77.0))
    for before, now in zip(gradients, given[1], strict=True):
        assert torch.equal(before, now)


def test_a_call_with_lists_of_different_lengths_is_refused(kernels: None) -> None:
    given = list(arguments((3, 5)))
    given[3] = given[3][:1]
    with pytest.raises(RuntimeError, match="exp_avg_diffs has 1 tensors for 2 parameters"):
        torch.ops.stillhouse.adan_(*given)


def test_a_number_of_the_wrong_dtype_is_refused(kernels: None) -> None:
    given = list(arguments((3,)))
    given[13] = torch.tensor(0.0, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="found_inf must be one float32"):
        torch.ops.stillhouse.adan_(*given)
