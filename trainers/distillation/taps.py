"""Reading a layer's queries, keys and values without taking part in its attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from trainers.models.student import Student


class RelationTap:
    """Keeps queries, keys and values of one layer as its linear maps give them.

    Relations are computed from these, so the layer's own attention stays a fused kernel that never
    writes down its scores. A family that has one map for all three gives them one after the other.

    Args:
        model: Model to hook.
        layer: 0-based.

    Attributes:
        open: whether forward passes are kept; closed, nothing is held in memory.
    """

    def __init__(self, model: Student, layer: int) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._maps = model.architecture.family.relations
        self.open = False
        tapped = model.architecture.layers(model.model)[layer]
        for name in self._maps:
            tapped.get_submodule(name).register_forward_hook(self._keeper(name))

    def take(self) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values (B, S, H) of the last forward pass while open, which are given away."""
        taken = tuple(self._kept[name] for name in self._maps if name in self._kept)
        self._kept.clear()
        return taken[0].chunk(3, dim=-1) if len(taken) == 1 else taken

    def _keeper(self, name: str) -> Callable[[nn.Module, object, torch.Tensor], None]:
        def keep(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
            if self.open:
                self._kept[name] = output

        return keep
