"""A student as a row of layers: its embeddings, its encoder layers, its head; and which a worker has.

Every worker builds the same student and then keeps its own layers. Their parameters keep their
names, so that a checkpoint is one model's, whichever worker has which layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from trainers.config import Parallel, require_layers
from trainers.data.batches import Batch
from trainers.device_kinds import kind_of
from trainers.errors import BadSpecError
from trainers.model_kinds.heads import VocabularyHead
from trainers.models.student import Student
from trainers.parallel.pipeline.partition import balanced

Apply = Callable[[torch.Tensor | None, Batch], torch.Tensor]
"""What a layer makes of the hidden states (B, S, H) of the one before; the first gets None."""


@dataclass(frozen=True)
class ModelLayer:
    """One of a model's layers.

    Attributes:
        apply: Its forward pass; of the head: logits.
        modules: Modules with its parameters.
        tied: Parameter shared with another layer; None = none.
    """

    apply: Apply
    modules: Sequence[nn.Module]
    tied: nn.Parameter | None = None

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones included."""
        return sum(parameter.numel() for part in self.modules for parameter in part.parameters())


@dataclass(frozen=True)
class Layout:
    """Assignment of layers to stages.

    Attributes:
        chunks: The layers of each chunk, by number, in order.
        places: The stage that has each chunk.
        ties: Numbers of the layers that share a parameter.
    """

    chunks: tuple[range, ...]
    places: tuple[int, ...]
    ties: tuple[int, ...] = ()

    def chunks_of(self, stage: int) -> list[int]:
        return [chunk for chunk, place in enumerate(self.places) if place == stage]

    def layers_of(self, stage: int) -> list[int]:
        return [layer for chunk in self.chunks_of(stage) for layer in self.chunks[chunk]]

    def tied_stages(self) -> list[int]:
        """Stages that have a copy of the tied parameter, the first one first; empty = one has all of it."""
        found = sorted({self._stage_of(layer) for layer in self.ties})
        return found if len(found) > 1 else []

    def _stage_of(self, layer: int) -> int:
        return next(self.places[number] for number, chunk in enumerate(self.chunks) if layer in chunk)


class ModelChunk(nn.Module):
    """Consecutive layers of a model."""

    def __init__(self, layers: Iterable[ModelLayer]) -> None:
        super().__init__()
        self._layers = tuple(layers)
        self.parts = nn.ModuleList(part for layer in self._layers for part in layer.modules)

    def forward(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """Returns hidden states (B, S, H) after these layers, or logits after the head."""
        for layer in self._layers:
            hidden = layer.apply(hidden, batch)
        assert hidden is not None
        return hidden


def layers_of(student: Student) -> tuple[ModelLayer, ...]:
    model, architecture = student.model, student.architecture
    embeddings = architecture.embeddings(model)
    table = model.get_input_embeddings().weight
    heads = [part for _, part in architecture.head_modules(model)]
    pooler = architecture.pooler(model)
    poolers = [] if pooler is None else [pooler]
    shares = isinstance(student.head, VocabularyHead) and any(
        parameter is table for part in heads for parameter in part.parameters()
    )

    def embed(_: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        return architecture.embed(model, batch)

    def head(hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        return student.logits(BaseModelOutput(last_hidden_state=hidden), batch)

    return (
        ModelLayer(embed, [*embeddings.values()], table if shares else None),
        *(ModelLayer(_encoder(student, layer), [layer]) for layer in architecture.layers(model)),
        ModelLayer(head, [*poolers, *heads], table if shares else None),
    )


def _encoder(student: Student, layer: nn.Module) -> Apply:
    def apply(hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        assert hidden is not None
        after: torch.Tensor = layer(
            hidden, **student.architecture.layer_arguments(hidden, batch, student.model.config)
        )
        return after

    return apply


def layout_for(parallel: Parallel, layers: Sequence[ModelLayer], costs: Sequence[float]) -> Layout:
    """Returns the layout of a pipeline; raises BadSpecError if there are more stages than layers."""
    try:
        require_layers(parallel, len(layers) - 2, "the model")
    except ValueError as error:
        raise BadSpecError(str(error)) from None
    stages, chunks = parallel.stage_count, parallel.chunks
    if parallel.schedule == "zero_bubble":
        # A V: the stage that begins a micro-batch also ends it.
        places = (*range(stages), *reversed(range(stages)))
    else:
        places = tuple(chunk % stages for chunk in range(chunks))
    ties = tuple(number for number, layer in enumerate(layers) if layer.tied is not None)
    return Layout(balanced(costs, chunks), places, ties)


def costs_of(parallel: Parallel, layers: Sequence[ModelLayer]) -> list[float]:
    """Returns what the partition balances; measured times come from `trainers.parallel.pipeline.timing`."""
    if parallel.partition == "parameters":
        return [float(layer.parameters) for layer in layers]
    return [0.0, *[1.0] * (len(layers) - 2), 0.0]


def keep(student: Student, layers: Collection[int]) -> None:
    """Removes all layers but these from a student, in place; the names of the others stay the same.

    A tied parameter stays if either of its layers does.
    """
    names, model, architecture = set(student.weights()), student.model, student.architecture
    encoder_layers = architecture.layers(model)
    last = len(encoder_layers) + 1
    tied = layers_of(student)[0].tied is not None
    if 0 not in layers:
        table = model.get_input_embeddings() if tied and last in layers else None
        for name, module in architecture.embeddings(model).items():
            if any(part is table for part in module.children()):
                _forget_all_but(table, module)
            else:
                setattr(student.encoder, name, nn.Identity())
    for number in range(1, last):
        if number not in layers:
            encoder_layers[number - 1] = nn.Identity()
    if last not in layers:
        if architecture.pooler(model) is not None:
            student.encoder.pooler = None
        for name, _ in architecture.head_modules(model):
            setattr(model, name, nn.Identity())
    student.absent = frozenset(names - set(student.weights()))


def _forget_all_but(kept: nn.Module | None, module: nn.Module) -> None:
    for name, part in module.named_children():
        if part is not kept:
            setattr(module, name, nn.Identity())


@dataclass(frozen=True)
class StagePartition:
    """The layers of a pipeline by stage; `own` are the numbers of this stage's."""

    layout: Layout
    own: Mapping[int, ModelLayer]

    @property
    def computes_loss(self) -> bool:
        return self.layout.chunks[-1][-1] in self.own

    @classmethod
    def of(
        cls, parallel: Parallel, student: Student, stage: int, costs: Sequence[float] | None = None
    ) -> StagePartition:
        """Partitions a whole student and removes the layers of other stages.

        Args:
            costs: Cost of each layer; None = the partition's own measure.

        Raises:
            BadSpecError: There are more stages than layers.
        """
        layers = layers_of(student)
        layout = layout_for(parallel, layers, costs_of(parallel, layers) if costs is None else costs)
        own = {number: layers[number] for number in layout.layers_of(stage)}
        keep(student, own)
        return cls(layout, own)


def sent_dtype(device: torch.device) -> torch.dtype:
    """Returns the format of hidden states between stages: autocast's, or fp32, which holds all.

    Under autocast the next layer's products round them to it in any case; only the residual is rounded
    where a stage ends. Every stage has the same answer. Called within the arithmetic's context.
    """
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.float32


def hidden_dtype(chunks: Iterable[nn.Module], device: torch.device) -> torch.dtype:
    """Returns the format of hidden states between layers: every layer ends in a LayerNorm.

    Called within the arithmetic's context.
    """
    norm = next((m for chunk in chunks for m in chunk.modules() if isinstance(m, nn.LayerNorm)), None)
    if kind_of(device).autocast_widens_norms and torch.is_autocast_enabled(device.type):
        return torch.float32
    if norm is None or type(norm) is not nn.LayerNorm:
        return torch.float32
    return norm.weight.dtype
