"""A student with maps to its teacher's width, and taps of queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from trainers.data.batches import Batch
from trainers.models.student import Output, Student


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


class ProjectedStudent(nn.Module):
    """A student whose hidden states come in its teacher's width.

    Args:
        student: Evaluation and model folders use it alone.
        teacher_width: H of the teacher.
        levels: Hidden states that are compared: 0 = the embeddings' output, i = layer i's. If
            widths differ each has a linear map of its own (FitNets, arXiv 1412.6550; TinyBERT, arXiv
            1909.10351, equation 8), which is trained with the student and thrown away with the run.
        relations: Layers whose queries, keys and values are kept, 0-based.

    Attributes:
        with_hidden: Whether the next forward passes give more than logits.
    """

    def __init__(
        self, student: Student, teacher_width: int, *, levels: Iterable[int], relations: Sequence[int]
    ) -> None:
        super().__init__()
        self.student = student
        self.with_hidden = True
        width = student.shape.hidden
        self.projections = nn.ModuleDict(
            {str(level): nn.Linear(width, teacher_width, bias=False) for level in sorted(set(levels))}
            if width != teacher_width
            else {}
        )
        self._tap = RelationTap(student, relations) if relations else None

    def forward(self, batch: Batch) -> Output:
        """Logits, and with `with_hidden` projected hidden states and relations."""
        if self._tap is not None:
            self._tap.open = self.with_hidden
        said: Output = self.student(batch, with_hidden=self.with_hidden)
        kept = () if self._tap is None else tuple(map(batch.unpacked, self._tap.take()))
        if self._tap is not None:
            self._tap.open = False  # an evaluation asks the student alone, and no one takes
        if not self.with_hidden:
            return Output(self._with_unused_projections(said.logits))
        hidden = tuple(
            self.projections[str(level)](state) if str(level) in self.projections else state
            for level, state in enumerate(said.hidden)
        )
        return Output(said.logits, hidden, kept)

    def _with_unused_projections(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits. Data-parallel workers wait for every parameter's gradient: these get zeros."""
        for projection in self.projections.parameters():
            logits = logits + 0.0 * projection.sum()
        return logits
