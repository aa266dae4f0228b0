"""A student with maps to its teacher's width, and taps of queries, keys and values."""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from trainers.data.batches import Batch
from trainers.models.student import Output, Student


class RelationTap:
    """Holds queries, keys and values of some layers, 0-based and perhaps repeated, of passes while `open`.

    They are the outputs of the layer's linear maps (one map for all three gives them one after the other), so
    the layer's own attention stays a fused kernel that never writes down its scores.
    """

    def __init__(self, model: Student, layers: Sequence[int]) -> None:
        self._outputs: dict[tuple[int, str], torch.Tensor] = {}
        self._maps, self._layers = model.architecture.family.relations, tuple(layers)
        self.open = False
        for layer in sorted(set(layers)):
            tapped = model.architecture.layers(model.model)[layer]
            for name in self._maps:
                tapped.get_submodule(name).register_forward_hook(partial(self._hold, layer, name))

    def take(self) -> tuple[torch.Tensor, ...]:
        """Returns and releases queries, keys and values (B, S, H) of each layer, of the last such pass."""
        outputs, self._outputs = self._outputs, {}
        states: list[torch.Tensor] = []
        for layer in self._layers if outputs else ():
            maps = [outputs[layer, name] for name in self._maps]
            states += maps[0].chunk(3, dim=-1) if len(maps) == 1 else maps
        return tuple(states)

    def _hold(self, layer: int, name: str, _module: nn.Module, _in: object, output: torch.Tensor) -> None:
        if self.open:
            self._outputs[layer, name] = output


class ProjectedStudent(nn.Module):
    """A student whose hidden states come in its teacher's width; evaluation and model folders use it alone.

    If widths differ, each of the compared `levels` of hidden states has a linear map of its own (FitNets,
    arXiv 1412.6550; TinyBERT, arXiv 1909.10351, equation 8), which is trained with the student and discarded
    with the run. `relations` are the layers whose queries, keys and values are compared, 0-based.
    """

    def __init__(
        self, student: Student, teacher_width: int, *, levels: Iterable[int], relations: Sequence[int]
    ) -> None:
        super().__init__()
        self.student = student
        self.with_hidden = True  # Whether the next forward passes give more than logits
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
        output: Output = self.student(batch, with_hidden=self.with_hidden)
        relations: tuple[torch.Tensor, ...] = ()
        if self._tap is not None:
            relations = tuple(map(batch.unpacked, self._tap.take()))
            self._tap.open = False  # an evaluation calls the student alone, and never takes
        if not self.with_hidden:
            # Data-parallel workers wait for every parameter's gradient: those of projections are zeros.
            unused = (0.0 * projection.sum() for projection in self.projections.parameters())
            return Output(sum(unused, output.logits))
        hidden = tuple(
            self.projections[str(level)](state) if str(level) in self.projections else state
            for level, state in enumerate(output.hidden)
        )
        return Output(output.logits, hidden, relations)
