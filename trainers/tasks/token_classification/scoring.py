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
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trainers.checkpoints.predictions import LabelCounts
from trainers.model_kinds.heads import IGNORED
from trainers.tasks.base import Carried, Judged, Observed
from trainers.tasks.token_classification import OUTSIDE

if TYPE_CHECKING:
    import torch

    from trainers.data.batches import Batch


_WORD = re.compile(r"\w+|[^\w\s]")

Span = tuple[int, int, str]  # First and past the last of the characters, or words, and the type
Numbers = npt.NDArray[np.int64]


def entities(tags: Sequence[str]) -> list[Span]:
    spans: list[Span] = []
    for place, tag in enumerate(tags):
        if tag.startswith("B-"):
            kind = tag[2:]
            end = place + 1
            while end < len(tags) and tags[end] == f"I-{kind}":
                end += 1
            spans.append((place, end, kind))
    return spans


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
    words: list[tuple[int, int]] = []
    for word in _WORD.finditer(text):
        inside = edges[bisect_left(edges, word.start() + 1) : bisect_left(edges, word.end())]
        cuts = [word.start(), *inside, word.end()]
        words.extend(pairwise(cuts))
    return words


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


class EntityScoring:
    """The likeliest tag of each word is the prediction; `O` for a word that the model does not see."""

    def __init__(
        self, tags: Numbers, counts: Numbers, seen: npt.NDArray[np.bool_], classes: Sequence[str]
    ) -> None:
        # Tags and whether a piece is in the example, of all words (W,); number of words of each text (N,).
        self._tags, self._counts, self._seen, self._classes = tags, counts, seen, classes
        self.units, ends = len(counts), np.cumsum(counts)[:-1]
        self._width = max([int(part.sum()) for part in np.split(seen, ends)], default=0)

    def observe(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns (B, W) the likeliest tag of each word that is seen, in order; -1 beyond the last."""
        from torch.nn import functional

        words = batch.labels != IGNORED
        order = (~words).byte().argsort(dim=1, stable=True)  # Words first, in their order.
        likeliest = logits.argmax(-1).gather(1, order).masked_fill(~words.gather(1, order), -1)
        missing = max(0, self._width - likeliest.shape[1])
        return functional.pad(likeliest, (0, missing), value=-1)[:, : self._width].float()

    def score(self, observed: Observed, carried: Carried | None = None) -> dict[str, float]:
        counts, right = EntityCounts(), 0
        for true, predicted in self._sentences(observed):
            counts.add(true, predicted)
            right += sum(ours == theirs for ours, theirs in zip(true, predicted, strict=True))
        return {**counts.scores(), "tag_accuracy": right / max(1, len(self._tags))}

    def judge(self, observed: Observed, carried: Carried) -> Judged:
        """Returns the tags, and each text's share of the F1: its first-order effect, by the delta method."""
        counts = EntityCounts()
        sentences = self._sentences(observed)
        hits = np.array([counts.add(true, predicted) for true, predicted in sentences], dtype=np.float64)
        f1, total = counts.scores()["entity_f1"], max(1.0, float(hits[:, 1].sum()))
        types = sorted(types_of(self._classes))
        return Judged(
            np.arange(len(sentences)),
            f1 + len(sentences) * (2.0 * hits[:, 0] - f1 * hits[:, 1]) / total,
            [predicted for _, predicted in sentences],
            [true for true, _ in sentences],
            LabelCounts(
                types,
                true=[counts.true[kind] for kind in types],
                predicted=[counts.predicted[kind] for kind in types],
                hits=[counts.hits[kind] for kind in types],
            ),
        )

    def _sentences(self, observed: Observed) -> list[tuple[list[str], list[str]]]:
        outside = self._classes.index(OUTSIDE)
        sentences: list[tuple[list[str], list[str]]] = []
        start = 0
        for row, count in zip(observed.astype(np.int64), self._counts.tolist(), strict=True):
            seen = self._seen[start : start + count]
            predicted = np.full(count, outside)
            predicted[seen] = row[: int(seen.sum())]
            true = self._tags[start : start + count]
            sentences.append(
                (
                    [self._classes[tag] for tag in true.tolist()],
                    [self._classes[tag] for tag in predicted.tolist()],
                )
            )
            start += count
        return sentences
