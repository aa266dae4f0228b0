"""The operators of packed binary weights by their names, unpacked weights, and sums in the kernels' order."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ext.binary import PANEL, WORD_BITS


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
    result: Tensor = torch.ops.stillhouse.binary_linear(x, weight, positives, scale, bias, threshold, outputs)
    return result


def binary_weight_linear(
    x: Tensor, weight: Tensor, scale: Tensor, *, outputs: int, bias: Tensor | None = None
) -> Tensor:
    result: Tensor = torch.ops.stillhouse.binary_weight_linear(x, weight, scale, bias, outputs)
    return result


def unpack(weight: Tensor, outputs: int, inputs: int) -> Tensor:
    panels, words, _ = weight.shape
    bits = weight.transpose(1, 2).contiguous().view(torch.uint8).view(panels * PANEL, words * 4, 1)
    places = torch.arange(8, dtype=torch.uint8, device=weight.device)
    return (bits >> places & 1).bool().view(panels * PANEL, words * WORD_BITS)[:outputs, :inputs]


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
