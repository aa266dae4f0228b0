"""Tokenised examples in flat, memory-mapped arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

_CHUNK = 1024
_COLUMN = "column-"


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Examples of one part.

    Attributes:
        tokens: token ids of all examples, one after the other.
        offsets: (N+1,) example i is `tokens[offsets[i]:offsets[i+1]]`.
        labels: (N, ...) what the task learns of each example: its class, its span, or nothing.
        second_at: (N,) position of each example's second text (token type 1 from there on), or
            None when every example is one text.
        columns: (N, ...) further arrays by name, which the task's scoring needs.
    """

    tokens: npt.NDArray[np.integer]
    offsets: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    second_at: npt.NDArray[np.int64] | None = None
    columns: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(N,) tokens of each example."""
        return np.diff(self.offsets)

    @classmethod
    def open(cls, folder: Path, part: str) -> TokenSet:
        """Map the arrays of a part; the pages are shared by all processes of the machine."""
        second = folder / f"{part}.second_at.npy"
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
        )

    def save(self, folder: Path, part: str) -> None:
        """Write the arrays of a part."""
        np.save(folder / f"{part}.tokens.npy", self.tokens)
        np.save(folder / f"{part}.offsets.npy", self.offsets)
        np.save(folder / f"{part}.labels.npy", self.labels)
        if self.second_at is not None:
            np.save(folder / f"{part}.second_at.npy", self.second_at)
        for name, column in self.columns.items():
            np.save(folder / f"{part}.{_COLUMN}{name}.npy", column)


def tokenise(
    texts: Sequence[str] | Sequence[tuple[str, str]],
    labels: npt.NDArray[np.int64],
    tokenizer: Tokenizer,
    max_length: int,
    progress: Callable[[int], None],
) -> TokenSet:
    """Tokenise texts in batches, on all cores that the tokenizer's library takes.

    Args:
        texts: N texts, or N pairs of texts, of which the longer one is cut first.
        labels: (N, ...) what is learned of them.
        tokenizer: with its frame of special tokens.
        max_length: longer examples are cut to this many tokens, special ones included.
        progress: called with the number of texts done so far.
    """
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    pairs = bool(texts) and isinstance(texts[0], tuple)
    dtype = token_dtype(tokenizer)
    pieces: list[npt.NDArray[np.integer]] = []
    lengths: list[int] = []
    seconds: list[int] = []
    for start in range(0, len(texts), _CHUNK):
        encoded = tokenizer.encode_batch_fast(list(texts[start : start + _CHUNK]))
        lengths.extend(len(one.ids) for one in encoded)
        pieces.append(np.concatenate([np.array(one.ids, dtype=dtype) for one in encoded]))
        if pairs:
            seconds.extend(len(one.type_ids) - sum(one.type_ids) for one in encoded)
        progress(min(start + _CHUNK, len(texts)))
    offsets = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return TokenSet(
        np.concatenate(pieces), offsets, labels, np.array(seconds, dtype=np.int64) if pairs else None
    )


def token_dtype(tokenizer: Tokenizer) -> type[np.integer]:
    """The smallest type that holds every id of a vocabulary."""
    return np.uint16 if tokenizer.get_vocab_size() <= np.iinfo(np.uint16).max else np.int32
