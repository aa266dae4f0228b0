"""Weights and inputs as few-valued numbers: the forward arithmetic and its surrogate gradients. Pure.

A quantised weight is `s t` with t in {-1, 0, 1} and a quantised input `a q` with q a small integer, so that
a product of both is `(a s) sum(q t)` with a sum of integers, which fp32 holds exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from trainers.models.binary.derivatives import Derivative, times, within

SMALLEST_SCALE = 1e-6
"""A learned scale counts as at least this."""
_TERNARY_SHARE = 0.7


class Weights(Protocol):
    def quantise(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns t (out, in) and the scale s (out, 1) or (1, 1); None = 1."""

    def gradient(self, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of the latent weights from that of s t; may overwrite `grad`."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """A scale `per` row or tensor, of weights from which the mean is subtracted first if `centred`."""

    derivative: Derivative
    per: Literal["row", "tensor"] = "row"
    centred: bool = False

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """(out, 1) over each row, or (1, 1) over the tensor."""
        return values.mean(1, keepdim=True) if self.per == "row" else values.mean().view(1, 1)

    def centre(self, weight: torch.Tensor) -> torch.Tensor:
        return weight - self.mean(weight) if self.centred else weight

    def gradient(self, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """`dL/dW = C(dL/d(s t) phi'(c))` with c the centred weights and C the centring.

        The scale counts as constant and is left out of the product, as in BinaryBERT and BiT: the quantised
        weight stands in for the latent one as a whole.
        """
        grad = times(self.derivative, grad, self.centre(weight))
        return grad - self.mean(grad) if self.centred else grad


class Sign(Scaled):
    """`s sign(c)` with `s = mean|c|`, which minimises `||c - s t||^2` over s and t; sign(0) = 1.

    XNOR-Net, Rastegari et al. 2016, arXiv 1603.05279, section 3.1. Centred, c = W - mean(W), as in
    BiBERT (Qin et al. 2022, arXiv 2203.06390), which maximises the entropy of the signs; the
    mean is not added again.
    """

    __slots__ = ()

    def quantise(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        centred = self.centre(weight)
        return signs(centred), self.mean(centred.abs())


class Ternary(Scaled):
    """`s t` with t = sign(c) where |c| > 0.7 mean|c|, else 0, and s the mean of these |c|.

    Ternary Weight Networks, Li and Liu 2016, arXiv 1605.04711; the model that BinaryBERT (Bai et al. 2021,
    arXiv 2012.15701) splits.
    """

    __slots__ = ()

    def quantise(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        centred = self.centre(weight)
        sizes = centred.abs()
        kept = (sizes > _TERNARY_SHARE * self.mean(sizes)).to(weight.dtype)
        share = self.mean(kept).clamp_(min=0.5 / weight.numel())  # A tensor of zeros keeps none.
        return signs(centred).mul_(kept), self.mean(sizes.mul_(kept)) / share


class Float(Scaled):
    __slots__ = ()

    def quantise(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return weight, None

    def gradient(self, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad


@dataclass(frozen=True, slots=True)
class Inputs:
    """A quantiser of inputs: `a q(u)` with `u = (x - b) / a`.

    Attributes:
        derivative: Stands for the derivative of sign, for one bit.
        bits: Of a level.
        signed: Levels on both sides of 0; else from 0 on, after softmax and ReLU.
        learned: Whether scale a and shift b are parameters; else 1 and 0.
    """

    derivative: Derivative
    bits: int = 1
    signed: bool = True
    learned = False

    @property
    def lowest(self) -> int:
        if not self.signed:
            return 0
        return -1 if self.bits == 1 else -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        if not self.signed:
            return (1 << self.bits) - 1
        return 1 if self.bits == 1 else (1 << (self.bits - 1)) - 1

    def levels(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Returns the integers q in the dtype of x, in the order of operations that packed layers share.

        One bit: q = 1 where `x >= b` (signed) or `x >= b + a / 2`, else the lowest level. More bits:
        `q = clamp(rint((x - b) (1 / a)), lowest, highest)`, ties to even. NaN stays NaN.
        """
        if self.bits > 1:
            return (x - shift).mul_(scale.reciprocal()).round_().clamp_(self.lowest, self.highest)
        if self.signed:
            return signs(x) if not self.learned else _plus_minus(x, shift)
        return _reached(x, shift + 0.5 * scale)

    def gradients(
        self,
        x: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        levels: torch.Tensor,
        grad: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Returns the gradients of x, a and b from that of a q; may overwrite `grad` and `levels`.

        With phi' the surrogate's derivative (for more than one bit 1 between the lowest and the highest
        level, else 0): `dx = phi'`, `da = q - u phi'`, `db = -phi'`, as in LSQ, Esser et al. 2020, arXiv
        1902.08153, section 2.1. The last two are summed over all elements and divided by
        `sqrt(features highest)` (section 2.2), features being the width of x.
        """
        if not self.learned:
            return self._passed(grad, x), None, None
        u = (x - shift).mul_(scale.reciprocal())
        small = 1.0 / math.sqrt(x.shape[-1] * self.highest)
        of_levels = torch.dot(grad.reshape(-1), levels.reshape(-1))
        grad = self._passed(grad, u)
        grad_scale = (of_levels - torch.dot(grad.reshape(-1), u.reshape(-1))) * small
        return grad, grad_scale, grad.sum() * -small

    def _passed(self, grad: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        if self.bits > 1:
            return within(grad, u, self.lowest, self.highest)
        # {0, 1} is half of 1 + sign(2u - 1), whose slope in u is that of sign.
        return times(self.derivative, grad, u if self.signed else u.mul(2.0).sub_(1.0))

    def initial_scale(self, x: torch.Tensor) -> torch.Tensor:
        """The scale that fits data: mean|x| for {-a, a}, which minimises the squared error.

        Else `2 mean|x| / sqrt(highest)`, as in LSQ, section 2.1.
        """
        mean = x.abs().mean()
        if not (self.bits == 1 and self.signed):
            mean = mean * (2.0 / math.sqrt(self.highest))
        return mean.clamp(min=SMALLEST_SCALE)


class SignInputs(Inputs):
    """sign(x), without scale (Bi-Real Net, arXiv 1808.00278; BiBERT, arXiv 2203.06390)."""

    __slots__ = ()


class ElasticInputs(Inputs):
    """Levels with a learned scale and shift: {0, a} or {-a, a} for one bit.

    BiT, Liu et al. 2022, arXiv 2205.13016: `a rint(clip((x - b) / a, 0, 1))` after softmax and
    ReLU, and `a sign((x - b) / a)` elsewhere. The shift moves the threshold and is not added again.
    Binary weights with inputs of a few more levels are also the subject of BWTA (arXiv 2604.03957).
    """

    __slots__ = ()
    learned = True


def signs(x: torch.Tensor) -> torch.Tensor:
    """1 where x >= 0, else -1, in the dtype of x; NaN where x is."""
    return _plus_minus(x, x.new_zeros(()))


def _plus_minus(x: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    return _reached(x, threshold).mul_(2.0).sub_(1.0)


def _reached(x: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    reached = torch.ge(x, threshold, out=torch.empty_like(x))
    return reached.masked_fill_(x.isnan() | threshold.isnan(), torch.nan)
