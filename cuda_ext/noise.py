"""Gradient noise from two successive gradients, which Adan holds anyway."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

SUMS = 4
"""Length of the float64 tensor: sum g g_prev, sum (g - g_prev)^2, sum g^2, elements counted."""


@dataclass(frozen=True)
class GradientNoise:
    """Sums over all elements that had a previous gradient at the last step taken.

    With gradients of two independent batches at nearly the same weights, g g_prev estimates
    the squared norm of the true gradient and half of (g - g_prev)^2 the trace of the
    gradient's covariance at that batch size (McCandlish et al., arXiv 1812.06162, section 2.2).
    The gradients are those of the update: unscaled and clipped.
    """

    product: float
    difference_square: float
    square: float
    elements: int

    @property
    def gradient_square(self) -> float:
        """Estimate of the squared norm of the true gradient; noise can make it negative."""
        return self.product

    @property
    def covariance_trace(self) -> float:
        """Estimate of the trace of the covariance of one global batch's gradient."""
        return self.difference_square / 2.0

    def noise_scale(self, global_batch_size: int) -> float:
        """Examples at which noise and signal balance; infinite when the signal drowns.

        Average products and differences over many steps before dividing: one step's ratio is
        noisy.
        """
        if self.gradient_square <= 0.0:
            return float("inf")
        return global_batch_size * self.covariance_trace / self.gradient_square


def read(sums: list[Tensor]) -> GradientNoise:
    """Adds up the devices' sums; synchronises with each."""
    product, difference, square, count = (
        sum(values) for values in zip(*(s.tolist() for s in sums), strict=True)
    )
    return GradientNoise(float(product), float(difference), float(square), int(count))
