"""Tags of words. BIO tags become entities, and scores, by the rules of seqeval in its strict mode (IOB2).

A `B-` begins an entity, and every `I-` of the same type right after it belongs to it. An `I-` that nothing of
its type precedes belongs to no entity.
"""

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainers.checkpoints.predictions import LabelCounts
from trainers.config import TaskConfig
from trainers.data.encoding import ends_of, token_dtype
from trainers.data.formats import Row
from trainers.data.layouts import TRAIN
from trainers.data.tokens import TokenSet
from trainers.errors import BadDataError
from trainers.model_kinds.heads import IGNORED, TokenHead
from trainers.tasks.base import Carried, Facts, Judged, Observed, Parts, Scoring
from trainers.tasks.dataset import DatasetTask, Tokenising, require_known
from trainers.tasks.scores import Batch, Tensor, cross_entropies
from trainers.tasks.token_classification import OUTSIDE, TagFields, is_tag

_CHUNK = 1024
_WORD = re.compile(r"\w+|[^\w\s]")

Span = tuple[int, int, str]  # First and past the last of the characters, or words, and the type
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tagged:
    texts: tuple[str]
    words: tuple[tuple[int, int], ...]  # Each word's characters in the text
    tags: tuple[str, ...]

    @property
    def stratum(self) -> int:
        return int(any(tag != OUTSIDE for tag in self.tags))


class TokenClassification(DatasetTask[Tagged, TokenHead]):
    """A tag of each word, which its first piece learns; further pieces of a word learn nothing."""

    def settings(self, task: TaskConfig) -> Facts:
        return {"labels": json.dumps(task.own(TagFields).labels)}

    def example(self, row: Row, task: TaskConfig) -> Tagged:
        if row.fields.get("tokens") is None and row.fields.get("text") is not None:
            return _of_spans(row)
        return _of_tags(row, task.own(TagFields).labels)

    def draw(self, parts: Parts[Tagged], task: TaskConfig) -> dict[str, list[Tagged]]:
        known = types_of(chain.from_iterable(one.tags for one in parts[TRAIN]))
        for part, examples in parts.items():
            types = types_of(chain.from_iterable(one.tags for one in examples))
            require_known(part, types, known, "remove its tags")
        return super().draw(parts, task)

    def stand_in(self, row: Row, head: TokenHead, task: TaskConfig) -> Mapping[str, Any] | None:
        name = "tags" if row.fields.get("tokens") is not None else "spans"
        if not row.lacks(name):
            return None
        return {name: [OUTSIDE] * len(row.values("tokens")) if name == "tags" else self.any_truth(head, task)}

    def any_truth(self, head: TokenHead, task: TaskConfig) -> list[Any]:
        return []

    def head(self, parts: Parts[Tagged], chosen: Parts[Tagged], task: TaskConfig) -> TokenHead:
        known = types_of(chain.from_iterable(one.tags for one in parts[TRAIN]))
        every = (OUTSIDE, *(f"{prefix}-{kind}" for kind in sorted(known) for prefix in "BI"))
        return TokenHead(tuple(dict.fromkeys((*(task.own(TagFields).labels or ()), *every))))

    def review(self, parts: Parts[Tagged], head: TokenHead, task: TaskConfig) -> Iterator[str]:
        for part, examples in parts.items():
            if not any(one.stratum for one in examples):
                line = f"{part}: no example ({len(examples)}) has an entity"
                if part == TRAIN:
                    raise BadDataError(f"{line}, so there is nothing to learn; add examples with entities")
                yield f"{line}: its scores mean little"

    def tokenise(self, examples: Sequence[Tagged], head: TokenHead, by: Tokenising) -> TokenSet:
        """Returns labels of tokens, and the flat columns `tag`, `words` and `seen` that scoring needs."""
        tokenizer = by.tokenizer
        tokenizer.no_padding()
        tokenizer.enable_truncation(by.task.max_length)
        numbers = {name: number for number, name in enumerate(head.classes)}
        dtype = token_dtype(tokenizer)
        tokens: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        seen: list[np.ndarray] = []
        cut: list[bool] = []
        for start in range(0, len(examples), _CHUNK):
            chunk = examples[start : start + _CHUNK]
            for one, encoded in zip(
                chunk, tokenizer.encode_batch([one.texts[0] for one in chunk]), strict=True
            ):
                first = first_pieces(one.words, encoded.offsets)
                inside = first >= 0
                of_tokens = np.full(len(encoded.ids), IGNORED, dtype=np.int64)
                tags = np.array([numbers[tag] for tag in one.tags], dtype=np.int64)
                of_tokens[first[inside]] = tags[inside]
                tokens.append(np.array(encoded.ids, dtype=dtype))
                labels.append(of_tokens)
                seen.append(inside)
                cut.append(bool(encoded.overflowing))
            by.progress(start + len(chunk))
        return TokenSet(
            np.concatenate(tokens),
            ends_of(np.array([len(of_tokens) for of_tokens in labels])),
            np.empty((len(examples), 0), dtype=np.int64),
            columns={
                "cut": np.array(cut),
                "tag": np.array([numbers[tag] for one in examples for tag in one.tags], dtype=np.int64),
                "words": np.array([len(one.words) for one in examples], dtype=np.int64),
                "seen": np.concatenate(seen),
            },
            token_labels=np.concatenate(labels),
        )

    def scoring(self, tokens: TokenSet, head: TokenHead, task: TaskConfig, gold: Path) -> Scoring:
        columns = tokens.columns
        return EntityScoring(columns["tag"], columns["words"], columns["seen"], head.classes)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns the cross-entropy, the mean over each text's words, summed over texts."""
        # Flat: of logits in more dimensions the loss has no deterministic kernel on a GPU.
        each = cross_entropies(logits.flatten(0, 1), batch.labels.flatten(), self.cross_entropy)
        of_texts = each.view_as(batch.labels).sum(1)
        return (of_texts / (batch.labels != IGNORED).sum(1).clamp(min=1)).sum()


def first_pieces(words: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """(W,) the first piece of each word, by its last character (spaces may belong to it); -1 = none.

    Special tokens are at no character, and so in no word.
    """
    starts = np.array([start for start, _ in words], dtype=np.int64)
    ends = np.array([end for _, end in words], dtype=np.int64)
    last = np.array([end for _, end in offsets], dtype=np.int64) - 1
    of_piece = np.searchsorted(starts, last, side="right") - 1
    first = np.full(len(words), -1, dtype=np.int64)
    for piece in range(len(offsets) - 1, -1, -1):
        word = of_piece[piece]
        if word >= 0 and last[piece] < ends[word]:
            first[word] = piece
    return first


def _of_tags(row: Row, labels: Sequence[str] | None) -> Tagged:
    tokens, tags = row.values("tokens"), row.values("tags")
    if len(tokens) != len(tags):
        raise row.refusal("tags", f"{len(tags)} tags for {len(tokens)} tokens; give each token one tag")
    if not tokens:
        raise row.refusal("tokens", "empty; remove the row or fill it")
    for token in tokens:
        if not isinstance(token, str):
            raise row.refusal("tokens", f"{str(token)[:80]!r} is a {type(token).__name__}, not a string")
    text = Row({"tokens": " ".join(tokens)}, row.where, row.columns).text("tokens")
    edges = pairwise(accumulate((len(token) + 1 for token in tokens), initial=0))
    words = tuple((start, end - 1) for start, end in edges)
    return Tagged((text,), words, repaired([_tag(tag, row, labels) for tag in tags]))


def _tag(written: Any, row: Row, labels: Sequence[str] | None) -> str:
    name = str(written).strip()
    if labels is not None and name not in labels:
        if name.isascii() and name.isdigit() and int(name) < len(labels):
            return labels[int(name)]
        raise row.refusal("tags", f"unknown tag {name[:80]!r}; use one of {', '.join(labels[:20])}")
    if not is_tag(name):
        fix = "set task.labels to the tags in their order" if name.isdigit() else "convert the tags to BIO"
        raise row.refusal("tags", f"{name[:80]!r} is not O, B-<label> or I-<label>; {fix}")
    return name


def _of_spans(row: Row) -> Tagged:
    text = row.text("text")
    spans = sorted(_span(one, text, row) for one in row.values("spans"))
    for (_, end, kind), (start, _, other) in pairwise(spans):
        if start < end:
            raise row.refusal(
                "spans", f"{kind} up to {end} and {other} from {start} overlap; keep one of the two"
            )
    words = words_of(text, spans)
    return Tagged((text,), tuple(words), tags_of(words, spans))


def _span(one: Any, text: str, row: Row) -> Span:
    if not isinstance(one, dict) or not {"start", "end", "label"} <= one.keys():
        raise row.refusal("spans", f"{str(one)[:80]} is not an object with start, end and label")
    start, end, kind = one["start"], one["end"], str(one["label"]).strip()
    if type(start) is not int or type(end) is not int or not 0 <= start < end <= len(text):
        raise row.refusal(
            "spans",
            f"{kind} from {start} to {end} is outside the text of {len(text)} characters; count from 0, end "
            "exclusive",
        )
    if not kind or not text[start:end].strip():
        raise row.refusal("spans", f"{start} to {end} has no label or holds only white space; remove it")
    return start, end, kind


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

    def observe(self, logits: Tensor, batch: Batch) -> Tensor:
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
