"""Products with packed binary weights: one bit a weight, on the CPU and on CUDA.

| function | activations | sum |
|---|---|---|
| `binary_linear` | compared with a threshold: {-a, a} or {0, a} | XNOR and popcount |
| `binary_weight_linear` | float32 or bfloat16 | additions and subtractions |

`pack` lays weights of -1 and +1 out in panels of 16 outputs, (panels, words, 16) int32: bit j of word w of an
output is its weight of input 32 w + j, 1 for +1.

Results are y = sum * scale + bias in fp32, rounded twice, then stored in the format of the activations.
Integer sums are exact below 2^24 inputs; sums of float activations have one order in every kernel, that of
`reference_weight_linear`. The fastest CPU kernels run, or those named in `STILLHOUSE_CPU_CAPABILITY`:
`scalar`, `neon`, `avx2` or `avx512` (with VPOPCNTDQ).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ext import native
from cuda_ext.errors import BuildError, ConfigurationError

PANEL = 16  # Outputs of a panel
WORD_BITS = 32

_registered = False


def require(device_type: str) -> None:
    global _registered
    if device_type not in ("cpu", "cuda", "meta"):
        raise BuildError(f"there are no kernels for binary weights on {device_type}; use cpu or cuda")
    native.require("cuda" if device_type == "cuda" else "cpu")
    if not _registered:
        for operator in ("binary_linear", "binary_weight_linear"):
            torch.library.register_fake(
                f"stillhouse::{operator}",
                lambda x, *others: x.new_empty((*x.shape[:-1], others[-1])),  # the last is `outputs`
            )
        _registered = True


def why_unavailable(device_type: str) -> str | None:
    return native.why_unavailable(device_type, require)


def capability() -> str:
    """Returns the instruction set that runs; raises ConfigurationError if this CPU lacks the chosen one."""
    require("cpu")
    try:
        return str(torch.ops.stillhouse.binary_capability())
    except RuntimeError as error:
        raise ConfigurationError(str(error).splitlines()[0]) from None


def calls() -> dict[str, dict[str, int]]:
    """Calls of each operator in this process, by the kernels that computed them."""
    require("cpu")
    names = torch.ops.stillhouse.binary_capabilities()
    counts = torch.ops.stillhouse.binary_counters()
    operators = ("binary_linear", "binary_weight_linear")
    counts_of = {
        operator: dict(zip(names, counts[len(names) * i :], strict=False))
        for i, operator in enumerate(operators)
    }
    if native.is_loaded("cuda"):
        for operator, count in zip(operators, torch.ops.stillhouse.binary_cuda_counters(), strict=True):
            counts_of[operator]["cuda"] = count
    return counts_of


def pack(signs: Tensor) -> Tensor:
    """Returns the panels (ceil(N / 16), ceil(K / 32), 16) of bool signs (N, K), True for +1."""
    outputs, inputs = signs.shape
    panels, words = -(-outputs // PANEL), -(-inputs // WORD_BITS)
    padded = signs.new_zeros(panels * PANEL, words * WORD_BITS)
    padded[:outputs, :inputs] = signs
    places = 1 << torch.arange(8, dtype=torch.uint8, device=signs.device)
    bits = (padded.view(panels * PANEL, words * 4, 8) * places).sum(-1, dtype=torch.uint8)
    return bits.flatten().view(torch.int32).view(panels, PANEL, words).transpose(1, 2).contiguous()


def unpack(weight: Tensor, outputs: int, inputs: int) -> Tensor:
    panels, words, _ = weight.shape
    bits = weight.transpose(1, 2).contiguous().view(torch.uint8).view(panels * PANEL, words * 4, 1)
    places = torch.arange(8, dtype=torch.uint8, device=weight.device)
    return (bits >> places & 1).bool().view(panels * PANEL, words * WORD_BITS)[:outputs, :inputs]


def positives_of(signs: Tensor) -> Tensor:
    """Returns the (N,) int32 counts of +1 in bool signs (N, K), which {0, a} activations need."""
    return signs.sum(1, dtype=torch.int32)


def binary_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    threshold: Tensor,
    *,
    outputs: int,
    bias: Tensor | None = None,
    positives: Tensor | None = None,
) -> Tensor:
    """Returns sum(w q) scale + bias, (..., N), with q of {-1, 1} or {0, 1} by whether x >= threshold.

    Args:
        x: (..., K) float32 or bfloat16.
        scale: (1,) or (N,) fp32: the weights' scale times the activations'.
        threshold: (1,) or (K,) fp32.
        positives: Of `positives_of`, for activations of {0, 1}; None = {-1, 1}.
    """
    result: Tensor = torch.ops.stillhouse.binary_linear(x, weight, positives, scale, bias, threshold, outputs)
    return result


def binary_weight_linear(
    x: Tensor, weight: Tensor, scale: Tensor, *, outputs: int, bias: Tensor | None = None
) -> Tensor:
    """Returns sum(w x) scale + bias, (..., N), with weights of -1 and +1; see `binary_linear`."""
    result: Tensor = torch.ops.stillhouse.binary_weight_linear(x, weight, scale, bias, outputs)
    return result


def reference_weight_linear(x: Tensor, signs: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `binary_weight_linear` of bool signs (N, K) by PyTorch's additions, in the same order."""
    inputs = signs.shape[1]
    words = -(-inputs // WORD_BITS)
    padding = (0, words * WORD_BITS - inputs)
    terms = torch.where(signs, 1.0, -1.0) * x.float()[..., None, :]
    padded = torch.nn.functional.pad(terms, padding)
    a, b, c, d = padded.reshape((*padded.shape[:-1], words, 8, 4)).unbind(-1)
    groups = ((a + b) + c) + d
    pairs = groups[..., 0::2] + groups[..., 1::2]
    halves = pairs[..., 0::2] + pairs[..., 1::2]
    total = x.new_zeros((*x.shape[:-1], signs.shape[0]), dtype=torch.float32)
    for word in range(words):
        total = total + (halves[..., word, 0] + halves[..., word, 1])
    scaled = total * scale
    return (scaled if bias is None else scaled + bias).to(x.dtype)
