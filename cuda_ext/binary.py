"""Products with packed binary weights: one bit a weight, on the CPU and on CUDA.

| `stillhouse::` | activations x (..., K) in float32 or bfloat16 | sum |
|---|---|---|
| `binary_linear` | q of {-1, 1} or {0, 1} by whether x >= threshold | XNOR and popcount |
| `binary_weight_linear` | as they are | additions and subtractions |

`scale`, (1,) or (N,) fp32, is the weights' times the activations', and `threshold` (1,) or (K,) fp32; with
`positives` of `positives_of` q is of {0, 1}.

`pack` lays weights of -1 and +1 out in panels of 16 outputs, (panels, words, 16) int32: bit j of word w of an
output is its weight of input 32 w + j, 1 for +1.

Results are y = sum * scale + bias in fp32, rounded twice, then stored in the format of the activations.
Integer sums are exact below 2^24 inputs; sums of float activations have one order in every kernel: 32 inputs
as eight groups of four, a group from left to right, the groups as a tree, and then the next 32. The fastest
CPU kernels run, or those named in `STILLHOUSE_CPU_CAPABILITY`: `scalar`, `neon`, `avx2` or `avx512` (with
VPOPCNTDQ).
"""

import torch
from torch import Tensor

from cuda_ext import BuildError, ConfigurationError, native

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


def positives_of(signs: Tensor) -> Tensor:
    """Returns the (N,) int32 counts of +1 in bool signs (N, K), which {0, a} activations need."""
    return signs.sum(1, dtype=torch.int32)
