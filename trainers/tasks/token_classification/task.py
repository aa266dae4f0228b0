from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer
from typing_extensions import override

from trainers.config import Task as TaskConfig
from trainers.data.encoding import ends_of, token_dtype
from trainers.data.formats import Row
from trainers.data.layouts import TRAIN
from trainers.data.tokens import Framed, TokenSet, frame_of, framed
from trainers.errors import BadDataError
from trainers.model_kinds.heads import IGNORED, TokenHead
from trainers.tasks.base import Facts, Parts, Progress, Scoring
from trainers.tasks.dataset import DatasetTask, require_known
from trainers.tasks.scores import cross_entropies
from trainers.tasks.token_classification import OUTSIDE, TagFields, is_tag
from trainers.tasks.token_classification.scoring import (
    EntityScoring,
    Span,
    repaired,
    tags_of,
    types_of,
    words_of,
)

if TYPE_CHECKING:
    import torch

    from trainers.data.batches import Batch

_CLASSES = "tags.json"
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Tagged:
    texts: tuple[str]
    words: tuple[tuple[int, int], ...]  # Each word's characters in the text
    tags: tuple[str, ...]
    classes: tuple[str, ...] = ()  # Names of all tags, by number; empty until all parts have been read

    @property
    def stratum(self) -> int:
        return int(any(tag != OUTSIDE for tag in self.tags))


class TokenClassification(DatasetTask[Tagged]):
    """A tag of each word, which its first piece learns; further pieces of a word learn nothing."""

    def settings(self, task: TaskConfig) -> Facts:
        return {"labels": json.dumps(task.own(TagFields).labels)}

    def example(self, row: Row, task: TaskConfig) -> Tagged:
        if row.fields.get("tokens") is None and row.fields.get("text") is not None:
            return _of_spans(row)
        return _of_tags(row, task.own(TagFields).labels)

    @override
    def draw(self, parts: Parts[Tagged], task: TaskConfig) -> dict[str, list[Tagged]]:
        known = types_of(chain.from_iterable(one.tags for one in parts[TRAIN]))
        for part, examples in parts.items():
            types = types_of(chain.from_iterable(one.tags for one in examples))
            require_known(part, types, known, "remove its tags")
        every = (OUTSIDE, *(f"{prefix}-{kind}" for kind in sorted(known) for prefix in "BI"))
        classes = tuple(dict.fromkeys((*(task.own(TagFields).labels or ()), *every)))
        return {
            part: [replace(one, classes=classes) for one in chosen]
            for part, chosen in super().draw(parts, task).items()
        }

    @override
    def review(self, parts: Parts[Tagged], task: TaskConfig) -> Iterator[str]:
        for part, examples in parts.items():
            if not any(one.stratum for one in examples):
                line = f"{part}: no example ({len(examples)}) has an entity"
                if part == TRAIN:
                    raise BadDataError(f"{line}, so there is nothing to learn; add examples with entities")
                yield f"{line}: its scores mean little"

    def tokenise(
        self, examples: Sequence[Tagged], tokenizer: Tokenizer, task: TaskConfig, progress: Progress
    ) -> TokenSet:
        """Returns labels of tokens, and the flat columns `tag`, `words` and `seen` that scoring needs."""
        tokenizer.no_padding()
        tokenizer.no_truncation()
        numbers = {name: number for number, name in enumerate(examples[0].classes)}
        frame = frame_of(tokenizer, pairs=False)
        before, specials = len(frame[0]), sum(map(len, frame))
        chunks: list[Framed] = []
        labels: list[np.ndarray] = []
        seen: list[np.ndarray] = []
        for start in range(0, len(examples), _CHUNK):
            chunk = examples[start : start + _CHUNK]
            encoded = tokenizer.encode_batch([one.texts[0] for one in chunk], add_special_tokens=False)
            counts = np.array([len(one.ids) for one in encoded], dtype=np.int64)
            ids = np.fromiter(
                chain.from_iterable(one.ids for one in encoded), token_dtype(tokenizer), int(counts.sum())
            )
            chunks.append(framed(frame, [(ids, counts)], task.max_length))
            for one, pieces, length in zip(chunk, encoded, chunks[-1].lengths.tolist(), strict=True):
                room = length - specials
                first = first_pieces(one.words, pieces.offsets)
                inside = (first >= 0) & (first < room)
                of_tokens = np.full(length, IGNORED, dtype=np.int64)
                tags = np.array([numbers[tag] for tag in one.tags], dtype=np.int64)
                of_tokens[before + first[inside]] = tags[inside]
                labels.append(of_tokens)
                seen.append(inside)
            progress(start + len(chunk))
        whole = Framed.joined(chunks)
        return TokenSet(
            whole.tokens,
            ends_of(whole.lengths),
            np.empty((len(examples), 0), dtype=np.int64),
            columns={
                "cut": whole.cut,
                "tag": np.array([numbers[tag] for one in examples for tag in one.tags], dtype=np.int64),
                "words": np.array([len(one.words) for one in examples], dtype=np.int64),
                "seen": np.concatenate(seen),
            },
            token_labels=np.concatenate(labels),
        )

    def describe(self, folder: Path, parts: Parts[Tagged], task: TaskConfig) -> None:
        (folder / _CLASSES).write_text(json.dumps(parts[TRAIN][0].classes), encoding="utf-8")

    def head(self, folder: Path) -> TokenHead:
        return TokenHead(tuple(json.loads((folder / _CLASSES).read_text(encoding="utf-8"))))

    def scoring(self, folder: Path, part: str, tokens: TokenSet, task: TaskConfig) -> Scoring:
        columns = tokens.columns
        return EntityScoring(columns["tag"], columns["words"], columns["seen"], self.head(folder).classes)

    def loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Returns the cross-entropy, the mean over each text's words, summed over texts."""
        # Flat: of logits in more dimensions the loss has no deterministic kernel on a GPU.
        each = cross_entropies(logits.flatten(0, 1), batch.labels.flatten(), self.cross_entropy)
        of_texts = each.view_as(batch.labels).sum(1)
        return (of_texts / (batch.labels != IGNORED).sum(1).clamp(min=1)).sum()


def first_pieces(words: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """(W,) the first piece of each word, by its last character (spaces may belong to it); -1 = none."""
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
