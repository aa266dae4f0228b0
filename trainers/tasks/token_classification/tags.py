"""BIO tags: from spans, to entities, and scores by the rules of seqeval in its strict mode. Imports no torch.

A `B-` begins an entity, and every `I-` of the same type right after it belongs to it (IOB2). An `I-` that
nothing of its type precedes belongs to no entity.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

OUTSIDE = "O"
_TAG = re.compile(r"[BI]-.+")
_WORD = re.compile(r"\w+|[^\w\s]")

Span = tuple[int, int, str]
"""First and past the last of the characters, or words, and the type."""


def entities(tags: Sequence[str]) -> list[Span]:
    found: list[Span] = []
    for place, tag in enumerate(tags):
        if tag.startswith("B-"):
            kind = tag[2:]
            end = place + 1
            while end < len(tags) and tags[end] == f"I-{kind}":
                end += 1
            found.append((place, end, kind))
    return found


def is_tag(text: str) -> bool:
    return text == OUTSIDE or _TAG.fullmatch(text) is not None


def repaired(tags: Sequence[str]) -> tuple[str, ...]:
    """Returns tags in which every entity begins with `B-`, unlike in older corpora (IOB1)."""
    fixed: list[str] = []
    for tag in tags:
        begins = tag.startswith("I-") and (not fixed or fixed[-1][2:] != tag[2:])
        fixed.append(f"B-{tag[2:]}" if begins else tag)
    return tuple(fixed)


def words_of(text: str, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Returns the words of a text: runs of letters and digits, and signs; edges of spans divide them."""
    edges = sorted({edge for start, end, _ in spans for edge in (start, end)})
    found: list[tuple[int, int]] = []
    for word in _WORD.finditer(text):
        inside = edges[bisect_left(edges, word.start() + 1) : bisect_left(edges, word.end())]
        cuts = [word.start(), *inside, word.end()]
        found.extend(pairwise(cuts))
    return found


def tags_of(words: Sequence[tuple[int, int]], spans: Sequence[Span]) -> tuple[str, ...]:
    tags = [OUTSIDE] * len(words)
    starts = [start for start, _ in words]
    for start, end, kind in spans:
        inside = range(bisect_left(starts, start), bisect_left(starts, end))
        for place in inside:
            tags[place] = f"{'B' if place == inside.start else 'I'}-{kind}"
    return tuple(tags)


@dataclass(slots=True)
class EntityCounts:
    """Numbers of true, predicted and correctly predicted entities, by type."""

    true: Counter[str] = field(default_factory=Counter)
    predicted: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)

    def add(self, true: Sequence[str], predicted: Sequence[str]) -> tuple[int, int]:
        """Adds a sentence; returns its hits, and its true and predicted entities together."""
        ours, theirs = set(entities(true)), set(entities(predicted))
        for counter, several in ((self.true, ours), (self.predicted, theirs), (self.hits, ours & theirs)):
            counter.update(kind for _, _, kind in several)
        return len(ours & theirs), len(ours) + len(theirs)

    def scores(self) -> dict[str, float]:
        """Returns precision, recall and F1 over all entities, and the mean F1 over types; 0 without any."""
        types = self.true.keys() | self.predicted.keys()
        each = [_f1(self.hits[kind], self.predicted[kind], self.true[kind]) for kind in types]
        hits, predicted, true = (counter.total() for counter in (self.hits, self.predicted, self.true))
        return {
            "entity_f1": _f1(hits, predicted, true),
            "entity_precision": hits / predicted if predicted else 0.0,
            "entity_recall": hits / true if true else 0.0,
            "entity_f1_macro": sum(each) / len(each) if each else 0.0,
        }


def types_of(tags: Iterable[str]) -> set[str]:
    return {tag[2:] for tag in tags if tag != OUTSIDE}


def _f1(hits: int, predicted: int, true: int) -> float:
    return 2 * hits / (predicted + true) if predicted + true else 0.0
