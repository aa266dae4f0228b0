"""Texts to token ids, fast: a BERT tokenizer's answer is looked up once per word, not once per text.

A BERT tokenizer treats text between two white spaces on its own, and in running text most of that has been
seen before. So each distinct piece between spaces is encoded once and remembered. The ids are exactly the
library's: what the short cut cannot guarantee goes through the library, as do all texts of other tokenizers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from trainers.data.tokenizers import vocabulary_size

Ids = npt.NDArray[np.integer]
Counts = npt.NDArray[np.int64]

_BUDGET_BYTES = 64 << 20  # Most memory that remembered words take, roughly
_WORD_BYTES = 250  # What a remembered word takes besides its characters
_NOT_SPACES = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"  # Characters that `str.split` splits at, but that BERT deletes


Encoder = Callable[[Sequence[str]], tuple[Ids, Counts]]
"""Token ids of all texts one after the other, without special tokens, and (N,) how many each has."""


def encoder_of(tokenizer: Tokenizer) -> Encoder:
    """Returns the fastest encoder that gives this tokenizer's ids; switches padding and truncation off."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    splits = _splits_at_spaces(json.loads(tokenizer.to_str()))
    return WordEncoder(tokenizer) if splits else LibraryEncoder(tokenizer)


def token_dtype(tokenizer: Tokenizer) -> type[np.integer]:
    return np.uint16 if vocabulary_size(tokenizer) <= np.iinfo(np.uint16).max else np.int32


class LibraryEncoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._dtype = tokenizer, token_dtype(tokenizer)

    def __call__(self, texts: Sequence[str]) -> tuple[Ids, Counts]:
        ids = self.lists(texts)
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), self._dtype, int(counts.sum())), counts

    def lists(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        """Returns the ids of each text."""
        return [one.ids for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


class WordEncoder(LibraryEncoder):
    """A BERT tokenizer, by remembered words; `encoder_of` decides which tokenizers qualify."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._words: dict[str, Sequence[int]] = {}
        self._held_bytes = 0

    def lists(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        # A text with a character that the two split at differently is taken for one long word.
        split = [text.split() if not any(map(text.__contains__, _NOT_SPACES)) else [text] for text in texts]
        new = list({*chain.from_iterable(split)} - self._words.keys())
        self._words |= zip(new, super().lists(new), strict=True)
        self._held_bytes += sum(map(len, new)) + _WORD_BYTES * len(new)
        ids_of = self._words.__getitem__
        found = [list(chain.from_iterable(map(ids_of, words))) for words in split]
        # The words that came first stay, which are the frequent ones.
        while self._held_bytes > _BUDGET_BYTES:
            word, _ = self._words.popitem()
            self._held_bytes -= len(word) + _WORD_BYTES
        return found


def ends_of(counts: Counts) -> Counts:
    """(N+1,) where each of N things laid one after the other begins, and where the last ends."""
    ends = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=ends[1:])
    return ends


def _splits_at_spaces(described: Mapping[str, Any]) -> bool:
    normalizer, splitter = described["normalizer"] or {}, described["pre_tokenizer"] or {}
    return (
        normalizer.get("type") == "BertNormalizer"
        and normalizer["clean_text"]
        and splitter.get("type") == "BertPreTokenizer"
        and described["model"]["type"] == "WordPiece"
        and len(described["added_tokens"]) > 0
        # Looked for in the raw text, wherever they stand; and never taken for a word or a sign.
        and not any(
            token["normalized"]
            or token["lstrip"]
            or token["rstrip"]
            or token["single_word"]
            or token["content"].isalnum()
            or len(token["content"]) < 2
            or len(token["content"].split()) != 1
            or any(character in token["content"] for character in _NOT_SPACES)
            for token in described["added_tokens"]
        )
    )
