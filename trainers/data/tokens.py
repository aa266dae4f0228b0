"""From texts to examples: special tokens around them, flat memory-mapped arrays, packed sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from trainers.data.encoding import Counts, Ids, encoder_of, ends_of

_CHUNK = 1024
_COLUMN = "column-"
_IN_MEMORY = ("offsets", "labels", "second_at")
_CUT = "cut"
_WEIGHT = "weight"


Framed = tuple[Ids, Counts, Counts, npt.NDArray[np.bool_]]
"""Tokens of all examples, one after the other; (N,) how many each has, the place of its second text (0 when
there is none), and whether part of its texts is lost."""
Frame = tuple[tuple[int, ...], ...]  # Special tokens before, between and after one text or two


def framed(frame: Frame, columns: Sequence[tuple[Ids, Counts]], max_length: int) -> Framed:
    """Cuts examples, a column per text with counts (N,), to a length; of two texts the longer first."""
    room = max(0, max_length - sum(map(len, frame)))
    whole = [counts for _, counts in columns]
    shares = _cut(whole, room)
    lengths = np.sum(shares, axis=0) + sum(map(len, frame))
    place = ends_of(lengths)[:-1]
    tokens = np.empty(int(lengths.sum()), dtype=columns[0][0].dtype)
    second_at = np.zeros(len(lengths), dtype=np.int64)
    for number, specials in enumerate(frame):
        for special in specials:
            tokens[place] = special
            place = place + 1
        if number == len(columns):
            break
        if number == 1:
            second_at = place - ends_of(lengths)[:-1]
        (text, counts), share = columns[number], shares[number]
        ends = ends_of(share)
        within = np.arange(ends[-1]) - np.repeat(ends[:-1], share)
        source = np.repeat(ends_of(counts)[:-1], share) + within
        tokens[np.repeat(place, share) + within] = text[source]
        place = place + share
    return tokens, lengths, second_at, np.sum(whole, axis=0) > room


def frame_of(tokenizer: Tokenizer, *, pairs: bool) -> Frame:
    encoded = tokenizer.encode("a", "a") if pairs else tokenizer.encode("a")
    texts = [i for i, text in enumerate(encoded.sequence_ids) if text is not None]
    belongs = [-1, *(encoded.sequence_ids[i] for i in texts), 2]
    edges = [-1, *texts, len(encoded.ids)]
    return tuple(
        tuple(encoded.ids[before + 1 : after])
        for (before, after), (left, right) in zip(pairwise(edges), pairwise(belongs), strict=True)
        if left != right
    )


def _cut(counts: Sequence[Counts], room: int) -> list[Counts]:
    """Returns how much of each text is kept, as `longest_first` of the tokenizers library has it."""
    if len(counts) == 1:
        return [np.minimum(counts[0], room)]
    first, second = counts
    shorter, longer = np.minimum(first, second), np.maximum(first, second)
    fits = shorter + longer <= room
    half = room // 2
    # Either the longer text gives way to the shorter, or both to a half.
    halved = shorter > half
    short = np.where(fits, shorter, np.where(halved, half, shorter))
    long = np.where(fits, longer, np.where(halved, room - half, room - shorter))
    swapped = first > second
    return [np.where(swapped, long, short), np.where(swapped, short, long)]


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Examples of one part; `columns` are those of the task's scoring, `cut` and `weights`."""

    tokens: npt.NDArray[np.integer]  # Token ids of all examples, one after the other
    offsets: npt.NDArray[np.int64]  # (N+1,) example i is `tokens[offsets[i]:offsets[i+1]]`
    labels: npt.NDArray[Any]  # (N, ...) class, number or span of each example, or nothing
    second_at: npt.NDArray[np.int64] | None = None  # (N,) where its second text begins; None = without any
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)  # (N, ...) further arrays by name
    token_labels: npt.NDArray[np.int64] | None = None  # Label of each of `tokens`, or `IGNORED`

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def cut(self) -> npt.NDArray[np.bool_]:
        """(N,) whether an example was longer than the limit; windows and packed sequences never are."""
        column: npt.NDArray[np.bool_] | None = self.columns.get(_CUT)
        return np.zeros(len(self), dtype=np.bool_) if column is None else column

    @property
    def weights(self) -> npt.NDArray[np.float32] | None:
        """(N, ...) factors of each label's loss, shaped as the labels; None = 1."""
        return self.columns.get(_WEIGHT)

    def weighted(self, weights: npt.NDArray[np.float32]) -> TokenSet:
        return replace(self, columns={**self.columns, _WEIGHT: weights})

    @classmethod
    def open(cls, folder: Path, part: str) -> TokenSet:
        """Maps the arrays of a part; the pages are shared by all processes of the machine."""
        arrays: dict[str, Any] = {}
        columns: dict[str, npt.NDArray[Any]] = {}
        for file in sorted(folder.glob(f"{part}.*.npy")):
            name = file.name.removeprefix(f"{part}.").removesuffix(".npy")
            array = np.load(file, mmap_mode=None if name in _IN_MEMORY else "r")
            if name.startswith(_COLUMN):
                columns[name.removeprefix(_COLUMN)] = array
            else:
                arrays[name] = array
        return cls(**arrays, columns=columns)

    def save(self, folder: Path, part: str) -> None:
        arrays = {own.name: getattr(self, own.name) for own in fields(self) if own.name != "columns"}
        arrays |= {f"{_COLUMN}{name}": column for name, column in self.columns.items()}
        for name, array in arrays.items():
            if array is not None:
                np.save(folder / f"{part}.{name}.npy", array)


class TokenWriter:
    """Writes the tokens of a part as they come, so that memory does not grow with the data."""

    def __init__(self, folder: Path, part: str, dtype: npt.DTypeLike) -> None:
        self._folder, self._part, self._dtype = folder, part, np.dtype(dtype)
        self._file = (folder / f"{part}.tokens.npy").open("wb")
        self._lengths: list[npt.NDArray[np.int64]] = []
        self.tokens = 0
        self._begin()

    def append(self, tokens: npt.NDArray[np.integer], lengths: npt.NDArray[np.int64]) -> None:
        """Adds examples: their tokens one after the other, and (K,) how many each has."""
        self._file.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        self._lengths.append(np.asarray(lengths, dtype=np.int64))
        self.tokens += tokens.size

    def finish(self) -> None:
        """Completes the part, whose examples have no labels but their tokens."""
        self._file.seek(0)
        self._begin()
        self._file.close()
        lengths = np.concatenate([*self._lengths, np.empty(0, dtype=np.int64)])
        np.save(self._folder / f"{self._part}.offsets.npy", ends_of(lengths))
        np.save(self._folder / f"{self._part}.labels.npy", np.empty((len(lengths), 0), dtype=np.int64))

    def close(self) -> None:
        self._file.close()

    def _begin(self) -> None:
        # The format leaves room for the first axis to grow, so that both headers are of one size.
        described = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.tokens,)}
        np.lib.format.write_array_header_1_0(self._file, described)


def tokenise(
    texts: Sequence[tuple[str, ...]],
    labels: npt.NDArray[Any],
    tokenizer: Tokenizer,
    max_length: int,
    progress: Callable[[int], None],
) -> TokenSet:
    pairs = len(texts[0]) > 1
    encode, frame = encoder_of(tokenizer), frame_of(tokenizer, pairs=pairs)
    chunks: list[Framed] = []
    for start in range(0, len(texts), _CHUNK):
        columns = [encode(column) for column in zip(*texts[start : start + _CHUNK], strict=True)]
        chunks.append(framed(frame, columns, max_length))
        progress(min(start + _CHUNK, len(texts)))
    tokens, lengths, second_at, cut = map(np.concatenate, zip(*chunks, strict=True))
    return TokenSet(tokens, ends_of(lengths), labels, second_at if pairs else None, {_CUT: cut})


class Packer:
    """Fills sequences `[CLS] text [SEP] text ... [SEP]` of exactly `length` tokens, special ones included.

    A text that does not fit continues in the next sequence, and one that ends with its sequence shares the
    closing `[SEP]`. No token is lost; only the last sequence of all may be shorter.
    """

    def __init__(self, length: int, *, begin: int, separator: int, dtype: npt.DTypeLike) -> None:
        self._length, self._begin, self._separator = length, begin, separator
        self._dtype = dtype
        self._stream: Ids = np.empty(0, dtype=dtype)

    def add(self, tokens: Ids, counts: Counts) -> Ids:
        """Lays N texts with `counts` (N,) tokens at the end; returns (K, length), the sequences now full."""
        ends = np.cumsum(counts)[counts > 0]
        self._stream = np.concatenate([self._stream, np.insert(tokens, ends, self._separator)])
        body = self._length - 2
        full = np.empty((len(self._stream) // body, self._length), dtype=self._dtype)
        place = sequences = 0
        while len(self._stream) - place > body:
            full[sequences, 1:-1] = self._stream[place : place + body]
            place += body
            sequences += 1
            # The text ended where the sequence did: its separator is the one that closes it.
            place += int(self._stream[place] == self._separator)
        self._stream = self._stream[place:].copy()
        full = full[:sequences]
        full[:, 0], full[:, -1] = self._begin, self._separator
        return full

    def rest(self) -> Ids:
        """(R,) the last sequence, at most `length` long; empty when nothing is left over."""
        if not len(self._stream):
            return self._stream
        # The stream ends with the last text's separator.
        return np.concatenate([[self._begin], self._stream]).astype(self._dtype)
