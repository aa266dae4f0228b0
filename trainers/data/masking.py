"""Masking for language modelling: which tokens are to be guessed, drawn again each epoch.

The draw is a pure function of seed, epoch, the example's number and the token's place: random bits come from
hashing these counters (SplitMix64, Steele et al., OOPSLA 2014). So masks are the same for every number of
workers and size of micro-batch, and a resumed run needs no state to draw the next ones.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from trainers.data.batches import Batch
from trainers.data.tokenizers import SpecialTokens, continues_word, vocabulary_size
from trainers.model_kinds.heads import IGNORED

Bits = npt.NDArray[np.uint64]

_MASKED, _RANDOM = 0.8, 0.1
"""Shares of the tokens to be guessed that become `[MASK]` and another token (Devlin et al., 2019, 3.1)."""
_WORD, _DEED, _TOKEN = range(3)
"""What bits are drawn for: the order of words, what is done to a token, and its replacement."""
_STEP = 0x9E3779B97F4A7C15
_LAST = np.uint64(2**64 - 1)
_TO_UNIT = 2.0**-53


class Masking:
    """Hides tokens of each sequence that the model must guess; see `Transform`.

    Exactly round(`fraction` x maskable tokens), and at least one, are to be guessed in each sequence; special
    tokens, `[UNK]` among them, are never chosen and never put in. `whole_word` chooses all pieces of a word
    together; where the last word would be too many, words of one piece make up the number, if there are any.
    """

    def __init__(
        self, tokenizer: Tokenizer, special: SpecialTokens, *, fraction: float, whole_word: bool
    ) -> None:
        self._mask_id = special.id_of("mask_token")
        self._fraction, self._whole_word = fraction, whole_word
        size, continues = vocabulary_size(tokenizer), continues_word(tokenizer)
        self._maskable, self._continues = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
        for piece, number in tokenizer.get_vocab().items():
            self._maskable[number] = number not in special.every
            self._continues[number] = continues(piece)
        self._ordinary = np.flatnonzero(self._maskable)

    def __call__(self, batch: Batch, *, seed: int, epoch: int) -> Batch:
        """Labels become (B, S) token ids, `IGNORED` where nothing is masked; `guessed` the other places."""
        ids = batch.input_ids.numpy()
        maskable = self._maskable[ids]
        cells = _cells(batch.rows.numpy(), ids.shape[1], seed, epoch)
        wanted = np.round(self._fraction * maskable.sum(1)).astype(np.int64)
        wanted = np.clip(wanted, np.minimum(1, maskable.sum(1)), None)
        if self._whole_word:
            chosen = _whole_words(maskable, self._continues[ids], _bits(cells, _WORD), wanted)
        else:
            chosen = _rank(np.where(maskable, _bits(cells, _WORD), _LAST)) < wanted[:, None]
            chosen &= maskable
        labels = np.where(chosen, ids, IGNORED)
        deed = (_bits(cells, _DEED) >> np.uint64(11)) * _TO_UNIT
        others = self._ordinary[_bits(cells, _TOKEN) % np.uint64(len(self._ordinary))]
        hidden = np.where(deed < _MASKED, self._mask_id, np.where(deed < _MASKED + _RANDOM, others, ids))
        return replace(
            batch,
            input_ids=torch.from_numpy(np.where(chosen, hidden, ids)),
            labels=torch.from_numpy(labels),
            guessed=torch.from_numpy(np.flatnonzero(chosen)),
        )


def _whole_words(
    maskable: npt.NDArray[np.bool_],
    continues: npt.NDArray[np.bool_],
    bits: Bits,
    wanted: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """(B, S) the tokens of words drawn in the order of their first piece's bits, `wanted` in each row."""
    rows, width = maskable.shape
    at = np.arange(width)
    # A sequence may begin in the middle of a word: what follows a special token begins one.
    begins = maskable & ~(continues & np.pad(maskable, ((0, 0), (1, 0)))[:, :-1])
    first = np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    pieces = np.zeros((rows, width), dtype=np.int64)
    np.add.at(pieces, (np.arange(rows)[:, None], first), maskable)
    place = _rank(np.where(begins, bits, _LAST))
    in_order = np.zeros_like(pieces)
    np.put_along_axis(in_order, place, np.where(begins, pieces, 0), axis=1)
    cumulative = np.take_along_axis(np.cumsum(in_order, axis=1), place, axis=1)
    words = begins & (cumulative <= wanted[:, None])
    missing = wanted - np.where(words, pieces, 0).sum(1)
    single = begins & ~words & (pieces == 1)
    words |= single & (_rank(np.where(single, bits, _LAST)) < missing[:, None])
    # A short sequence of long words only: its first word in order, so that there is something to guess.
    words |= ~words.any(1, keepdims=True) & begins & (place == 0)
    chosen: npt.NDArray[np.bool_] = np.take_along_axis(words, first, axis=1) & maskable
    return chosen


def _rank(bits: Bits) -> npt.NDArray[np.int64]:
    """(B, S) place of each value among its row's, ascending."""
    order = np.argsort(bits, axis=1, kind="stable")
    place = np.empty_like(order)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(bits.shape[1]), order.shape), axis=1)
    return place


def _cells(rows: npt.NDArray[np.int64], width: int, seed: int, epoch: int) -> Bits:
    """(B, S) bits that belong to a token's place, by seed, epoch and number of the example."""
    with np.errstate(over="ignore"):
        run = _mixed(_mixed(np.array([seed], dtype=np.uint64)) + np.array([epoch], dtype=np.uint64))
        of_row = _mixed(run + rows.astype(np.uint64))
        places = np.arange(width).astype(np.uint64)
        return _mixed(of_row[:, None] + places)


def _bits(cells: Bits, purpose: int) -> Bits:
    with np.errstate(over="ignore"):
        return _mixed(cells + np.uint64(purpose))


def _mixed(state: Bits) -> Bits:
    """Returns SplitMix64's next output of a generator in each state. Wraps around on purpose."""
    bits = state + np.uint64(_STEP)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
