"""Tokenised examples in flat, memory-mapped arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class TokenSet:
    """Examples of one part.

    Attributes:
        tokens: token ids of all examples, one after the other.
        offsets: (N+1,) example i is `tokens[offsets[i]:offsets[i+1]]`.
        labels: (N,) class of each example.
    """

    tokens: npt.NDArray[np.integer]
    offsets: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """(N,) tokens of each example."""
        return np.diff(self.offsets)

    @classmethod
    def open(cls, folder: Path, part: str) -> TokenSet:
        """Map the arrays of a part; the pages are shared by all processes of the machine."""
        return cls(
            np.load(folder / f"{part}.tokens.npy", mmap_mode="r"),
            np.load(folder / f"{part}.offsets.npy"),
            np.load(folder / f"{part}.labels.npy"),
        )

    def save(self, folder: Path, part: str) -> None:
        """Write the arrays of a part."""
        np.save(folder / f"{part}.tokens.npy", self.tokens)
        np.save(folder / f"{part}.offsets.npy", self.offsets)
        np.save(folder / f"{part}.labels.npy", self.labels)


def tokenise(
    texts: Sequence[str],
    labels: npt.NDArray[np.int64],
    tokenizer: Tokenizer,
    max_length: int,
    progress: Callable[[int], None],
) -> TokenSet:
    """Tokenise texts in batches, on all cores that the tokenizer's library takes.

    Args:
        texts: N texts.
        labels: (N,) their classes.
        tokenizer: with its frame of special tokens.
        max_length: longer examples are cut to this many tokens, special ones included.
        progress: called with the number of texts done so far.
    """
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    small = tokenizer.get_vocab_size() <= np.iinfo(np.uint16).max
    dtype = np.uint16 if small else np.int32
    pieces: list[npt.NDArray[np.integer]] = []
    lengths: list[int] = []
    for start in range(0, len(texts), _CHUNK):
        encoded = tokenizer.encode_batch_fast(list(texts[start : start + _CHUNK]))
        lengths.extend(len(one.ids) for one in encoded)
        pieces.append(np.concatenate([np.array(one.ids, dtype=dtype) for one in encoded]))
        progress(min(start + _CHUNK, len(texts)))
    offsets = np.zeros(len(texts) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return TokenSet(np.concatenate(pieces), offsets, labels)
