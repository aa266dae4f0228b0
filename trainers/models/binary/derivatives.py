"""Surrogates for the derivative of sign in the backward pass.

sign(u) has derivative 0 wherever it has one. Training replaces it by that of a surrogate phi that resembles
sign; the forward pass stays sign. Here u is a weight, or an input in units of its scale.
"""

from __future__ import annotations

from typing import Protocol

import torch

_MARGIN = 1e-6
"""Relative width by which an interval includes its ends."""


class Derivative(Protocol):
    """The derivative of a surrogate; the larger its sharpness k, the closer the surrogate is to sign."""

    sharpness: float

    def __call__(self, u: torch.Tensor) -> torch.Tensor | None:
        """Returns phi'(u); None = 1 everywhere."""

    def surrogate(self, u: torch.Tensor) -> torch.Tensor:
        """Returns phi(u)."""


class Identity:
    """phi(u) = u: the gradient passes straight through (Bengio et al. 2013, arXiv 1308.3432)."""

    sharpness = 1.0

    def __call__(self, u: torch.Tensor) -> torch.Tensor | None:
        return None

    def surrogate(self, u: torch.Tensor) -> torch.Tensor:
        return u


class Clipped:
    """phi(u) = clip(u, -1, 1), phi'(u) = 1 where |u| <= 1, else 0.

    Hubara et al. 2016, arXiv 1602.02830, section 1.3; XNOR-Net, Rastegari et al. 2016, arXiv 1603.05279.
    """

    sharpness = 1.0

    def __call__(self, u: torch.Tensor) -> torch.Tensor | None:
        return (u.abs() <= 1.0).to(u.dtype)

    def surrogate(self, u: torch.Tensor) -> torch.Tensor:
        return u.clamp(-1.0, 1.0)


class Polynomial:
    """phi(u) = 2u - u|u| on [-1, 1], else sign(u); phi'(u) = 2 - 2|u| there, else 0.

    The piecewise polynomial of second order of Bi-Real Net, Liu et al. 2018, arXiv 1808.00278.
    """

    sharpness = 1.0

    def __call__(self, u: torch.Tensor) -> torch.Tensor | None:
        return u.abs().mul_(-2.0).add_(2.0).clamp_(min=0.0)

    def surrogate(self, u: torch.Tensor) -> torch.Tensor:
        inside = u.clamp(-1.0, 1.0)
        return 2.0 * inside - inside * inside.abs()


class Tanh:
    """phi(u) = tanh(k u), phi'(u) = k (1 - tanh(k u)^2), with a sharpness k that grows over the run.

    Gong et al. 2019, arXiv 1908.05033; the growth is that of IR-Net, Qin et al. 2020, arXiv 1909.10788.
    """

    def __init__(self) -> None:
        self.sharpness = 1.0

    def __call__(self, u: torch.Tensor) -> torch.Tensor | None:
        k = self.sharpness
        return torch.tanh(k * u).square_().mul_(-k).add_(k)

    def surrogate(self, u: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.sharpness * u)


class Swish:
    """phi(u) = 2 s(ku) (1 + ku (1 - s(ku))) - 1 with s the logistic function: SignSwish.

    phi'(u) = k (2 - ku tanh(ku / 2)) / (1 + cosh(ku)). BNN+, Darabi et al. 2018, arXiv
    1812.11800. It overshoots sign on both sides, so that its derivative is negative for large |u|.
    """

    def __init__(self) -> None:
        self.sharpness = 1.0

    def __call__(self, u: torch.Tensor) -> torch.Tensor | None:
        k = self.sharpness
        # Beyond it the derivative is 0 in fp32, and cosh would leave the format.
        scaled = (k * u).clamp_(-80.0, 80.0)
        return (2.0 - scaled * torch.tanh(0.5 * scaled)).mul_(k).div_(1.0 + torch.cosh(scaled))

    def surrogate(self, u: torch.Tensor) -> torch.Tensor:
        scaled = self.sharpness * u
        logistic = torch.sigmoid(scaled)
        return 2.0 * logistic * (1.0 + scaled * (1.0 - logistic)) - 1.0


def times(derivative: Derivative, grad: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Returns grad phi'(u); may overwrite `grad`."""
    if isinstance(derivative, Clipped):
        return within(grad, u, -1.0, 1.0)
    factor = derivative(u)
    return grad if factor is None else grad.mul_(factor)


def within(grad: torch.Tensor, u: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Returns grad where u is in [low, high], else 0, in one pass over memory."""
    # torch's kernel excludes its bounds.
    margin = _MARGIN * max(abs(low), abs(high))
    found: torch.Tensor = torch.ops.aten.hardtanh_backward(grad, u, low - margin, high + margin)
    return found


def sharpness_at(start: float, end: float, step: int, total_steps: int) -> float:
    """`start (end / start)^(step / (total_steps - 1))`, with `step` counted from 0."""
    share = step / (total_steps - 1) if total_steps > 1 else 1.0
    return float(start * (end / start) ** share)
