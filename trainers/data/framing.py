"""The special tokens around texts, and the cut to a length, for many examples at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from trainers.data.encoding import Counts, Ids, ends_of


@dataclass(frozen=True, slots=True)
class Framed:
    """Examples ready for a model.

    Attributes:
        tokens: Tokens of all examples, concatenated.
        lengths: (N,) tokens of each.
        second_at: (N,) place of the second text in its example; 0 when there is none.
        cut: (N,) whether part of the texts is lost.
    """

    tokens: Ids
    lengths: Counts
    second_at: Counts
    cut: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Frame:
    """Special tokens before, between and after one text or two."""

    specials: tuple[tuple[int, ...], ...]

    def around(self, columns: Sequence[tuple[Ids, Counts]], max_length: int) -> Framed:
        """Cuts examples to `max_length` and puts the special tokens around them.

        `columns` has, per text of an example, the tokens of N examples and their counts (N,). Of two texts
        the longer is cut first, as the tokenizers library does.
        """
        room = max(0, max_length - sum(map(len, self.specials)))
        whole = [counts for _, counts in columns]
        kept = _cut(whole, room)
        lengths = np.sum(kept, axis=0) + sum(map(len, self.specials))
        place = ends_of(lengths)[:-1]
        framed = np.empty(int(lengths.sum()), dtype=columns[0][0].dtype)
        second_at = np.zeros(len(lengths), dtype=np.int64)
        for number, specials in enumerate(self.specials):
            for special in specials:
                framed[place] = special
                place = place + 1
            if number == len(columns):
                break
            if number == 1:
                second_at = place - ends_of(lengths)[:-1]
            tokens, counts = columns[number]
            within = _within(kept[number])
            framed[np.repeat(place, kept[number]) + within] = tokens[
                np.repeat(ends_of(counts)[:-1], kept[number]) + within
            ]
            place = place + kept[number]
        return Framed(framed, lengths, second_at, np.sum(whole, axis=0) > room)


def frame_of(tokenizer: Tokenizer, *, pairs: bool) -> Frame:
    """Returns what a tokenizer puts around a text, or around a pair."""
    encoded = tokenizer.encode("a", "a") if pairs else tokenizer.encode("a")
    texts = [i for i, text in enumerate(encoded.sequence_ids) if text is not None]
    belongs = [-1, *(encoded.sequence_ids[i] for i in texts), 2]
    edges = [-1, *texts, len(encoded.ids)]
    return Frame(
        tuple(
            tuple(encoded.ids[before + 1 : after])
            for (before, after), (left, right) in zip(pairwise(edges), pairwise(belongs), strict=True)
            if left != right
        )
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


def _within(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, ... for each of N runs laid one after the other."""
    ends = ends_of(counts)
    return np.arange(ends[-1]) - np.repeat(ends[:-1], counts)
