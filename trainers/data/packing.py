"""Texts laid end to end in sequences of one length, so that almost nothing is padding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainers.data.encoding import Counts, Ids


class Packer:
    """Fills sequences `[CLS] text [SEP] text ... [SEP]` of exactly `length` tokens, special ones included.

    The texts form one stream with a `[SEP]` after each, which is cut wherever a sequence is full:
    a text that does not fit continues in the next sequence. A text that ends with its sequence
    shares the closing `[SEP]`. No token is lost; only the last sequence of all may be shorter.
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
