"""A student as a row of layers: its embeddings, its encoder layers, its head; and which a worker has.

Every worker builds the same student and then keeps its own layers. Their parameters keep their
names, so that a checkpoint is one model's, whichever worker has which layer.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Self

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from trainers.config import Parallel, RunConfig, require_layers
from trainers.data.batches import Batch
from trainers.data.segments import pack
from trainers.device_kinds import kind_of
from trainers.errors import BadSpecError
from trainers.model_kinds.encoders import ENCODERS
from trainers.model_kinds.heads import IGNORED, VocabularyHead
from trainers.models.precision import Arithmetic
from trainers.models.student import Student

Apply = Callable[[torch.Tensor | None, Batch], torch.Tensor]
"""What a layer makes of the hidden states (B, S, H) of the one before; the first gets None."""
_ROUNDS = 3  # Each layer's least time counts: what disturbs a measurement only adds to it
_GUESSED = 7  # One in so many tokens is to be guessed, as masks have it


@dataclass(frozen=True)
class ModelLayer:
    apply: Apply  # Its forward pass; of the head: logits
    modules: Sequence[nn.Module]  # Modules with its parameters
    tied: nn.Parameter | None = None  # Parameter shared with another layer; None = none

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones included."""
        return sum(parameter.numel() for part in self.modules for parameter in part.parameters())


@dataclass(frozen=True)
class Layout:
    chunks: tuple[range, ...]  # The layers of each chunk, by number, in order
    places: tuple[int, ...]  # The stage that has each chunk
    ties: tuple[int, ...] = ()  # Numbers of the layers that share a parameter

    def chunks_of(self, stage: int) -> list[int]:
        return [chunk for chunk, place in enumerate(self.places) if place == stage]

    def layers_of(self, stage: int) -> list[int]:
        return [layer for chunk in self.chunks_of(stage) for layer in self.chunks[chunk]]

    def tied_stages(self) -> list[int]:
        """Stages that have a copy of the tied parameter, the first one first; empty = one has all of it."""
        chunks = zip(self.chunks, self.places, strict=True)
        found = sorted({place for chunk, place in chunks if not set(chunk).isdisjoint(self.ties)})
        return found if len(found) > 1 else []


class ModelChunk(nn.Module):
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


def keep(student: Student, layers: Collection[int]) -> None:
    """Removes other layers in place; a tied parameter stays if either of its layers does."""
    names, model, architecture = set(student.weights()), student.model, student.architecture
    encoder_layers = architecture.layers(model)
    last = len(encoder_layers) + 1
    tied = layers_of(student)[0].tied is not None
    if 0 not in layers:
        table = model.get_input_embeddings() if tied and last in layers else None
        for name, module in architecture.embeddings(model).items():
            if any(part is table for part in module.children()):
                for other, part in module.named_children():
                    if part is not table:
                        setattr(module, other, nn.Identity())
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
    ) -> Self:
        """Partitions a whole student by `costs` of its layers and removes those of other stages.

        None = the partition's own measure. Raises BadSpecError if there are more stages than layers.
        """
        layers = layers_of(student)
        if costs is None and parallel.partition == "parameters":
            costs = [float(layer.parameters) for layer in layers]
        layout = layout_for(parallel, layers, costs or [0.0, *[1.0] * (len(layers) - 2), 0.0])
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
    """Format of hidden states between layers, each ending in a LayerNorm; within the arithmetic's context."""
    norm = next((m for chunk in chunks for m in chunk.modules() if isinstance(m, nn.LayerNorm)), None)
    if kind_of(device).autocast_widens_norms and torch.is_autocast_enabled(device.type):
        return torch.float32
    if norm is None or type(norm) is not nn.LayerNorm:
        return torch.float32
    return norm.weight.dtype


def balanced(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """Returns the layers of each stage, such that the most costly stage costs as little as possible.

    Exact: of the partitions with the smallest largest stage, the one with the smallest sum of
    squares; if that is equal too, stages are filled from the front. Raises ValueError.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot fill {stages} stages; use 1 to {len(costs)} stages")
    if not all(0.0 <= cost < float("inf") for cost in costs):
        raise ValueError(f"layer costs must be finite and not negative: {list(costs)}")
    before = [0.0, *accumulate(costs)]

    def cost(start: int, stop: int) -> float:
        return before[stop] - before[start]

    # Both of the first `stop` layers in so many stages.
    @cache
    def bottleneck(stop: int, stages: int) -> float:
        if stages == 1:
            return cost(0, stop)
        starts = range(stages - 1, stop)
        return min(max(bottleneck(start, stages - 1), cost(start, stop)) for start in starts)

    limit = bottleneck(len(costs), stages)

    @cache
    def best(stop: int, stages: int) -> tuple[float, tuple[range, ...]]:
        if stages == 1:
            return (cost(0, stop) ** 2 if cost(0, stop) <= limit else float("inf")), (range(stop),)
        least: tuple[float, tuple[range, ...]] = float("inf"), ()
        # From the shortest last stage to the longest: where squares are equal the front has more.
        for start in reversed(range(stages - 1, stop)):
            if cost(start, stop) > limit:
                break
            squares, front = best(start, stages - 1)
            if squares + cost(start, stop) ** 2 < least[0]:
                least = squares + cost(start, stop) ** 2, (*front, range(start, stop))
        return least

    return best(len(costs), stages)[1]


def measure(student: Student, config: RunConfig, device: torch.device, arithmetic: Arithmetic) -> list[float]:
    """Returns seconds of each layer's passes over the longest micro-batch; draws random numbers."""
    batch = _batch(student, config.micro_size, config.task.max_length)
    if ENCODERS[config.model.encoder].packs:
        batch = pack(batch, pad_id=0, multiple=kind_of(device).width_multiple)
    batch = batch.to(device)
    width = student.shape.hidden
    student.train()
    least = []
    for number, layer in enumerate(layers_of(student)):
        hidden = torch.randn((*batch.computed_shape, width), device=device) if number else None
        least.append(min(_seconds(layer, hidden, batch, device, arithmetic) for _ in range(_ROUNDS)))
    student.zero_grad(set_to_none=True)
    return least


def _seconds(
    layer: ModelLayer, hidden: torch.Tensor | None, batch: Batch, device: torch.device, arithmetic: Arithmetic
) -> float:
    leaf = None if hidden is None else hidden.detach().requires_grad_()
    kind_of(device).backend.synchronize(device)
    began_s = time.perf_counter()
    with arithmetic.context():
        after = layer.apply(leaf, batch)
    after.float().square().sum().backward()  # type: ignore[no-untyped-call]
    kind_of(device).backend.synchronize(device)
    return time.perf_counter() - began_s


def _batch(student: Student, examples: int, length: int) -> Batch:
    tokens = torch.arange(examples * length).reshape(examples, length)
    labels = torch.zeros(examples, dtype=torch.int64)
    guessed = None
    if isinstance(student.head, VocabularyHead):
        labels = torch.where(tokens % _GUESSED == 0, 0, IGNORED)
        guessed = torch.arange(0, tokens.numel(), _GUESSED)
    ids = tokens % int(student.model.config.vocab_size)
    rows = torch.arange(examples)
    return Batch(ids, None, None, labels, rows, examples, tokens.numel(), tokens.numel(), guessed=guessed)
