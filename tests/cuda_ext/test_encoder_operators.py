"""The encoder's operators next to plain float64 PyTorch: values, gradients, dropout, and their bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cuda_ext import encoder
from tests.cuda_ext.philox_reference import kept

hypothesis = pytest.importorskip("hypothesis")  # not on every machine that these tests are carried to
st = hypothesis.strategies

EPS = 1e-5
WIDTHS = (1, 2, 3, 63, 64, 1023, 1025)
SEED = 0x1234_5678_9ABC_DEF0


@pytest.fixture(autouse=True)
def operators(kernels: None) -> None:
    encoder.require("cpu")
    torch.manual_seed(7)


def draws(rows: int, width: int, dtype: torch.dtype) -> dict[str, tuple[Any, Any, tuple[Tensor, ...]]]:
    """For each operator: itself, the same in plain PyTorch, and the arguments that have gradients."""
    x, residual = torch.randn(rows, width).mul(2).to(dtype), torch.randn(rows, width).to(dtype)
    bias, weight, shift = (torch.randn(width).to(dtype) for _ in range(3))
    tables = tuple(torch.randn(count, width).to(dtype) for count in (11, 7, 2))
    ids, places, kinds = (torch.randint(count, (rows,)) for count in (11, 7, 2))
    labels = torch.randint(width, (rows,))
    labels[0] = -100
    mask = kept(SEED, 3, rows, width, 0.25)
    seed = torch.tensor(SEED)

    def joined(x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        summed = residual + (x + bias) * mask.to(x.dtype)
        return functional.layer_norm(summed, (width,), weight, shift, EPS)

    def embedded(words: Tensor, table: Tensor, types: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        summed = words[ids] + types[kinds] + table[places]
        return functional.layer_norm(summed, (width,), weight, shift, EPS) * mask.to(words.dtype)

    return {
        "bias_gelu": (encoder.bias_gelu, lambda x, bias: functional.gelu(x + bias), (x, bias)),
        "dropout_add_norm": (
            lambda *given: encoder.dropout_add_norm(*given, eps=EPS, rate=0.25, seed=seed, offset=3),
            joined,
            (x, bias, residual, weight, shift),
        ),
        "embed_norm": (
            lambda *given: encoder.embed_norm(
                ids, kinds, places, *given, eps=EPS, rate=0.25, seed=seed, offset=3
            ),
            embedded,
            (*tables, weight, shift),
        ),
        "cross_entropy": (
            lambda x: encoder.cross_entropy(x, labels),
            lambda x: functional.cross_entropy(x, labels, reduction="none"),
            (x,),
        ),
    }


def results(function: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> list[Tensor]:
    """Output, and the gradient of each argument for one fixed gradient of the output."""
    leaves = [argument.clone().requires_grad_() for argument in arguments]
    output = function(*leaves)
    gradient = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape).cos()
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]


def worst(function: Any, plain: Any, arguments: tuple[Tensor, ...]) -> float:
    """Largest difference from plain PyTorch in float64, relative to the largest element."""
    ours = results(function, arguments)
    exact = results(plain, tuple(argument.double() for argument in arguments))
    return max(
        float((mine.double() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3))
        for mine, theirs in zip(ours, exact, strict=True)
    )


OPERATORS = ("bias_gelu", "dropout_add_norm", "embed_norm", "cross_entropy")


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("width", WIDTHS)
def test_values_and_gradients_follow_float64(name: str, width: int, capability: str) -> None:
    before = torch.ops.stillhouse.encoder_counters()
    for dtype, bound in ((torch.float32, 2e-6), (torch.float64, 1e-13)):
        if width <= 3:
            bound *= 100  # few elements cancel: a variance, and the loss of a sure choice
        assert worst(*draws(3, width, dtype)[name]) < bound
    forward, backward = torch.ops.stillhouse.encoder_counters()
    assert (forward - before[0], backward - before[1]) == (6, 6)


@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 5, deadline=None)
@hypothesis.given(rows=st.integers(1, 70), width=st.integers(3, 200), seed=st.integers(0, 2**32))
def test_values_and_gradients_follow_float64_at_any_size(rows: int, width: int, seed: int) -> None:
    encoder.require("cpu")
    torch.manual_seed(seed)
    for function, plain, arguments in draws(rows, width, torch.float32).values():
        assert worst(function, plain, arguments) < 1e-5


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.04), (torch.float16, 0.005)])
def test_short_formats_lose_their_rounding_only(name: str, dtype: torch.dtype, bound: float) -> None:
    assert worst(*draws(5, 96, dtype)[name]) < bound


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_are_those_of_the_operator_itself(name: str) -> None:
    function, _, arguments = draws(3, 5, torch.float64)[name]
    leaves = tuple(argument.clone().requires_grad_() for argument in arguments)
    assert torch.autograd.gradcheck(function, leaves)


def test_opcheck_of_every_operator() -> None:
    ops = torch.ops.stillhouse
    x, vector = torch.randn(6, 24, requires_grad=True), torch.randn(24, requires_grad=True)
    seed, grad = torch.tensor(SEED), torch.randn(6, 24)
    ids = torch.randint(2, (6,))
    tables = [torch.randn(count, 24, requires_grad=True) for count in (9, 8, 2)]
    joined = (x, vector, x, vector, vector, EPS, 0.1, seed, 0)
    embedded = (ids, ids, ids, *tables, vector, vector, EPS, 0.1, seed, 0, [1, -1, 0])
    plain = [argument.detach() if isinstance(argument, Tensor) else argument for argument in joined]
    _, summed, mean, rstd = ops.dropout_add_norm(*plain)
    fixed = [table.detach() for table in tables]
    weight = vector.detach()
    samples = {
        ops.bias_gelu: (x, vector),
        ops.bias_gelu_backward: (grad, x.detach(), weight),
        ops.dropout_add_norm: joined,
        ops.dropout_add_norm_backward: (grad, grad, summed, mean, rstd, weight, 0.1, seed, 0),
        ops.embed_norm: embedded,
        ops.embed_norm_backward: (
            grad,
            ids,
            ids,
            ids,
            *fixed,
            mean,
            rstd,
            weight,
            0.1,
            seed,
            0,
            [1, -1, 0],
        ),
        ops.cross_entropy: (x, ids, -100),
        ops.cross_entropy_backward: (torch.randn(6), x.detach(), ids, mean, -100),
    }
    for operator, sample in samples.items():
        torch.library.opcheck(operator.default, sample)


def test_compiled_code_is_one_graph_through_every_operator() -> None:
    _, _, (x, bias, residual, weight, shift) = draws(4, 32, torch.float32)["dropout_add_norm"]
    seed = torch.tensor(SEED)

    def block(x: Tensor) -> Tensor:
        inner = encoder.bias_gelu(x, bias)
        return encoder.dropout_add_norm(inner, bias, residual, weight, shift, eps=EPS, rate=0.1, seed=seed)

    for run in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        run(leaf).sum().backward()
        if run is block:
            expected = leaf.grad
    assert torch.equal(leaf.grad, expected)  # type: ignore[arg-type]


def masks(rows: int, width: int, *, rate: float, seed: int, offset: int) -> Tensor:
    """What dropout keeps of ones, unscaled."""
    one, nothing = torch.ones(rows, width), torch.zeros(rows, width)
    summed = torch.ops.stillhouse.dropout_add_norm(
        one, nothing[0], nothing, one[0], nothing[0], EPS, rate, torch.tensor(seed), offset
    )[1]
    return (summed != 0).float()


@pytest.mark.parametrize("width", [1, 8, 9, 100])
def test_a_mask_is_philox_of_seed_offset_and_element(width: int, capability: str) -> None:
    for seed, offset in ((0, 0), (SEED, 5), (2**63 - 1, 2**40)):
        expected = kept(seed, offset, 20, width, 0.5) != 0
        assert torch.equal(masks(20, width, rate=0.5, seed=seed, offset=offset), expected.float())


def test_the_first_bits_are_those_of_the_published_generator() -> None:
    # Known answers of the authors' library: counter and key 0.
    from tests.cuda_ext.philox_reference import philox

    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox(0, 0, 0) == [half for word in words for half in (word & 0xFFFF, word >> 16)]


def test_masks_have_the_rate_and_are_independent() -> None:
    rate, count = 0.1, 1_000_000
    first, again, other = (
        masks(1000, 1000, rate=rate, seed=seed, offset=offset) for seed, offset in ((1, 0), (1, 1), (2, 0))
    )
    deviation = (rate * (1 - rate) / count) ** 0.5
    for mask in (first, again, other):
        assert abs(float(1 - mask.double().mean()) - rate) < 5 * deviation
        assert abs(float(mask.double().var()) - rate * (1 - rate)) < 5 * deviation
    shifted = (first.roll(1, 0), first.roll(1, 1), first.roll(8, 1), again, other)
    for mask in shifted:
        assert abs(float(torch.corrcoef(torch.stack([first.flatten(), mask.flatten()]))[0, 1])) < 0.005


def test_the_backward_pass_draws_the_mask_again() -> None:
    x = torch.randn(50, 40, requires_grad=True)
    nothing, one = torch.zeros(40), torch.ones(40)
    seed = torch.tensor(SEED)
    out = encoder.dropout_add_norm(
        x, nothing, torch.zeros(50, 40), one, nothing, eps=EPS, rate=0.5, seed=seed, offset=9
    )
    (gradient,) = torch.autograd.grad(out, x, torch.randn(50, 40))
    assert torch.equal(gradient != 0, masks(50, 40, rate=0.5, seed=SEED, offset=9) != 0)


def test_seeds_replay_from_torchs_generator() -> None:
    state = torch.get_rng_state()
    drawn = [int(encoder.fresh_seed()) for _ in range(3)]
    torch.set_rng_state(state)
    assert [int(encoder.fresh_seed()) for _ in range(3)] == drawn
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("name", OPERATORS)
def test_results_do_not_depend_on_threads(name: str) -> None:
    threads = torch.get_num_threads()
    function, _, arguments = draws(333, 130, torch.float32)[name]
    outcomes = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            outcomes.append(results(function, arguments))
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*outcomes, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", OPERATORS)
def test_misaligned_and_strided_arguments_give_the_same(name: str) -> None:
    function, _, arguments = draws(6, 33, torch.float32)[name]

    def moved(tensor: Tensor) -> Tensor:
        memory = torch.empty(tensor.numel() + 1)
        return memory[1:].view(tensor.shape).copy_(tensor)

    def strided(tensor: Tensor) -> Tensor:
        return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.repeat_interleave(2)[::2]

    expected = results(function, arguments)
    for change in (moved, strided):
        for mine, theirs in zip(
            results(lambda *given, change=change: function(*map(change, given)), arguments),
            expected,
            strict=True,
        ):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("rows", [2, 40])
def test_a_small_tables_gradient_sums_what_cancels_exactly(rows: int, capability: str) -> None:
    # 1e8 and its negative around many small terms: fp32 would lose the terms.
    count, width = 32, 70
    ids = torch.zeros(count, dtype=torch.int64)
    tables = [torch.zeros(table_rows, width).requires_grad_() for table_rows in (rows, 1, 1)]
    tables[0].data[0] = torch.linspace(-1, 1, width)
    ones, zeros = torch.ones(width), torch.zeros(width)
    out = encoder.embed_norm(ids, ids, ids, *tables, ones, zeros, eps=EPS)
    gradient = torch.randn(count, width)
    gradient[0] *= 1e8
    gradient[-1] = -gradient[0]
    found = torch.autograd.grad(out, tables, gradient)
    table = tables[0].detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(
        functional.layer_norm(table[ids], (width,), eps=EPS), table, gradient.double()
    )
    small = [grad for grad, own in zip(found, tables, strict=True) if len(own) <= count]
    assert len(small) == (3 if rows == 2 else 2)
    for grad in small:
        assert float((grad[0].double() - exact[0]).abs().max()) < 1e-3


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_of_padding_has_no_gradient(which: int, dtype: torch.dtype, capability: str) -> None:
    _, _, (*tables, weight, shift) = draws(40, 30, dtype)["embed_norm"]
    indices = [torch.randint(count, (40,)) for count in (11, 2, 7)]  # of words, types and positions
    padding: list[int | None] = [None, None, None]
    padding[which] = 1

    def gradients(rows: Any) -> list[Tensor]:
        leaves = [table.clone().requires_grad_() for table in tables]
        out = encoder.embed_norm(*indices, *leaves, weight, shift, eps=EPS, padding=rows)
        return list(torch.autograd.grad(out, leaves, torch.full_like(out, 0.5).cos().cumsum(1)))

    whole, found = gradients((None, None, None)), gradients(tuple(padding))
    assert whole[which][1].any()
    whole[which][1] = 0.0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, whole, strict=True))


@pytest.mark.parametrize("name", OPERATORS)
def test_no_rows_have_no_results_and_gradients_of_zero(name: str, capability: str) -> None:
    dtype, none = torch.float32, torch.zeros(0, dtype=torch.int64)
    x, vector, seed = torch.empty(0, 6), torch.randn(6), torch.tensor(1)
    tables = [torch.randn(3, 6) for _ in range(3)]
    calls: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "bias_gelu": (encoder.bias_gelu, [x, vector]),
        "dropout_add_norm": (
            lambda *given: encoder.dropout_add_norm(*given, eps=EPS, rate=0.1, seed=seed),
            [x, vector, x, vector, vector],
        ),
        "embed_norm": (
            lambda *given: encoder.embed_norm(none, none, none, *given, eps=EPS, rate=0.1, seed=seed),
            [*tables, vector, vector],
        ),
        "cross_entropy": (lambda x: encoder.cross_entropy(x, none), [x]),
    }
    function, given = calls[name]
    out, *gradients = results(function, tuple(given))
    assert (out.dtype, out.shape[0]) == (dtype, 0)
    assert [gradient.shape for gradient in gradients] == [argument.shape for argument in given]
    assert not any(gradient.any() for gradient in gradients)


@hypothesis.given(rate=st.floats(0.0, 1.0, exclude_max=True))
def test_what_is_kept_is_scaled_by_its_share(rate: float) -> None:
    below, scale = encoder.threshold_of(rate)
    assert 0 <= below < encoder.LEVELS
    assert scale * (encoder.LEVELS - below) == pytest.approx(encoder.LEVELS, rel=1e-15)
    assert abs(below / encoder.LEVELS - rate) <= (2**-17 if rate <= 1.0 - 2**-17 else 2**-16)


def test_the_kernels_keep_a_share_at_the_highest_rate(capability: str) -> None:
    rows, width, rate = 400, 1000, 0.999999
    zeros, ones = torch.zeros(width), torch.ones(width)
    tables = [torch.zeros(1, width) for _ in range(3)]
    ids = torch.zeros(rows, dtype=torch.int64)
    out = encoder.embed_norm(ids, ids, ids, *tables, ones, ones, eps=EPS, rate=rate, seed=torch.tensor(SEED))
    assert sorted(set(out.flatten().tolist())) == [0.0, float(encoder.LEVELS)]
    summed = encoder.dropout_add_norm(
        ones.expand(rows, width), zeros, zeros.expand(rows, width), ones, zeros,
        eps=EPS, rate=rate, seed=torch.tensor(SEED),
    )  # fmt: skip
    assert summed.isfinite().all()
    assert summed.any()


def bad_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Mistakes, and what their message must have."""
    x, vector = torch.randn(4, 6), torch.randn(6)
    seed = torch.tensor(1)
    yield "bias has shape", lambda: encoder.bias_gelu(x, vector[:3])
    yield "take float32, float64", lambda: encoder.bias_gelu(x.int(), vector)
    yield (
        "residual is",
        lambda: encoder.dropout_add_norm(x, vector, x[:2], vector, vector, eps=EPS),
    )
    yield (
        "rate is 1",
        lambda: encoder.dropout_add_norm(x, vector, x, vector, vector, eps=EPS, rate=1.0, seed=seed),
    )
    yield (
        "ids has 9, but its table has rows 0 to 3",
        lambda: encoder.embed_norm(
            torch.tensor([9]), torch.tensor([0]), torch.tensor([0]), x, x, x, vector, vector, eps=EPS
        ),
    )
    yield "labels has 6", lambda: encoder.cross_entropy(x, torch.tensor([0, 1, 2, 6]))


def test_a_mistake_is_refused_before_memory_is_touched() -> None:
    for message, call in bad_calls():
        with pytest.raises((RuntimeError, IndexError), match=message):
            call()


def test_without_triton_cuda_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    reason = encoder.why_unavailable("cuda")
    assert reason is not None
    assert "install triton, or set model.encoder to packed" in reason
    assert "\n" not in reason
