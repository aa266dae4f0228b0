"""Packing loses no token and pads almost none."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawing import scaled
from trainers.data.tokens import Packer, TokenSet, TokenWriter

BEGIN, SEPARATOR = 101, 102
TEXTS = st.lists(st.lists(st.integers(1000, 1100), max_size=30), max_size=25)


def packed(texts, length, piece=4) -> list[list[int]]:
    packer = Packer(length, begin=BEGIN, separator=SEPARATOR, dtype=np.uint16)
    sequences: list[list[int]] = []
    for start in range(0, len(texts), piece):
        part = texts[start : start + piece]
        tokens = np.array([number for text in part for number in text], dtype=np.uint16)
        sequences += packer.add(tokens, np.array([len(text) for text in part])).tolist()
    rest = packer.rest().tolist()
    return [*sequences, rest] if rest else sequences


@settings(max_examples=scaled(300))
@given(texts=TEXTS, length=st.integers(3, 20), piece=st.integers(1, 9))
def test_every_token_is_packed_once_and_in_order(texts, length, piece):
    sequences = packed(texts, length, piece)
    kept = [number for one in sequences for number in one if number not in (BEGIN, SEPARATOR)]
    assert kept == [number for text in texts for number in text]


@settings(max_examples=scaled(300))
@given(texts=TEXTS, length=st.integers(3, 20))
def test_sequences_are_full_and_framed(texts, length):
    sequences = packed(texts, length)
    assert all(len(one) == length for one in sequences[:-1])
    for one in sequences:
        assert len(one) <= length
        assert (one[0], one[-1]) == (BEGIN, SEPARATOR)
        assert one[1] not in (BEGIN, SEPARATOR)
        assert BEGIN not in one[1:]


@settings(max_examples=scaled(200))
@given(texts=TEXTS, length=st.integers(3, 20))
def test_texts_are_apart(texts, length):
    """Between two texts there is a separator, or the end of a sequence."""
    ends = set(np.cumsum([len(text) for text in texts if text]).tolist())
    place, found = 0, set()
    for one in packed(texts, length):
        for number in one[1:]:
            if number == SEPARATOR:
                found.add(place)
            else:
                place += 1
    assert ends <= found


@settings(max_examples=scaled(100))
@given(texts=TEXTS, length=st.integers(3, 20))
def test_the_size_of_the_pieces_changes_nothing(texts, length):
    assert packed(texts, length, piece=1) == packed(texts, length, piece=100)


def test_almost_nothing_is_padding_or_frame():
    rng = np.random.default_rng(0)
    texts = [[1000] * rng.integers(1, 400) for _ in range(500)]
    sequences = packed(texts, 128)
    held = sum(map(len, texts))
    assert held / (128 * len(sequences)) > 0.97


def test_written_sequences_are_read_back(tmp_path):
    rows = np.arange(30, dtype=np.uint16).reshape(3, 10)
    writer = TokenWriter(tmp_path, "train", np.uint16)
    writer.append(rows[:2], np.array([10, 10]))
    writer.append(rows[2, :4], np.array([4]))
    writer.finish()
    loaded = TokenSet.open(tmp_path, "train")
    assert isinstance(loaded.tokens, np.memmap)
    assert loaded.tokens.tolist() == list(range(24))
    assert loaded.lengths.tolist() == [10, 10, 4]
    assert len(loaded) == 3
