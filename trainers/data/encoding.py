"""Texts to token ids, fast: a BERT tokenizer's answer is looked up once per word, not once per text.

A BERT tokenizer treats text between two white spaces on its own, and in running text most of that has been
seen before. So each distinct piece between spaces is encoded once and remembered under a number; a batch
becomes a list of numbers, and numpy gathers the tokens. The ids are exactly the library's: what the short cut
cannot guarantee goes through the library, as do all texts of other tokenizers.
"""

import json
import re
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
_WORD_BYTES = 150  # What a remembered word takes besides its characters
_NOT_SPACES = "\x0b\x0c\x1c\x1d\x1e\x1f\x85"  # Characters that `str.split` splits at, but that BERT deletes
_PIECES_KEPT = 1 << 18  # Most parts of words whose tokens are remembered
_PRINTABLE = re.compile(r"[!-~]+")
_PIECES = re.compile(r"[0-9A-Za-z]+|[^0-9A-Za-z]")
_PIECE = re.compile(r"[0-9A-Za-z]+|[!-~]")


Encoder = Callable[[Sequence[str]], tuple[Ids, Counts]]
"""Token ids of all texts one after the other, without special tokens, and (N,) how many each has."""


def encoder_of(tokenizer: Tokenizer) -> Encoder:
    """Returns the fastest encoder that gives this tokenizer's ids; switches padding and truncation off."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    described = json.loads(tokenizer.to_str())
    return WordEncoder(tokenizer, described) if _splits_at_spaces(described) else LibraryEncoder(tokenizer)


def token_dtype(tokenizer: Tokenizer) -> type[np.integer]:
    return np.uint16 if vocabulary_size(tokenizer) <= np.iinfo(np.uint16).max else np.int32


class LibraryEncoder:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._dtype = tokenizer, token_dtype(tokenizer)

    def __call__(self, texts: Sequence[str]) -> tuple[Ids, Counts]:
        ids = [one.ids for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        counts = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), self._dtype, int(counts.sum())), counts


class WordEncoder:
    """A BERT tokenizer, by remembered words; `encoder_of` decides which tokenizers qualify."""

    def __init__(self, tokenizer: Tokenizer, described: Mapping[str, Any]) -> None:
        self._library = LibraryEncoder(tokenizer)
        self._dtype = token_dtype(tokenizer)
        self._lowercase = bool(described["normalizer"]["lowercase"])
        self._added = re.compile("|".join(re.escape(one["content"]) for one in described["added_tokens"]))
        longest = int(described["model"]["max_input_chars_per_word"])
        self._pieces: dict[str, Sequence[int]] = {
            piece: (number,)
            for piece, number in described["model"]["vocab"].items()
            if len(piece) <= longest and _PIECE.fullmatch(piece)
        }
        """Tokens of what the tokenizer never looks beyond: ASCII words, single signs, other words whole."""
        self._fixed_pieces = len(self._pieces)
        self._words = _Numbered()
        self._tokens = _Growing(self._dtype)
        self._ends = _Growing(np.int64)
        self._ends.extend(np.zeros(1, dtype=np.int64))
        self._held_bytes = 0

    def __call__(self, texts: Sequence[str]) -> tuple[Ids, Counts]:
        split = self._split(texts)
        per_text = np.fromiter(map(len, split), np.int64, len(split))
        words = np.fromiter(
            map(self._words.__getitem__, chain.from_iterable(split)), np.int64, int(per_text.sum())
        )
        self._learn()
        ends = self._ends.view()
        starts = ends[words]
        counts = ends[words + 1] - starts
        token_ends = ends_of(counts)
        places = np.arange(token_ends[-1]) + np.repeat(starts - token_ends[:-1], counts)
        tokens = self._tokens.view()[places]
        self._forget()
        return tokens, np.diff(token_ends[ends_of(per_text)])

    def _split(self, texts: Sequence[str]) -> list[list[str]]:
        joined = "\n".join(texts)
        if not any(character in joined for character in _NOT_SPACES):
            return [text.split() for text in texts]
        # A text with such a character is taken for one long word, which the library encodes.
        return [
            [text] if any(character in text for character in _NOT_SPACES) else text.split() for text in texts
        ]

    def _learn(self) -> None:
        new, self._words.new = self._words.new, []
        if not new:
            return
        divided = [self._divide(word) for word in new]
        unknown = [
            piece for piece in dict.fromkeys(chain.from_iterable(divided)) if piece not in self._pieces
        ]
        tokens, counts = self._library(unknown)
        ends = ends_of(counts)
        listed = tokens.tolist()
        for piece, start, end in zip(unknown, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            self._pieces[piece] = listed[start:end]
        of_pieces = self._pieces
        tokens_of = [[number for piece in pieces for number in of_pieces[piece]] for pieces in divided]
        lengths = np.fromiter(map(len, tokens_of), np.int64, len(tokens_of))
        self._ends.extend(self._ends.view()[-1] + np.cumsum(lengths))
        self._tokens.extend(np.fromiter(chain.from_iterable(tokens_of), self._dtype, int(lengths.sum())))
        self._held_bytes += sum(map(len, new)) + _WORD_BYTES * len(new)

    def _divide(self, word: str) -> Sequence[str]:
        if _PRINTABLE.fullmatch(word) and not self._added.search(word):
            return _PIECES.findall(word.lower() if self._lowercase else word)
        return (word,)

    def _forget(self) -> None:
        """Keeps what fits: the words that came first, which are the frequent ones."""
        while self._held_bytes > _BUDGET_BYTES:
            word, number = self._words.popitem()
            self._held_bytes -= len(word) + _WORD_BYTES
            self._ends.cut(number + 1)
        self._tokens.cut(int(self._ends.view()[-1]))
        while len(self._pieces) > max(self._fixed_pieces, _PIECES_KEPT):
            self._pieces.popitem()


class _Numbered(dict[str, int]):
    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.new.append(word)
        return number


class _Growing:
    """A flat array that grows at its end; a view of it is invalid once it has grown."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self._room: npt.NDArray[Any] = np.empty(1024, dtype=dtype)
        self._used = 0

    def view(self) -> npt.NDArray[Any]:
        return self._room[: self._used]

    def extend(self, values: npt.NDArray[Any]) -> None:
        wanted = self._used + len(values)
        if wanted > len(self._room):
            room = np.empty(2 * wanted, dtype=self._room.dtype)
            room[: self._used] = self.view()
            self._room = room
        self._room[self._used : wanted] = values
        self._used = wanted

    def cut(self, length: int) -> None:
        self._used = length


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
