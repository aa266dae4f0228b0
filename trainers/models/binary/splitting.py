"""From a ternary model to a binary one of twice its width that computes the same.

BinaryBERT (Bai et al. 2021, arXiv 2012.15701, section 3): a binary model is hard to train from scratch, a
ternary one is not, and each ternary weight is the sum of two signs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainers.config.model import Binary
from trainers.errors import BadSpecError
from trainers.model_kinds.families import QUANTISED
from trainers.models.binary.install import install, settings_of
from trainers.models.binary.layers import BinaryLinear, has_signs
from trainers.models.binary.quantisers import Ternary
from trainers.models.student import Student


@torch.no_grad()
def split(half: Student, settings: Binary) -> Student:
    """Returns a binary model of twice the width (hidden size, heads, feed-forward) with the same outputs.

    Hidden states become `[x, x]`, which LayerNorm preserves. A ternary layer W becomes `[[W1, W2], [W1, W2]]`
    with `s sign(W1) + s sign(W2)` its ternary weight, see `two_signs`; other maps are divided by two.
    `settings` has the same kind of scale, not centred.

    Raises:
        BadSpecError: The models do not fit.
    """
    before = settings_of(half.model)
    if before is None or not any(isinstance(part, BinaryLinear) for part in half.modules()):
        raise BadSpecError("model.binary.split needs a student with ternary weights; set split: false")
    if settings.centred or settings.weight_scale != before.weight_scale:
        raise BadSpecError(
            f"model.binary.split needs centred: false and weight_scale: {before.weight_scale}, as its "
            "ternary student has; change them, or set split: false"
        )
    if half.head.reads == "guessed":
        raise BadSpecError(
            "model.binary.split does not widen a head that guesses tokens; split a model of another task, or "
            "set split: false"
        )
    fields: dict[str, Any] = half.model.config.to_dict()
    family = half.architecture.family
    for name in (family.hidden_size, family.attention_heads, family.feed_forward):
        fields[name] *= 2
    wide = half.architecture.build(fields, half.head)
    setattr(wide.config, QUANTISED, fields[QUANTISED])
    install(wide)
    weights, modules = half.model.state_dict(), dict(half.model.named_modules())
    shapes = {name: tensor.shape for name, tensor in wide.state_dict().items()}
    found = {
        name: _widened(modules[name.rpartition(".")[0]], name, tensor, shapes[name])
        for name, tensor in weights.items()
    }
    wide.load_state_dict(found)
    setattr(wide.config, QUANTISED, settings.model_dump(mode="json"))
    return Student(wide, half.architecture, half.head, half.fresh)


def two_signs(weights: Ternary, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two latent weights (out, in) whose binary values add up to a ternary one.

    With t the ternary value and w the centred latent weight, BinaryBERT's weight splitting with a = 1/2:
    where t is not 0 both are w / 2; elsewhere they are `b + w, -b` (w > 0) and `b, -b + w`. The scale of both
    together, the mean of all |values|, has to be half the ternary scale s, which gives
    `b = (s - mean|w|) / 2` with the mean over the weights whose t is 0.
    """
    values, scale = weights.quantise(latent)
    assert scale is not None
    centred = weights.centre(latent)
    zero = (values == 0).to(latent.dtype)
    share = weights.mean(zero).clamp(min=0.5 / latent.numel())
    offset = 0.5 * (scale - weights.mean(centred.abs() * zero) / share)
    up, down = centred.clamp(min=0.0), centred.clamp(max=0.0)
    kept = values != 0
    first = torch.where(kept, 0.5 * centred, offset + up)
    second = torch.where(kept, 0.5 * centred, down - offset)
    return first, second


def _widened(module: nn.Module, name: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if tensor.shape == shape:
        return tensor
    if tensor.ndim == 1 or isinstance(module, nn.Embedding):
        return torch.cat([tensor, tensor], -1)  # Outputs come twice.
    if isinstance(module, BinaryLinear) and name.endswith(".weight") and has_signs(module):
        if not isinstance(module.weights, Ternary):
            raise BadSpecError(f"model.binary.split needs ternary weights, but {name} has none")
        row = torch.cat(two_signs(module.weights, tensor), 1)
        return torch.cat([row, row], 0)
    row = torch.cat([0.5 * tensor, 0.5 * tensor], 1)
    return row if row.shape == shape else torch.cat([row, row], 0)
