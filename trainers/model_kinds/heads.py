"""Heads of models. Imports no torch.

A head's `suffix` ends the names of transformers' classes with it, `predicts` is its output in words, and
`reads` the input of its logits.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

Reads = Literal["text", "tokens", "span", "guessed"]
"""Hidden states that logits are computed from, and how: of a text, of each token, or of guessed ones."""


@dataclass(frozen=True, slots=True)
class ClassHead:
    """Classes of a sequence, from the pooled first token: logits (B, C); any number each if `multi_label`."""

    suffix: ClassVar[str] = "ForSequenceClassification"
    predicts: ClassVar[str] = "classes of a sequence"
    reads: ClassVar[Reads] = "text"
    classes: tuple[str, ...]
    multi_label: bool = False


@dataclass(frozen=True, slots=True)
class NumberHead:
    """A number of a sequence, from the pooled first token: logits (B, 1), in the unit of the labels."""

    suffix: ClassVar[str] = "ForSequenceClassification"
    predicts: ClassVar[str] = "a number"
    reads: ClassVar[Reads] = "text"
    mean: float = 0.0  # Initial output
    scale: float = 1.0  # Power of two, factor of the output layer's result: its weights have no unit


@dataclass(frozen=True, slots=True)
class SpanHead:
    """A span of the sequence: logits (B, S, 2) of its first and its last token."""

    suffix: ClassVar[str] = "ForQuestionAnswering"
    predicts: ClassVar[str] = "spans of a text"
    reads: ClassVar[Reads] = "span"


@dataclass(frozen=True, slots=True)
class TokenHead:
    """Classes of each token: logits (B, S, C)."""

    suffix: ClassVar[str] = "ForTokenClassification"
    predicts: ClassVar[str] = "classes of tokens"
    reads: ClassVar[Reads] = "tokens"
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VocabularyHead:
    """A token of the vocabulary at each masked position: logits (M, V) of the M that are not `IGNORED`."""

    suffix: ClassVar[str] = "ForMaskedLM"
    predicts: ClassVar[str] = "masked tokens"
    reads: ClassVar[Reads] = "guessed"


Head = ClassHead | NumberHead | SpanHead | TokenHead | VocabularyHead
HEADS: tuple[type[Head], ...] = get_args(Head)

IGNORED = -100  # Label of a position from which nothing is learned


def logits_of(head: Head) -> int | None:
    """Logits of each sequence or token; None = as many as the vocabulary has pieces."""
    match head:
        case ClassHead() | TokenHead():
            return len(head.classes)
        case NumberHead():
            return 1
        case SpanHead():
            return 2
        case VocabularyHead():
            return None
