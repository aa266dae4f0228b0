"""A trained binary layer without its latent weights: what is packed."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class FrozenInputs:
    """How a layer quantises its inputs.

    Attributes:
        bits: Of a level; 0 = inputs stay floating point.
        signed: Levels on both sides of 0.
        scale, shift: a and b; see `trainers.models.binary.quantisers.Inputs`.
    """

    bits: int
    signed: bool
    scale: float
    shift: float


@dataclass(frozen=True, slots=True)
class FrozenLinear:
    """A binary layer: `y = sum(q t) (a s) + bias`.

    Attributes:
        signs: (out, in) bool, True = +1.
        nonzero: (out, in) bool, False = 0, for ternary weights; None = no zeros.
        scale: (out,) s in fp32.
        bias: (out,) in fp32.
    """

    signs: torch.Tensor
    nonzero: torch.Tensor | None
    scale: torch.Tensor
    bias: torch.Tensor
    inputs: FrozenInputs
