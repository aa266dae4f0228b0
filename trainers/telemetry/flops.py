"""Counted arithmetic of a model: multiplications and additions of its matrix products, by layer.

Counted for real tokens: padding is a loss, not work. Everything besides matrix products
(LayerNorm, softmax, GELU, dropout, embeddings' look-up, the optimizer) is left out, as is usual
for MFU; of BERT-base at length 512 it is under one percent of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trainers.model_kinds.families import EMBEDDINGS, FAMILIES, FamilyInfo
from trainers.model_kinds.heads import Head, logits_of

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig

    from trainers.data.batches import Batch

BACKWARD = 2.0  # Backward by forward: each product needs one for the gradient of each of its two operands

Shapes = tuple[tuple[int, ...], ...]  # Shapes of parameters, in the order of the backward pass


@dataclass(frozen=True, slots=True)
class Tally:
    sequences: int = 0  # Examples that count
    tokens: int = 0  # Sum of their lengths
    squares: int = 0  # Sum of their squared lengths: attention compares each token with each
    guessed: int = 0  # Positions to be guessed, for a vocabulary head
    lengths: tuple[int, ...] = field(default=(), compare=False)  # Tokens of each, for attention in a window
    passes: int = field(default=1, compare=False)  # Micro-batches, for products whatever their size

    @classmethod
    def full(cls, examples: int, length: int) -> Tally:
        return cls(examples, examples * length, examples * length**2, 0, (length,) * examples)

    def pairs_within(self, window: int) -> int:
        """Returns the pairs of tokens of one example that are at most `window` apart."""
        return sum(
            length**2 if window >= length else length * (2 * window + 1) - window * (window + 1)
            for length in self.lengths
        )


def tally(batches: Iterable[Batch]) -> Tally:
    each = [_tally(batch) for batch in batches if batch.examples]
    return Tally(
        sum(one.sequences for one in each),
        sum(one.tokens for one in each),
        sum(one.squares for one in each),
        sum(one.guessed for one in each),
        tuple(length for one in each for length in one.lengths),
        len(each),
    )


def _tally(batch: Batch) -> Tally:
    rows, width = batch.input_ids.shape
    mask = batch.attention_mask
    lengths: list[int] = [width] * rows if mask is None else mask.sum(1).tolist()
    del lengths[batch.examples :]  # Stand-ins of a static shape.
    squares = sum(length * length for length in lengths)
    guessed = 0 if batch.guessed is None else len(batch.guessed)
    return Tally(batch.examples, batch.tokens, squares, guessed, tuple(lengths))


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Floating point operations of one model with its head.

    In disentangled attention each token is compared with keys of `relative_positions`, and queries likewise.
    """

    layers: int  # Encoder layers L
    hidden: int  # Size H
    feed_forward: int  # Inner size F of a layer's two Linears
    vocabulary: int  # Pieces V
    head: Head | None  # None = no head is computed
    gated: bool = False  # A layer has a third Linear, whose output gates the first one's (GLU)
    windowed_layers: int = 0  # Layers that attend within a window only
    window: int = 0  # Tokens on each side that these attend to
    relative_positions: int = 0
    relative_terms: int = 2  # 2 = both, 1 = one of them
    embedding: int | None = None  # Size E of embeddings that are projected to H; None = H
    dense_tokens: bool = False  # A head for tokens has a Linear (H, H) before its output
    frozen: tuple[int | str, ...] = ()  # Parts that are not trained, as in `model.frozen`

    def encoder(self, counted: Tally) -> float:
        """Forward of all layers: L [2S(4H^2 + 2HF) + 4 S^2 H] per sequence of S tokens.

        A gated layer has 3HF; one with a window W has 4 S (2W + 1) H for its attention, less at the ends.
        Each term of disentangled attention adds 2 S P H for P positions, and 2 P H^2 per micro-batch.
        """
        pairs = (self.layers - self.windowed_layers) * counted.squares
        if self.windowed_layers:
            pairs += self.windowed_layers * counted.pairs_within(self.window)
        relative = 2.0 * self.relative_positions * self.relative_terms * self.hidden
        return (
            2.0 * counted.tokens * self.layers * self._weights
            + 4.0 * pairs * self.hidden
            + self.layers * relative * (counted.tokens + counted.passes * self.hidden)
            + self._projection(counted)
        )

    @property
    def _weights(self) -> int:
        return 4 * self.hidden**2 + (3 if self.gated else 2) * self.hidden * self.feed_forward

    def _projection(self, counted: Tally) -> float:
        return 2.0 * counted.tokens * self.hidden * (self.embedding or 0)

    def ending(self, counted: Tally) -> float:
        """Forward of the head: of the first token, of every token, or of the guessed ones."""
        if self.head is None:
            return 0.0
        logits = logits_of(self.head)
        if logits is None:
            return 2.0 * counted.guessed * (self.embedding or self.hidden) * (self.hidden + self.vocabulary)
        if self.head.reads == "text":
            return 2.0 * counted.sequences * (self.hidden**2 + self.hidden * logits)
        dense = self.hidden if self.dense_tokens else 0
        return 2.0 * counted.tokens * self.hidden * (dense + logits)

    def forward(self, counted: Tally) -> float:
        return self.encoder(counted) + self.ending(counted)

    def training(self, counted: Tally) -> float:
        """Forward and backward; BERT-base does 67 / 138 / 212 / 290 GF at S = 128 / 256 / 384 / 512."""
        return (1.0 + BACKWARD) * self.forward(counted) - self._spared(counted)

    def with_frozen(self, frozen: Sequence[int | str]) -> FlopCount:
        return replace(self, frozen=tuple(frozen))

    def _spared(self, counted: Tally) -> float:
        """Backward products that a model with frozen parts does not need.

        These are the weights' gradients of frozen parts, and all gradients below the lowest trained part.
        Layers count as equal, whatever their windows.
        """
        if not self.frozen:
            return 0.0
        layers, embeddings = {*range(self.layers)} & {*self.frozen}, EMBEDDINGS in self.frozen
        lowest = min({*range(self.layers)} - layers, default=self.layers) if embeddings else 0
        projection = self._projection(counted)
        per_layer = (self.encoder(counted) - projection) / self.layers
        spared = BACKWARD * per_layer * lowest
        spared += 2.0 * counted.tokens * self._weights * len(layers - {*range(lowest)})
        if embeddings:
            spared += BACKWARD * projection
            if lowest < self.layers:  # Nothing needs the gradient of the lowest trained layer's input.
                spared += 2.0 * counted.tokens * 3 * self.hidden**2
            if self.head is not None and logits_of(self.head) is None:  # Its output layer is the table.
                spared += 2.0 * counted.guessed * (self.embedding or self.hidden) * self.vocabulary
        return spared


def flop_count(family: FamilyInfo, fields: Mapping[str, Any], head: Head | None = None) -> FlopCount:
    return FlopCount(head=head, **family.arithmetic(fields))


def flop_count_of(config: PreTrainedConfig, head: Head | None) -> FlopCount:
    return flop_count(FAMILIES[config.model_type], config.to_dict(), head)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's arithmetic and size depend on: parameters before, in and after the layers."""

    flop_count: FlopCount  # Its arithmetic, with a head of two classes
    embeddings: Shapes
    layers: tuple[Shapes, ...]  # Parameters of each layer, the first one first
    head: Shapes

    def with_layers(self, chosen: Sequence[int]) -> ModelShape:
        flop_count = replace(self.flop_count, layers=len(chosen))
        return replace(self, flop_count=flop_count, layers=tuple(self.layers[number] for number in chosen))
