"""The Triton kernels without a GPU: interpreted next to the CPU kernels, and compiled for all GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from cuda_ext import build, encoder
from tests.cuda_ext import encoder_check

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make kernels brings it"
)

INTERPRETING = {
    **os.environ,
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": os.pathsep.join((str(Path(encoder.__file__).parents[1]), *sys.path)),
}
INTERPRETED = """
import json, sys, torch
from cuda_ext import encoder, encoder_layer, encoder_triton
encoder.require("cpu")
ops = torch.ops.stillhouse
torch.manual_seed(0)
seed = torch.tensor(2**62 + 12345)
worst = {}

def compare(operator, *arguments):
    mine = getattr(encoder_triton, operator)(*arguments)
    theirs = getattr(ops, operator)(*arguments)
    mine, theirs = (given if isinstance(given, tuple) else (given,) for given in (mine, theirs))
    check(operator, mine, theirs)
    return theirs

def check(operator, mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, (operator, a.shape, b.shape, a.dtype, b.dtype)
        error = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-3))
        key = f"{operator} {str(dtype)[6:]}"
        worst[key] = max(worst.get(key, 0.0), error)

# As on a device: its kernels are given the seed, or read it from memory.
by_number = encoder_triton._dropout
by_memory = lambda *given: (given[1], *by_number(*given)[1:])

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    # Rows of two parts and a piece, of the warps together, of a tile and a piece.
    larger = ((9, 320, by_number), (3, 1100, by_number)) if dtype == torch.bfloat16 else ()
    for rows, width, draws in ((3, 7, by_number), (2, 96, by_memory), *larger):
        encoder_triton._dropout = draws
        make = lambda *shape: torch.randn(shape).to(dtype)
        x, y, grad = make(rows, width), make(rows, width), make(rows, width)
        bias, weight, shift = make(width), make(width), make(width)
        compare("bias_gelu", x, bias)
        compare("bias_gelu_backward", grad, x, bias)
        compare("joint_gradient", [x, y, grad], dtype)
        _, *saved = compare("dropout_add_norm", x, bias, y, weight, shift, 1e-5, 0.3, seed, 2**33 + 5)
        for other in (None, y):
            given = (grad, other, *saved, weight, 0.3, seed, 2**33 + 5)
            compare("dropout_add_norm_backward", *given)
        # What a layer's pieces add up is what their whole operators give.
        columns = torch.empty(encoder_layer.programs_of(x), 4 * width)
        encoder_triton.bias_gelu_backward_sums(grad, x, bias, columns[:, :width])
        encoder_triton.dropout_add_norm_backward_sums(*given, columns[:, width:])
        totals = encoder_triton.column_totals(columns, dtype)
        whole = (*ops.bias_gelu_backward(grad, x, bias)[1:], *ops.dropout_add_norm_backward(*given)[2:])
        check("column_totals", (totals,), (torch.cat(whole),))
        ids = [torch.randint(count, (rows,)) for count in (11, 2, 9)]
        tables = [make(count, width) for count in (11, 9, 2)]
        padding = [int(ids[0].flatten()[0]), int(ids[2].flatten()[0]), -1]
        _, *saved = compare("embed_norm", *ids, *tables, weight, shift, 1e-5, 0.3, seed, 1, padding)
        for without in (padding, [-1, -1, int(ids[1][0])]):
            compare("embed_norm_backward", grad, *ids, *tables, *saved, weight, 0.3, seed, 1, without)
        labels = torch.randint(width, (rows,))
        labels[0] = -100
        losses, lse = compare("cross_entropy", x, labels, -100)
        compare("cross_entropy_backward", losses.clone(), x, labels, lse, -100)
print(json.dumps(worst))
"""


def test_interpreted_kernels_agree_with_the_cpu_kernels(kernels: None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=INTERPRETING,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    worst: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert len(worst) == 3 * 10
    bounds = {"float32": 2e-6, "bfloat16": 0.04, "float16": 0.005}
    assert {key: error for key, error in worst.items() if error > bounds[key.split()[1]]} == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", encoder_check.TARGETS)
def test_no_kernel_spills(target: str) -> None:
    found = encoder_check.kernel_resources((target,))
    # Of four widths, in all. Four kernels draw dropout, from a seed of either kind.
    assert Counter(row.kernel for row in found) == {
        **dict.fromkeys(("bias_gelu_kernel", "bias_gelu_backward_kernel", "joint_gradient_kernel"), 1),
        **dict.fromkeys(("dropout_add_norm_kernel", "dropout_add_norm_backward_kernel"), 8),
        **dict.fromkeys(("embed_norm_kernel", "embed_norm_backward_kernel"), 8),
        **dict.fromkeys(("cross_entropy_kernel", "cross_entropy_backward_kernel"), 3),
        **{"type_gradient_kernel": 1, "totals_kernel": 2},
    }
    assert [row for row in found if row.spill_bytes] == []
    assert max(row.registers for row in found) <= encoder_check.REGISTER_LIMIT


def test_the_checked_targets_are_those_of_the_cuda_kernels() -> None:
    assert set(encoder_check.TARGETS) == {f"sm_{name.replace('.', '')}" for name in build.ARCHITECTURES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_that_change_from_step_to_step_compile_nothing_again(dtype: torch.dtype) -> None:
    """Rows from 1 to thousands, multiples of 16 among them; fresh seeds; offsets on both sides of 32 bits."""
    generator = torch.Generator().manual_seed(0)
    variants: dict[str, set[int]] = defaultdict(set)
    with encoder_check.compilation("sm_90") as launches:
        for step in range(100):
            encoder_check.launch_all(
                rows=(1, 16, 17, 2048)[step]
                if step < 4
                else int(torch.randint(1, 20_000, (), generator=generator)),
                width=256,
                dtype=dtype,
                seed=torch.randint(2**62, 2**63 - 1, (), generator=generator) // 16 * 16 + step % 17,
                offset=(0, 1, 16, 33, 2**33 + 5)[step % 5],
            )
    for name, compiled in launches:
        variants[name].add(id(compiled))
    assert len(launches) > 1000
    # Sums of parameters' gradients are stored in float32, those of the type table in the activations' dtype.
    expected = {"totals_kernel": 1 if dtype == torch.float32 else 2}
    assert {name: len(found) for name, found in variants.items()} == {
        name: expected.get(name, 1) for name in variants
    }


@pytest.mark.parametrize(("dtype", "halves"), [(torch.bfloat16, 2), (torch.float16, 1)])
def test_gelu_in_16_bits_is_within_the_rounding_of_its_result(dtype: torch.dtype, halves: int) -> None:
    """Every number of the format, next to float64: the polynomial adds less than a tenth of half a unit.

    Halves of a unit are what the interpreter's own rounding may take: it cuts bfloat16 off.
    """
    script = f"""
import torch
from cuda_ext import encoder_triton
x = torch.arange(-32768, 32768).to(torch.int16).view({dtype})
x = x[x.isfinite() & (x.abs() < 2**15)].view(-1, 1024 if {dtype} is torch.float16 else 32)
bias = torch.zeros(x.shape[1], dtype={dtype})
y = encoder_triton.bias_gelu(x, bias).double()
slope, _ = encoder_triton.bias_gelu_backward(torch.ones_like(x), x, bias)
wide = x.double().requires_grad_()
cdf = 0.5 * torch.special.erfc(-wide * 0.5**0.5)
(wide * cdf).sum().backward()
half = torch.finfo({dtype}).eps / 2
least = max(torch.finfo({dtype}).tiny, 1e-9)
# The slope is a difference of two terms, which meet at -0.75: what they lack is measured by their size.
for ours, right, size in ((y, wide * cdf, wide * cdf), (slope.double(), wide.grad, cdf)):
    added = (ours - right).abs() - right.abs().clamp(min=least) * half * {halves}
    print(float((added / size.abs().clamp(min=least) / half).max()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=INTERPRETING,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert max(map(float, done.stdout.split())) < 0.1


def test_the_assemblers_report_is_read() -> None:
    line = " Function k:\n  REG:40 STACK:8 SHARED:16 LOCAL:4 CONSTANT[0]:432 TEXTURE:0 SURFACE:0 SAMPLER:0"
    found = encoder_check._USED.search(line)
    assert found is not None
    assert found.groups() == ("40", "8", "4")
