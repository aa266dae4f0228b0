"""The Triton kernels without a GPU: interpreted next to the CPU kernels, and compiled for all GPUs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_ext import build, encoder, encoder_check

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make kernels brings it"
)

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
    for rows, width, draws in ((3, 7, by_number), (2, 96, by_number), (2, 96, by_memory)):
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
        columns = torch.empty(encoder_layer.shares(rows)[0], 4 * width)
        encoder_triton.bias_gelu_backward_sums(grad, x, bias, columns[:, :width])
        encoder_triton.dropout_add_norm_backward_sums(*given, columns[:, width:])
        totals = encoder_triton.column_totals(columns, dtype)
        whole = (*ops.bias_gelu_backward(grad, x, bias)[1:], *ops.dropout_add_norm_backward(*given)[2:])
        check("column_totals", (totals,), (torch.cat(whole),))
        ids = [torch.randint(count, (rows,)) for count in (11, 2, 9)]
        tables = [make(count, width) for count in (11, 9, 2)]
        _, *saved = compare("embed_norm", *ids, *tables, weight, shift, 1e-5, 0.3, seed, 1)
        compare("embed_norm_backward", grad, *ids, *tables, *saved, weight, 0.3, seed, 1)
        labels = torch.randint(width, (rows,))
        labels[0] = -100
        losses, lse = compare("cross_entropy", x, labels, -100)
        compare("cross_entropy_backward", losses.clone(), x, labels, lse, -100)
print(json.dumps(worst))
"""


def test_interpreted_kernels_agree_with_the_cpu_kernels(kernels: None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join((str(Path(encoder.__file__).parents[1]), *sys.path)),
        },
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
def test_no_kernel_spills_on_any_target() -> None:
    found = encoder_check.kernel_resources(widths=(768,))
    assert {row.target for row in found} == set(encoder_check.TARGETS)
    assert set(encoder_check.TARGETS) == {f"sm_{name.replace('.', '')}" for name in build.ARCHITECTURES}
    assert len(found) == len(build.ARCHITECTURES) * (10 + 4), "four draw dropout, from a seed of either kind"
    assert [row for row in found if row.spill_bytes] == []
    assert max(row.registers for row in found) <= encoder_check.REGISTER_LIMIT


def test_the_assemblers_report_is_read() -> None:
    line = " Function k:\n  REG:40 STACK:8 SHARED:16 LOCAL:4 CONSTANT[0]:432 TEXTURE:0 SURFACE:0 SAMPLER:0"
    found = encoder_check._USED.search(line)
    assert found is not None
    assert found.groups() == ("40", "8", "4")
