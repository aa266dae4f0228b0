"""Each kernel of a fused layer of BERT's kind alone, forward and backward.

    python -m benchmarks.layer_kernels

On a GPU in bf16 with fp32 parameters, replayed from a CUDA graph, so that the host's launches do not count;
on a CPU in fp32, called in a loop. Dropout is 0.1, and texts are of 288 tokens.

The last line is one JSON object: `kernels` has, by name, the time `us` of one call and `bytes_us`, what its
arrays take at the bandwidth of the device's data sheet (null on a CPU); `forward_us` and `backward_us` are
sums over a layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.options import Benchmark
from benchmarks.trainer import pricing_of
from cuda_ext import encoder, encoder_layer

BENCHMARK = Benchmark("layer_kernels", __doc__, fields=("kernels", "forward_us", "backward_us"))
LENGTH = 288
"""Tokens of a text."""
RATE = 0.1
EPS = 1e-12
CALLS = 20
"""Calls in a recorded graph, or in a loop."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is timed.

    Attributes:
        name: in the figures.
        call: launches it.
        arrays: what it reads and writes at least, each once.
        backward: of the backward pass.
    """

    name: str
    call: Callable[[], object]
    arrays: Sequence[Tensor]
    backward: bool = False


def kernels_of(device: torch.device, *, texts: int, width: int) -> list[Kernel]:
    """Returns the kernels of a layer, 4 times as wide inside, for the rows of a packed batch."""
    encoder.require(device.type)
    ops: Any = torch.ops.stillhouse
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows, inner, heads = texts * LENGTH, 4 * width, width // 64

    def made(*shape: int, dtype: torch.dtype = half) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    x, y, grad, wide, grad_wide = (
        made(rows, width),
        made(rows, width),
        made(rows, width),
        made(rows, inner),
        made(rows, inner),
    )
    joint, grad_joint = made(rows, 3 * width), made(rows, 3 * width)
    of_joint, of_mix, of_inner, of_outer = (
        made(3 * width, width),
        made(width, width),
        made(inner, width),
        made(width, inner),
    )
    bias, inner_bias = made(width, dtype=torch.float32), made(inner, dtype=torch.float32)
    stored = [weight.float() for weight in (of_joint, of_mix, of_inner, of_outer)]
    weights = [of_joint, of_mix, of_inner, of_outer]
    seed = torch.zeros((), dtype=torch.int64)
    out, summed, mean, rstd = ops.dropout_add_norm(x, bias, y, bias, bias, EPS, RATE, seed, 0)
    lines = encoder_layer.programs_of(x) if device.type == "cuda" else 1
    sums = torch.empty(lines, 3 * width, device=device)
    inner_sums = torch.empty(lines, inner, device=device)
    forward = [
        Kernel("joint_product", lambda: torch.addmm(joint[0], x, of_joint.t()), (x, of_joint, joint)),
        Kernel("product", lambda: x @ of_mix.t(), (x, of_mix, out)),
        Kernel(
            "dropout_add_norm",
            lambda: ops.dropout_add_norm(x, bias, y, bias, bias, EPS, RATE, seed, 0),
            (x, y, out, summed),
        ),
        Kernel("inner_product", lambda: x @ of_inner.t(), (x, of_inner, wide)),
        Kernel("bias_gelu", lambda: ops.bias_gelu(wide, inner_bias), (wide, wide)),
        Kernel("outer_product", lambda: wide @ of_outer.t(), (wide, of_outer, out)),
        Kernel("weights", lambda: torch._foreach_copy_(weights, stored), (*weights, *stored)),
    ]
    backward = [
        Kernel(
            "dropout_add_norm_backward",
            lambda: ops.dropout_add_norm_backward_sums(
                grad, None, summed, mean, rstd, bias, RATE, seed, 0, sums
            ),
            (grad, summed, x, y),
        ),
        Kernel("outer_weight", lambda: grad.t() @ wide, (grad, wide, of_outer)),
        Kernel("outer_input", lambda: grad @ of_outer, (grad, of_outer, wide)),
        Kernel(
            "bias_gelu_backward",
            lambda: ops.bias_gelu_backward_sums(grad_wide, wide, inner_bias, inner_sums),
            (grad_wide, wide, wide),
        ),
        Kernel("inner_weight", lambda: grad_wide.t() @ x, (grad_wide, x, of_inner)),
        Kernel("inner_input", lambda: torch.addmm(x, grad_wide, of_inner), (x, grad_wide, of_inner, out)),
        Kernel("weight", lambda: grad.t() @ x, (grad, x, of_mix)),
        Kernel("input", lambda: grad @ of_mix, (grad, of_mix, out)),
        Kernel("column_totals", lambda: ops.column_totals(sums, torch.float32), (sums,)),
        Kernel(
            "joint_gradient", lambda: ops.joint_gradient([grad, x, y], torch.float32), (grad, x, y, joint)
        ),
        Kernel(
            "joint_input", lambda: torch.addmm(grad, grad_joint, of_joint), (grad, grad_joint, of_joint, out)
        ),
        Kernel("joint_weight", lambda: grad_joint.t() @ x, (grad_joint, x, of_joint)),
        Kernel("gradients", lambda: torch._foreach_copy_(stored, weights), (*weights, *stored)),
    ]
    return [
        *forward,
        *(replace(kernel, backward=True) for kernel in backward),
        *attention_kernels(device, made, texts=texts, heads=heads),
    ]


def attention_kernels(
    device: torch.device, made: Callable[..., Tensor], *, texts: int, heads: int
) -> list[Kernel]:
    """Returns the two of attention: flash attention on a GPU, our own on a CPU."""
    query, key, value, grad = (made(texts * LENGTH, heads, 64) for _ in range(4))
    edges = torch.arange(0, (texts + 1) * LENGTH, LENGTH, dtype=torch.int32, device=device)
    arrays = (query, key, value, grad)
    both = (*arrays, query, key, value, grad)
    if device.type != "cuda":
        own: Any = torch.ops.stillhouse
        seed = torch.zeros((), dtype=torch.int64)
        out, statistics = own.segment_attention(query, key, value, edges, 0.125, RATE, seed, 0)
        return [
            Kernel(
                "attention",
                lambda: own.segment_attention(query, key, value, edges, 0.125, RATE, seed, 0),
                arrays,
            ),
            Kernel(
                "attention_backward",
                lambda: own.segment_attention_backward(
                    grad, query, key, value, out, statistics, edges, 0.125, RATE, seed, 0
                ),
                both,
                backward=True,
            ),
        ]
    aten: Any = torch.ops.aten
    at = (edges, edges, LENGTH, LENGTH, RATE, False)

    def attend() -> Any:
        return aten._flash_attention_forward(query, key, value, *at, False, scale=0.125)

    out, lse, state, unused, _ = attend()
    return [
        Kernel("attention", attend, arrays),
        Kernel(
            "attention_backward",
            lambda: aten._flash_attention_backward(
                grad, query, key, value, out, lse, *at, state, unused, scale=0.125
            ),
            both,
            backward=True,
        ),
    ]


def microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Returns the time of a call; of a GPU's without the host's part."""
    for _ in range(3):
        call()
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        return (time.perf_counter() - begin) / CALLS * 1e6
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    first.record()
    graph.replay()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / CALLS * 1e3


def measure(device: torch.device, *, texts: int, width: int) -> dict[str, Any]:
    """Returns all figures."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    bandwidth = pricing_of(name).bandwidth_gb_s if name else None
    found: dict[str, dict[str, float | None]] = {}
    totals = {False: 0.0, True: 0.0}
    for kernel in kernels_of(device, texts=texts, width=width):
        taken_us = microseconds(kernel.call, device)
        moved = sum(array.nbytes for array in kernel.arrays)
        found[kernel.name] = {
            "us": round(taken_us, 1),
            "bytes_us": None if not bandwidth else round(moved / bandwidth / 1e3, 1),
        }
        # A layer has two LayerNorms.
        totals[kernel.backward] += taken_us * (2 if kernel.name.startswith("dropout_add_norm") else 1)
        print(f"{kernel.name:<26} {taken_us:10.1f} us", flush=True)
    return {"kernels": found, "forward_us": round(totals[False], 1), "backward_us": round(totals[True], 1)}


def main() -> None:
    """Command line."""
    parser = BENCHMARK.parser()
    parser.size("--texts", 32, smoke=1, help="texts of a batch")
    parser.size("--width", 768, smoke=64, help="of the hidden states, a multiple of 64")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    BENCHMARK.report(measure(device, texts=given.texts, width=given.width), given)


if __name__ == "__main__":
    main()
