"""An optimizer and the float64 reference on the same values and gradients, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cuda_ext import Adan, adan_state
from cuda_ext.parity import ReferenceState, clip_coefficient, reference_step

SIZES = (1, 2, 3, 1023, 1025, 30522)
MOVEMENT_BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 1e-3, torch.float16: 1e-2}
VALUE_BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-5, torch.float16: 2e-4}
"""Of `Paired.worst_error` after at most 100 steps, of movement and value. The previous gradient of fp16 is
rounded to the 8 bits of bfloat16; those of the others are exact."""
REFERENCE_OPTIONS = ("lr", "betas", "eps", "weight_decay", "no_prox", "maximize")


def misaligned(size: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """A contiguous view that begins one element after an allocation: no vector access is aligned."""
    return torch.zeros(size + 1, dtype=dtype, device=device)[1:]


class Paired:
    """`Adan` beside the reference; groups are given as options, one per sequence of tensors."""

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[Tensor], dict[str, Any]]],
        *,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.options = [group for _, group in groups]
        self.params = [[torch.nn.Parameter(value) for value in values] for values, _ in groups]
        for param in self.flat():
            with torch.no_grad():
                param.copy_(self.draw(param, 0.1))
        self.states = [[ReferenceState(param.cpu()) for param in params] for params in self.params]
        self.begin = [state.theta.clone() for states in self.states for state in states]
        arguments = [
            {"params": params, **group} for params, group in zip(self.params, self.options, strict=True)
        ]
        self.optimizer = Adan(arguments, **options)
        self.max_grad_norm = options.get("max_grad_norm", 0.0)

    def flat(self) -> list[torch.nn.Parameter]:
        """All parameters."""
        return [param for params in self.params for param in params]

    def draw(self, like: Tensor, scale: float) -> Tensor:
        """Random values in the shape and dtype of a tensor."""
        return (torch.randn(like.shape, generator=self.generator) * scale).to(like.dtype)

    def set_gradients(self, scale: float = 0.01) -> list[Tensor]:
        """Draws gradients, laid out like the parameters, and returns them for the reference."""
        drawn = [self.draw(param, scale) for param in self.flat()]
        for param, gradient in zip(self.flat(), drawn, strict=True):
            param.grad = torch.empty_like(param).copy_(gradient)
        return drawn

    def advance_reference(self, drawn: list[Tensor], factor: float = 1.0) -> None:
        """One step of the reference in every group."""
        factor *= clip_coefficient([factor * gradient.double() for gradient in drawn], self.max_grad_norm)
        gradients = iter(drawn)
        for states, group in zip(self.states, self.optimizer.param_groups, strict=True):
            for state in states:
                options = {name: group[name] for name in REFERENCE_OPTIONS}
                reference_step(state, next(gradients), factor=factor, **options)

    def step(self, count: int = 1) -> None:
        """Both take `count` steps."""
        for _ in range(count):
            drawn = self.set_gradients()
            self.optimizer.step()
            self.advance_reference(drawn)

    def worst_error(self, *, of: str = "movement") -> float:
        """Largest |theta - reference|, over how far the reference has moved or its largest value."""
        worst = 0.0
        states = [state for group in self.states for state in group]
        for param, state, begin in zip(self.flat(), states, self.begin, strict=True):
            if param.numel() == 0:
                continue
            theta = adan_state.load(param.detach(), self.optimizer.state[param]).cpu().double()
            assert torch.isfinite(theta).all()
            scale = (state.theta - begin).abs().max() if of == "movement" else state.theta.abs().max()
            worst = max(worst, float((theta - state.theta).abs().max() / scale))
        return worst
