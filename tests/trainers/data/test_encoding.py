"""Fast tokenisation gives the library's ids, whatever the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

from tests.drawing import scaled
from trainers.data import encoding, tokenizers
from trainers.data.encoding import LibraryEncoder, WordEncoder, encoder_of
from trainers.data.tokens import tokenise

CORPUS = [
    "The cat's mat was well-made, unbelievably so: 3.14 (pi)! A cup of tea, don't you think? [x] _y_ #1 & 2",
    "Der Tee schmeckt köstlich. Un café naïve. 東京 のお茶。 Ωραίο τσάι, чай, שלום",
]
TOKENIZER = tokenizers.train_wordpiece(CORPUS * 4, 400).to_str()
MIXED = st.one_of(
    st.text(),
    st.text(alphabet="aAbtehx .,'-[]\n\t\r\x0b\x0c\x1c\x1f\x85\xa0\u2028\u200b\u0301ÅßİΣ東#0_"),
    st.lists(
        st.sampled_from(
            ["the", "Cat's", "[MASK]", "[SEP]x", "tea,", "\x85", "don't", "é" * 3, "z" * 101, "##a", "3.14"]
        )
    ).map(" ".join),
)  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Tokenizer:
    tokenizer = Tokenizer.from_str(TOKENIZER)
    tokenizer.no_padding()
    return tokenizer


@pytest.fixture(scope="module")
def encoder() -> WordEncoder:
    found = encoder_of(Tokenizer.from_str(TOKENIZER))
    assert isinstance(found, WordEncoder)
    return found


@settings(max_examples=scaled(400))
@given(texts=st.lists(MIXED, max_size=5))
def test_ids_are_the_librarys(library, encoder, texts):
    expected = [library.encode(text, add_special_tokens=False).ids for text in texts]
    ids, counts = encoder(texts)
    assert counts.tolist() == [len(one) for one in expected]
    assert ids.tolist() == [number for one in expected for number in one]


@settings(max_examples=scaled(100))
@given(texts=st.lists(MIXED, min_size=1, max_size=5), length=st.integers(4, 24))
def test_framed_and_cut_texts_are_the_librarys(library, texts, length):
    library.enable_truncation(length)
    expected = [library.encode(text) for text in texts]
    labels, tokenizer = np.zeros(len(texts)), Tokenizer.from_str(TOKENIZER)
    found = tokenise([(text,) for text in texts], labels, tokenizer, length, lambda done: None)
    assert found.tokens.tolist() == [number for one in expected for number in one.ids]
    assert found.lengths.tolist() == [len(one.ids) for one in expected]
    assert found.second_at is None


@settings(max_examples=scaled(200))
@given(pairs=st.lists(st.tuples(MIXED, MIXED), min_size=1, max_size=4), length=st.integers(4, 24))
def test_framed_and_cut_pairs_are_the_librarys(library, pairs, length):
    library.enable_truncation(length)
    expected = [library.encode(*pair) for pair in pairs]
    found = tokenise(pairs, np.zeros(len(pairs)), Tokenizer.from_str(TOKENIZER), length, lambda done: None)
    assert found.tokens.tolist() == [number for one in expected for number in one.ids]
    assert found.second_at.tolist() == [len(one.ids) - sum(one.type_ids) for one in expected]


def test_forgetting_words_changes_no_id(library, monkeypatch):
    monkeypatch.setattr(encoding, "_BUDGET_BYTES", 1000)
    monkeypatch.setattr(encoding, "_PIECES_KEPT", 0)
    encoder = encoder_of(Tokenizer.from_str(TOKENIZER))
    library.no_truncation()
    for number in range(30):
        text = f"the tea number {number} qq{number} {CORPUS[number % 2]} again{'z' * number}"
        assert encoder([text])[0].tolist() == library.encode(text, add_special_tokens=False).ids
    assert len(encoder._words) < 12


@pytest.mark.parametrize("change", ["normalizer", "added"])
def test_a_tokenizer_of_another_make_goes_through_the_library(change):
    tokenizer = Tokenizer.from_str(TOKENIZER)
    if change == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
    else:
        tokenizer.add_tokens([AddedToken("green tea", normalized=True)])
    encoder = encoder_of(tokenizer)
    assert isinstance(encoder, LibraryEncoder)
    ids, counts = encoder(["A green tea.", ""])
    assert ids.tolist() == tokenizer.encode("A green tea.", add_special_tokens=False).ids
    assert counts.tolist() == [len(ids), 0]
