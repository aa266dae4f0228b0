"""Weights and inputs as few-valued numbers: the forward arithmetic and its surrogate gradients. Pure.

A quantised weight is `s t` with t in {-1, 0, 1} and a quantised input `a q` with q a small integer, so that
a product is `(a s) sum(q t)` with a sum of integers, which fp32 holds exactly. The derivative of sign is
replaced by that of a surrogate phi(u), u being a weight, or an input in units of its scale.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

_MARGIN = 1e-6  # Relative width by which an interval includes its ends


@dataclass(slots=True, eq=False)
class Derivative:
    """phi'(u) of a surrogate phi of sign, which is the closer to sign the larger its sharpness k."""

    slope: Callable[[torch.Tensor, float], torch.Tensor | None]  # Of u and k; None = 1 everywhere
    sharpness: float = 1.0

    def __call__(self, u: torch.Tensor) -> torch.Tensor | None:
        return self.slope(u, self.sharpness)


def identity(u: torch.Tensor, k: float) -> None:
    """phi(u) = u: the gradient passes straight through (Bengio et al. 2013, arXiv 1308.3432)."""


def clipped(u: torch.Tensor, k: float) -> torch.Tensor:
    """phi(u) = clip(u, -1, 1), phi'(u) = 1 where |u| <= 1, else 0 (arXiv 1602.02830, 1.3; 1603.05279)."""
    return (u.abs() <= 1.0).to(u.dtype)


def polynomial(u: torch.Tensor, k: float) -> torch.Tensor:
    """phi(u) = 2u - u|u| on [-1, 1], else sign(u); phi'(u) = 2 - 2|u| there, else 0 (arXiv 1808.00278)."""
    return u.abs().mul_(-2.0).add_(2.0).clamp_(min=0.0)


def tanh(u: torch.Tensor, k: float) -> torch.Tensor:
    """phi(u) is the tanh of k u, and the sharpness k grows over the run (arXiv 1908.05033, 1909.10788)."""
    return torch.tanh(k * u).square_().mul_(-k).add_(k)


def swish(u: torch.Tensor, k: float) -> torch.Tensor:
    """SignSwish of BNN+ (arXiv 1812.11800): overshoots sign, so phi' is negative for large |u|."""
    # Beyond it the derivative is 0 in fp32, and cosh would leave the format.
    scaled = (k * u).clamp_(-80.0, 80.0)
    return (2.0 - scaled * torch.tanh(0.5 * scaled)).mul_(k).div_(1.0 + torch.cosh(scaled))


def times(derivative: Derivative, grad: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    if derivative.slope is clipped:
        return within(grad, u, -1.0, 1.0)
    factor = derivative(u)
    return grad if factor is None else grad.mul_(factor)


def within(grad: torch.Tensor, u: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Returns grad where u is in [low, high], else 0, in one pass over memory."""
    # torch's kernel excludes its bounds.
    margin = _MARGIN * max(abs(low), abs(high))
    passed: torch.Tensor = torch.ops.aten.hardtanh_backward(grad, u, low - margin, high + margin)
    return passed


def sharpness_at(start: float, end: float, step: int, total_steps: int) -> float:
    """`start (end / start)^(step / (total_steps - 1))`, with `step` counted from 0."""
    share = step / (total_steps - 1) if total_steps > 1 else 1.0
    return float(start * (end / start) ** share)


SMALLEST_SCALE = 1e-6  # A learned scale counts as at least this
_TERNARY_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class WeightQuantiser:
    """A quantiser of weights, with a scale `per` row or tensor; `centred` subtracts the mean first."""

    derivative: Derivative
    per: Literal["row", "tensor"] = "row"
    centred: bool = False

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """(out, 1) over each row, or (1, 1) over the tensor."""
        return values.mean(1, keepdim=True) if self.per == "row" else values.mean().view(1, 1)

    def centre(self, weight: torch.Tensor) -> torch.Tensor:
        return weight - self.mean(weight) if self.centred else weight

    def quantise(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns t (out, in) and the scale s (out, 1) or (1, 1); None = 1."""
        raise NotImplementedError

    def gradient(self, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """`dL/dW = C(dL/d(s t) phi'(c))` with c the centred weights and C the centring; may overwrite `grad`.

        The scale counts as constant and is left out of the product, as in BinaryBERT and BiT.
        """
        grad = times(self.derivative, grad, self.centre(weight))
        return grad - self.mean(grad) if self.centred else grad


class Sign(WeightQuantiser):
    """`s sign(c)` with `s = mean|c|`, which minimises `||c - s t||^2`; sign(0) = 1 (arXiv 1603.05279, 3.1).

    Centred, c = W - mean(W) as in BiBERT (arXiv 2203.06390); the mean is not added again.
    """

    __slots__ = ()

    def quantise(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        centred = self.centre(weight)
        return signs(centred), self.mean(centred.abs())


class Ternary(WeightQuantiser):
    """`s t` with t = sign(c) where |c| > 0.7 mean|c|, else 0; s is the mean of these; arXiv 1605.04711."""

    __slots__ = ()

    def quantise(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        centred = self.centre(weight)
        sizes = centred.abs()
        nonzero = (sizes > _TERNARY_SHARE * self.mean(sizes)).to(weight.dtype)
        share = self.mean(nonzero).clamp_(min=0.5 / weight.numel())  # A tensor of zeros keeps none.
        return signs(centred).mul_(nonzero), self.mean(sizes.mul_(nonzero)) / share


class Float(WeightQuantiser):
    __slots__ = ()

    def quantise(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return weight, None

    def gradient(self, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad


@dataclass(frozen=True, slots=True)
class Inputs:
    """A quantiser of inputs: `a q(u)`, `u = (x - b) / a`; a and b are parameters if `learned`, else 1 and 0.

    Levels are on both sides of 0 if `signed`, else from 0 on, after softmax and ReLU. Here one bit is sign(x)
    without scale (Bi-Real Net, arXiv 1808.00278; BiBERT, arXiv 2203.06390).
    """

    derivative: Derivative
    bits: int = 1
    signed: bool = True
    learned = False

    @property
    def lowest(self) -> int:
        return -self.highest - (self.bits > 1) if self.signed else 0

    @property
    def highest(self) -> int:
        return max(1, (1 << (self.bits - self.signed)) - 1)

    def levels(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """Returns the integers q in the dtype of x, in the order of operations that packed layers share.

        One bit: 1 where `x >= b` (signed) or `x >= b + a / 2`, else the lowest; more: `rint((x - b) (1/a))`.
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

        `dx = phi'`, `da = q - u phi'`, `db = -phi'` as in LSQ (arXiv 1902.08153, 2.1); the last two are sums
        over `sqrt(features highest)` (2.2). With several bits phi' is 1 within the levels, else 0.
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
        """mean|x| for {-a, a}, which minimises the squared error; else `2 mean|x| / sqrt(highest)` (LSQ)."""
        mean = x.abs().mean()
        if not (self.bits == 1 and self.signed):
            mean = mean * (2.0 / math.sqrt(self.highest))
        return mean.clamp(min=SMALLEST_SCALE)


class ElasticInputs(Inputs):
    """{0, a} or {-a, a} for one bit, with a learned scale, and a learned shift of the threshold (BiT)."""

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
