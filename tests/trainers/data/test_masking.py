"""Masks: how many, of which tokens, the same for whoever asks, and others each epoch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tests.drawing import scaled
from trainers.data.batches import TrainingBatches, collate
from trainers.data.masking import Masking
from trainers.data.tokenizers import SPECIAL, SpecialTokens
from trainers.data.tokens import TokenSet
from trainers.errors import BadSpecError
from trainers.model_kinds.heads import IGNORED

PIECES = [*SPECIAL, *(f"w{i}" for i in range(100)), *(f"##p{i}" for i in range(100))]
TOKENIZER = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]"))
SPECIAL_TOKENS = SpecialTokens.of(TOKENIZER, Path("vocabulary"))
PAD, UNK, CLS, SEP, MASK = range(5)
WHOLE, FIRST_PIECE, SIZE = 5, 105, len(PIECES)


def sequences(count, length=64, seed=0, high=SIZE) -> TokenSet:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(WHOLE, high, (count, length)).astype(np.uint16)
    tokens[:, 0], tokens[:, -1], tokens[:, length // 2], tokens[:, 5] = CLS, SEP, SEP, UNK
    offsets = np.arange(count + 1) * length
    return TokenSet(tokens.ravel(), offsets, np.empty((count, 0), dtype=np.int64))


def masked(data, rows=None, *, seed=0, epoch=0, fraction=0.15, whole_word=False, multiple=1):
    rows = np.arange(len(data)) if rows is None else np.asarray(rows)
    before = collate(data, rows, PAD, multiple)
    masking = Masking(TOKENIZER, SPECIAL_TOKENS, fraction=fraction, whole_word=whole_word)
    return before, masking(before, seed=seed, epoch=epoch)


@settings(max_examples=scaled(60))
@given(
    length=st.integers(8, 80),
    fraction=st.floats(0.01, 0.9),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 1000),
)
def test_exactly_the_fraction_of_each_sequence_is_guessed(length, fraction, seed, epoch):
    before, after = masked(sequences(6, length), fraction=fraction, seed=seed, epoch=epoch)
    maskable = (before.input_ids >= WHOLE).sum(1)
    expected = [max(1, round(fraction * int(count))) for count in maskable]
    assert (after.labels != IGNORED).sum(1).tolist() == expected


@pytest.mark.parametrize("whole_word", [False, True])
def test_labels_are_the_tokens_and_special_tokens_are_left_alone(whole_word):
    before, after = masked(sequences(50), whole_word=whole_word)
    guessed = after.labels != IGNORED
    assert after.labels[guessed].equal(before.input_ids[guessed])
    assert bool((before.input_ids[guessed] >= WHOLE).all())
    assert after.input_ids[~guessed].equal(before.input_ids[~guessed])
    assert after.guessed.equal(guessed.flatten().nonzero()[:, 0])
    assert after.guesses_of_sequence().equal(guessed.sum(1)[guessed.nonzero()[:, 0]])
    assert (after.examples, after.tokens, after.padded_tokens) == (50, 50 * 64, 50 * 64)


def test_eighty_of_hundred_are_hidden_ten_replaced_ten_left():
    before, after = masked(sequences(2000))
    guessed = after.labels != IGNORED
    now, was = after.input_ids[guessed], before.input_ids[guessed]
    total = len(now)
    hidden, same = int((now == MASK).sum()), int((now == was).sum())
    others = now[(now != MASK) & (now != was)]
    # Five standard deviations of a binomial draw.
    for count, share in ((hidden, 0.8), (same, 0.1), (len(others), 0.1)):
        assert abs(count - share * total) < 5 * (share * (1 - share) * total) ** 0.5 + total / SIZE
    assert bool((others >= WHOLE).all())
    assert len(torch.unique(others)) > 0.95 * (SIZE - WHOLE)


def test_every_place_is_guessed_equally_often():
    _, after = masked(sequences(4000))
    often = (after.labels != IGNORED).sum(0).numpy()
    maskable = np.setdiff1d(np.arange(64), [0, 5, 32, 63])
    assert often[[0, 5, 32, 63]].sum() == 0
    assert abs(often[maskable] / 4000 - 0.15).max() < 0.03


@pytest.mark.parametrize("whole_word", [False, True])
def test_a_mask_depends_on_seed_epoch_and_row_alone(whole_word):
    data = sequences(40)
    _, whole = masked(data, seed=3, epoch=2, whole_word=whole_word)
    for rows in ([7], [39, 7, 0], [0, 1, 7, 20]):
        _, part = masked(data, rows, seed=3, epoch=2, whole_word=whole_word)
        assert part.input_ids.equal(whole.input_ids[rows])
        assert part.labels.equal(whole.labels[rows])


def test_padding_changes_no_mask():
    data = sequences(8, length=30)
    _, narrow = masked(data)
    _, wide = masked(data, multiple=8)
    assert wide.input_ids[:, :30].equal(narrow.input_ids)
    assert bool((wide.labels[:, 30:] == IGNORED).all())


@pytest.mark.parametrize("other", [{"epoch": 1}, {"seed": 1}])
def test_another_epoch_or_seed_has_other_masks(other):
    data = sequences(200)
    (_, first), (_, second) = masked(data), masked(data, **other)
    both = ((first.labels != IGNORED) & (second.labels != IGNORED)).sum() / (first.labels != IGNORED).sum()
    assert abs(float(both) - 0.15) < 0.05  # as often as two independent draws meet


def test_workers_and_micro_batches_see_one_workers_masks():
    data = sequences(32, length=20)
    masking = Masking(TOKENIZER, SPECIAL_TOKENS, fraction=0.15, whole_word=False)

    def seen(world, micro_size):
        found = {}
        for rank in range(world):
            batches = TrainingBatches(
                data,
                seed=5,
                global_size=8,
                micro_size=micro_size,
                replica=rank,
                replicas=world,
                pad_id=PAD,
                multiple=1,
                transform=masking,
            )
            for step in range(8):  # two epochs
                for micro in batches[step].micro_batches:
                    for row, ids in zip(micro.rows.tolist(), micro.input_ids.tolist(), strict=True):
                        found[step // 4, row] = ids
        return found

    alone = seen(1, 8)
    assert len(alone) == 64
    assert seen(2, 4) == seen(4, 1) == alone
    assert all(alone[0, row] != alone[1, row] for row in range(32))


@settings(max_examples=scaled(60))
@given(seed=st.integers(0, 2**32 - 1), fraction=st.floats(0.05, 0.5))
def test_whole_words_are_guessed_together(seed, fraction):
    before, after = masked(sequences(6), seed=seed, fraction=fraction, whole_word=True)
    ids, guessed = before.input_ids.numpy(), (after.labels != IGNORED).numpy()
    for row in range(len(ids)):
        for at in range(1, ids.shape[1]):
            goes_on = ids[row, at] >= FIRST_PIECE and ids[row, at - 1] >= WHOLE
            assert not goes_on or guessed[row, at] == guessed[row, at - 1]


def test_whole_words_come_to_the_same_number():
    before, after = masked(sequences(300, high=FIRST_PIECE + 30), whole_word=True)
    wanted = np.round(0.15 * (before.input_ids >= WHOLE).sum(1).numpy())
    assert np.mean((after.labels != IGNORED).sum(1).numpy() == wanted) > 0.99


def test_a_sequence_of_one_long_word_is_guessed_whole():
    tokens = np.array([CLS, WHOLE, *[FIRST_PIECE] * 5, SEP], dtype=np.uint16)
    data = TokenSet(tokens, np.array([0, 8]), np.empty((1, 0), dtype=np.int64))
    _, after = masked(data, whole_word=True)
    assert (after.labels != IGNORED).tolist() == [[False, *[True] * 6, False]]


def test_a_sequence_of_unknown_tokens_has_nothing_to_guess():
    data = TokenSet(
        np.array([CLS, UNK, SEP], dtype=np.uint16), np.array([0, 3]), np.empty((1, 0), dtype=np.int64)
    )
    for whole_word in (False, True):
        _, after = masked(data, whole_word=whole_word)
        assert bool((after.labels == IGNORED).all())


def test_a_vocabulary_without_mask_is_refused(tmp_path):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with pytest.raises(BadSpecError, match=r"has no mask_token; name one .* \(usually \[MASK\] or <mask>\)"):
        Masking(tokenizer, SpecialTokens.of(tokenizer, tmp_path), fraction=0.15, whole_word=False)
