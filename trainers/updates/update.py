"""From gradients to an optimizer step: loss scale, norm, clipping, underflow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainers.models.latent import Latent
from trainers.updates.loss_scale import DeviceLossScale, DynamicLossScale, LossScale
from trainers.updates.optimizer import RATE_FACTOR, restart

UNDERFLOW_EVERY_STEPS = 32
"""Counting reads all gradients and launches three kernels for each, as much as the step itself."""


def counts_underflow(step: int, log_every_steps: int) -> bool:
    """Returns whether a reporting step (0-based) also counts underflow: about one in 32."""
    return step // UNDERFLOW_EVERY_STEPS != (step - log_every_steps) // UNDERFLOW_EVERY_STEPS


class Update:
    """The optimizer of a run and what happens to its gradients first.

    Args:
        half: Half precision that gradients pass through; None = none.
        max_grad_norm: Limit of the global L2 norm; 0 = no clipping.
        counted: Parameters that count in this worker's part of the norm; None = all.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        scale: LossScale,
        half: torch.dtype | None,
        max_grad_norm: float,
        counted: Sequence[nn.Parameter] | None = None,
        latent: Latent | None = None,
    ) -> None:
        self.optimizer, self.scale = optimizer, scale
        self._half, self._limit = half, max_grad_norm
        self._latent = latent or Latent()
        self._scale_there: DeviceLossScale | None = None
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._counted = self._parameters if counted is None else counted
        tables = {p for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters()}
        self._dense = [p for p in self._parameters if p not in tables]
        # Fused and master steps divide gradients on their way in: no pass over memory of its own.
        self._divides = hasattr(optimizer, "grad_scale") or getattr(
            optimizer, "_step_supports_amp_scaling", False
        )

    def decide_on_device(self) -> None:
        """Keeps a dynamic loss scale on the device from now on, for `apply_if_finite`."""
        if isinstance(self.scale, DynamicLossScale):
            self._scale_there = DeviceLossScale(self.scale, self._parameters[0].device)

    @property
    def next_scale(self) -> float | torch.Tensor:
        """Loss scale of the next step; on the device if it is kept there."""
        return self.scale.value if self._scale_there is None else self._scale_there.value

    def follow_scale(self) -> None:
        """Copies the host's loss scale to the device, once the host has read all steps or rolled back."""
        if self._scale_there is not None:
            self._scale_there.follow()

    @property
    def skips_on_device(self) -> bool:
        """Whether the optimizer's kernels decide if a step is taken, see `apply_if_finite`."""
        amp = bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        return bool(getattr(self.optimizer, "skips_on_device", amp))

    def squares(self) -> torch.Tensor:
        """Squared L2 norm of the counted gradients, which carry the loss scale; float64, on the device."""
        gradients = [p.grad for p in self._counted if p.grad is not None]
        # In fp32, because a tensor's norm may leave the range of half precision when no element does;
        # its square may leave that of fp32.
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        whole: torch.Tensor = torch.stack(list(norms)).double().square().sum()
        return whole

    def restart(self) -> None:
        """Resets the optimizer: its moments come from a different loss."""
        restart(self.optimizer)

    def apply(self, norm: float, rate: float) -> float:
        """Takes one step; returns the factor that clipping divided the gradients by, at least 1.

        Args:
            norm: Of the gradients without the loss scale.
        """
        self._begin_apply(rate)
        clip = max(1.0, norm / self._limit) if self._limit > 0.0 else 1.0
        divisor = self.scale.value * clip
        if divisor == 1.0:
            self.optimizer.step()
        elif self._divides:
            device = self._parameters[0].device
            self.optimizer.grad_scale = torch.full((), divisor, device=device)  # type: ignore[attr-defined]
            self.optimizer.step()
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
        else:
            torch._foreach_div_([p.grad for p in self._parameters if p.grad is not None], divisor)
            self.optimizer.step()
        self._latent.after_update()
        return clip

    def apply_if_finite(self, loss_sum: torch.Tensor, squares: torch.Tensor, rate: float) -> None:
        """Takes one step unless loss or gradients are not finite; the device decides, the host reads nothing.

        In this order, as in `apply` and with its numbers: norm = sqrt(squares) / scale; divisor = scale x
        max(1, norm / limit); skipped = not finite(loss) or not finite(squares).
        """
        self._begin_apply(rate)
        optimizer: Any = self.optimizer
        scale = self.next_scale
        divisor = torch.full_like(squares, scale) if isinstance(scale, float) else scale
        if self._limit > 0.0:
            divisor = divisor * (squares.sqrt() / divisor / self._limit).clamp(min=1.0)
        if self._limit > 0.0 or self.scale.dynamic or scale != 1.0:
            optimizer.grad_scale = divisor.float()
        loss_finite = loss_sum.isfinite()
        finite = loss_finite & squares.isfinite()
        optimizer.found_inf = (~finite).float()
        optimizer.step()
        optimizer.grad_scale = optimizer.found_inf = None
        self._latent.after_update()
        if self._scale_there is not None:
            self._scale_there.step(loss_finite, finite)

    def _begin_apply(self, rate: float) -> None:
        self._latent.before_update()
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get(RATE_FACTOR, 1.0)

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def underflow_pct(self) -> torch.Tensor | None:
        """Share of gradient elements that are zero in half precision, loss scale included, in percent.

        Embedding tables are left out: most of their rows have no gradient in any step. None if gradients
        pass through no half precision. Stays on the device.
        """
        if self._half is None:
            return None
        gradients = [p.grad for p in self._dense if p.grad is not None]
        kept = torch.stack([gradient.to(self._half).count_nonzero() for gradient in gradients]).sum()
        return 100.0 * (1.0 - kept / sum(gradient.numel() for gradient in gradients))
