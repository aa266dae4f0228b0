"""Reading a layer's queries, keys and values without taking part in its attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from trainers.models.student import Student


class RelationTap:
    """Keeps queries, keys and values of some layers as their linear maps give them.

    Relations are computed from these, so the layer's own attention stays a fused kernel that never
    writes down its scores. A family that has one map for all three gives them one after the other.

    Args:
        layers: 0-based; a layer may be named twice.

    Attributes:
        open: Whether forward passes are kept; closed, nothing is held in memory.
    """

    def __init__(self, model: Student, layers: Sequence[int]) -> None:
        self._kept: dict[tuple[int, str], torch.Tensor] = {}
        self._maps, self._layers = model.architecture.family.relations, tuple(layers)
        self.open = False
        for layer in sorted(set(layers)):
            tapped = model.architecture.layers(model.model)[layer]
            for name in self._maps:
                tapped.get_submodule(name).register_forward_hook(self._keeper(layer, name))

    def take(self) -> tuple[torch.Tensor, ...]:
        """Returns and releases queries, keys and values (B, S, H) of each layer.

        They are those of the last forward pass while open.
        """
        kept, self._kept = self._kept, {}
        taken: list[torch.Tensor] = []
        for layer in self._layers if kept else ():
            maps = [kept[layer, name] for name in self._maps]
            taken += maps[0].chunk(3, dim=-1) if len(maps) == 1 else maps
        return tuple(taken)

    def _keeper(self, layer: int, name: str) -> Callable[[nn.Module, object, torch.Tensor], None]:
        def keep(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
            if self.open:
                self._kept[layer, name] = output

        return keep
