"""Counted arithmetic of a BERT: multiplications and additions of its matrix products, by layer.

Counted for real tokens: what padding costs is a loss, not work. Everything besides matrix products
(LayerNorm, softmax, GELU, dropout, embeddings' look-up, the optimizer) is left out, as is usual
for MFU; of BERT-base at length 512 it is under one percent of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainers.models.families import FAMILIES
from trainers.models.heads import Head, logits_of

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig

    from trainers.data.batches import Batch

BACKWARD = 2.0
"""Backward by forward: each product needs one for the gradient of each of its two operands."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What the arithmetic of a batch depends on.

    Attributes:
        sequences: examples that count.
        tokens: sum of their lengths.
        squares: sum of their squared lengths: attention compares each token with each.
        guessed: positions to be guessed, for a vocabulary head.
    """

    sequences: int = 0
    tokens: int = 0
    squares: int = 0
    guessed: int = 0


def tally(batches: Iterable[Batch]) -> Tally:
    """Counts micro-batches that lie on the CPU; one that stands in for a missing share is empty."""
    each = [_tally(batch) for batch in batches if batch.examples]
    return Tally(
        sum(one.sequences for one in each),
        sum(one.tokens for one in each),
        sum(one.squares for one in each),
        sum(one.guessed for one in each),
    )


def _tally(batch: Batch) -> Tally:
    rows, width = batch.input_ids.shape
    if batch.attention_mask is None:
        squares = rows * width * width
    else:
        lengths = batch.attention_mask.sum(1)
        squares = int((lengths * lengths).sum())
    guessed = 0 if batch.guessed is None else len(batch.guessed)
    return Tally(batch.examples, batch.tokens, squares, guessed)


@dataclass(frozen=True, slots=True)
class FlopCount:
    """Floating point operations of one model with its head.

    Attributes:
        layers: encoder layers L.
        hidden: size H.
        feed_forward: inner size F of a layer's two Linears.
        vocabulary: pieces V.
        head: Head of the model; None = no head is computed.
    """

    layers: int
    hidden: int
    feed_forward: int
    vocabulary: int
    head: Head | None

    def encoder(self, counted: Tally) -> float:
        """Forward of all layers: L [2S(4H^2 + 2HF) + 4 S^2 H] per sequence of S tokens."""
        linear = 2.0 * counted.tokens * (4 * self.hidden**2 + 2 * self.hidden * self.feed_forward)
        attention = 4.0 * counted.squares * self.hidden
        return self.layers * (linear + attention)

    def ending(self, counted: Tally) -> float:
        """Forward of the head: of the first token, of every token, or of the guessed ones."""
        if self.head is None:
            return 0.0
        logits = logits_of(self.head)
        if logits is None:
            return 2.0 * counted.guessed * (self.hidden**2 + self.hidden * self.vocabulary)
        if self.head.reads == "text":
            return 2.0 * counted.sequences * (self.hidden**2 + self.hidden * logits)
        return 2.0 * counted.tokens * self.hidden * logits

    def forward(self, counted: Tally) -> float:
        """Returns one forward pass."""
        return self.encoder(counted) + self.ending(counted)

    def training(self, counted: Tally) -> float:
        """Forwards and backward; BERT-base does 67 / 138 / 212 / 290 GF at S = 128 / 256 / 384 / 512."""
        return (1.0 + BACKWARD) * self.forward(counted)


def flop_count_of(config: PreTrainedConfig, head: Head | None) -> FlopCount:
    """Returns the floating point operations of a model.

    Args:
        config: Configuration of the model.
        head: Head of the model; None = no head is computed.
    """
    family = FAMILIES[config.model_type]
    return FlopCount(
        layers=getattr(config, family.layer_count),
        hidden=getattr(config, family.hidden_size),
        feed_forward=getattr(config, family.feed_forward),
        vocabulary=config.vocab_size,
        head=head,
    )
