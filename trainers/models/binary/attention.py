"""Attention whose products are of quantised queries, keys, values and probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.modeling_utils import AttentionInterface

from trainers.models.binary.layers import learned_of, quantised
from trainers.models.binary.quantisers import Inputs

ELASTIC_ATTENTION = "stillhouse_elastic"
"""The name that this attention has among transformers' implementations."""

OPERANDS = {"query": True, "key": True, "value": True, "probs": False}
"""Operands of attention's products, and whether their levels are on both sides of 0."""


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Quantised attention in transformers' form: (B, heads, S, D) in, (B, S, heads, D) and None out.

    `P = Q(softmax(Q(q) Q(k)^T / sqrt(D)))`, then dropout, and `P Q(v)`, each Q with a scale of its own: BiT,
    arXiv 2205.13016. Probabilities become {0, a}. Scores are whole in memory. `module.operands` has a
    quantiser for each operand; the mask is (B, 1, 1, S) bool, False on padding.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (_quantised(module, *one) for one in (("query", query), ("key", key), ("value", value)))
    scores = (q @ k.transpose(2, 3)) * scale
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    probs = _quantised(module, "probs", torch.softmax(scores, -1))
    probs = functional.dropout(probs, dropout, training=dropout > 0.0)
    return (probs @ v).transpose(1, 2), None


def _quantised(module: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    inputs: Inputs = module.operands[name]
    scale, shift = learned_of(module, name, inputs, x)
    return quantised(x, scale, shift, inputs)


AttentionInterface.register(ELASTIC_ATTENTION, attention)
