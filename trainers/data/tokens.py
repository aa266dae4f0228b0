"""Tokenised examples in flat, memory-mapped arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from trainers.data.encoding import encoder_of, ends_of
from trainers.data.encoding import token_dtype as token_dtype
from trainers.data.framing import frame_of

_CHUNK = 1024
_COLUMN = "column-"
_CUT = "cut"
_WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Examples of one part.

    Attributes:
        tokens: Token ids of all examples, one after the other.
        offsets: (N+1,) example i is `tokens[offsets[i]:offsets[i+1]]`.
        labels: (N, ...) what the task learns of each example: its class, its number, its span, or nothing.
        second_at: (N,) position of each example's second text (token type 1 from there on), or
            None when every example is one text.
        columns: (N, ...) further arrays by name: those of the task's scoring, `cut` and `weights`.
        token_labels: Label of each of `tokens`, `IGNORED` where nothing is learned; None = tokens have none.
    """

    tokens: npt.NDArray[np.integer]
    offsets: npt.NDArray[np.int64]
    labels: npt.NDArray[Any]
    second_at: npt.NDArray[np.int64] | None = None
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    token_labels: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def cut(self) -> npt.NDArray[np.bool_]:
        """(N,) whether an example was longer than the limit; windows and packed sequences never are."""
        found: npt.NDArray[np.bool_] | None = self.columns.get(_CUT)
        return np.zeros(len(self), dtype=np.bool_) if found is None else found

    @property
    def weights(self) -> npt.NDArray[np.float32] | None:
        """(N, ...) factors of each label's loss, shaped as the labels; None = 1."""
        return self.columns.get(_WEIGHT)

    def weighted(self, weights: npt.NDArray[np.float32]) -> TokenSet:
        return replace(self, columns={**self.columns, _WEIGHT: weights})

    @classmethod
    def open(cls, folder: Path, part: str) -> TokenSet:
        """Maps the arrays of a part; the pages are shared by all processes of the machine."""
        second = folder / f"{part}.second_at.npy"
        of_tokens = folder / f"{part}.token_labels.npy"
        prefix = f"{part}.{_COLUMN}"
        return cls(
            np.load(folder / f"{part}.tokens.npy", mmap_mode="r"),
            np.load(folder / f"{part}.offsets.npy"),
            np.load(folder / f"{part}.labels.npy"),
            np.load(second) if second.exists() else None,
            {
                file.name.removeprefix(prefix).removesuffix(".npy"): np.load(file, mmap_mode="r")
                for file in sorted(folder.glob(f"{prefix}*.npy"))
            },
            np.load(of_tokens, mmap_mode="r") if of_tokens.exists() else None,
        )

    def save(self, folder: Path, part: str) -> None:
        np.save(folder / f"{part}.tokens.npy", self.tokens)
        np.save(folder / f"{part}.offsets.npy", self.offsets)
        np.save(folder / f"{part}.labels.npy", self.labels)
        if self.second_at is not None:
            np.save(folder / f"{part}.second_at.npy", self.second_at)
        if self.token_labels is not None:
            np.save(folder / f"{part}.token_labels.npy", self.token_labels)
        for name, column in self.columns.items():
            np.save(folder / f"{part}.{_COLUMN}{name}.npy", column)


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
        """Closes the file, finished or not."""
        self._file.close()

    def _begin(self) -> None:
        # The format leaves room for the first axis to grow, so that both headers are of one size.
        described = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.tokens,)}
        np.lib.format.write_array_header_1_0(self._file, described)


def tokenise(
    texts: Sequence[str] | Sequence[tuple[str, str]],
    labels: npt.NDArray[Any],
    tokenizer: Tokenizer,
    max_length: int,
    progress: Callable[[int], None],
) -> TokenSet:
    """Tokenises N texts, or N pairs, and cuts them to `max_length` tokens, special ones included.

    `labels` is (N, ...); `progress` receives the number of texts done so far.
    """
    pairs = bool(texts) and isinstance(texts[0], tuple)
    encode, frame = encoder_of(tokenizer), frame_of(tokenizer, pairs=pairs)
    dtype = token_dtype(tokenizer)
    pieces: list[npt.NDArray[np.integer]] = [np.empty(0, dtype=dtype)]
    lengths: list[npt.NDArray[np.int64]] = []
    seconds: list[npt.NDArray[np.int64]] = []
    cut: list[npt.NDArray[np.bool_]] = [np.empty(0, dtype=np.bool_)]
    for start in range(0, len(texts), _CHUNK):
        chunk = texts[start : start + _CHUNK]
        columns: list[Any] = list(zip(*chunk, strict=True)) if pairs else [chunk]
        framed = frame.around([encode(column) for column in columns], max_length)
        pieces.append(framed.tokens.astype(dtype, copy=False))
        lengths.append(framed.lengths)
        seconds.append(framed.second_at)
        cut.append(framed.cut)
        progress(min(start + _CHUNK, len(texts)))
    offsets = ends_of(np.concatenate([*lengths, np.empty(0, dtype=np.int64)]))
    second_at = np.concatenate(seconds) if pairs else None
    return TokenSet(np.concatenate(pieces), offsets, labels, second_at, {_CUT: np.concatenate(cut)})
