"""What a model ends in. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClassHead:
    """Classes of a sequence, from the pooled first token: logits (B, C).

    Attributes:
        classes: names of the C classes, by number.
        multi_label: any number of classes per sequence, each decided for itself.
    """

    classes: tuple[str, ...]
    multi_label: bool = False


@dataclass(frozen=True, slots=True)
class SpanHead:
    """A span of the sequence: logits (B, S, 2) of its first and its last token."""


@dataclass(frozen=True, slots=True)
class VocabularyHead:
    """A token of the vocabulary at each position to be guessed: logits (M, V).

    M counts the positions whose label is not `IGNORED`, in the order of the flattened batch:
    no other position's logits are computed.
    """


Head = ClassHead | SpanHead | VocabularyHead

IGNORED = -100
"""Label of a position that is not to be guessed."""
