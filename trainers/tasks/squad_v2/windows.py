"""Long contexts cut into overlapping windows, each with the whole question before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from trainers.data.tokens import TokenSet, frame_of, token_dtype
from trainers.errors import BadDataError
from trainers.tasks.base import Progress

_CHUNK = 1024

Span = tuple[int, int]  # First and last (inclusive) of something


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    start: int


@dataclass(frozen=True, slots=True)
class SquadQuestion:
    where: str  # File, place and id, for messages
    id: str
    title: str  # Title of the article; empty when it has none
    context: str
    text: str
    answers: tuple[Answer, ...]  # The first is learned; none = the context does not answer it


class Contexts:
    """Distinct contexts: i is `ids[offsets[i]:offsets[i+1]]`; `chars` (T, 2) are the tokens' places."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        lengths: list[int] = []
        ids: list[npt.NDArray[np.integer]] = []
        chars: list[npt.NDArray[np.int32]] = []
        for start in range(0, len(texts), _CHUNK):
            chunk = list(texts[start : start + _CHUNK])
            encoded = tokenizer.encode_batch(chunk, add_special_tokens=False)
            lengths.extend(len(one) for one in encoded)
            ids.extend(np.array(one.ids, dtype=token_dtype(tokenizer)) for one in encoded)
            chars.extend(_places(text, one.offsets) for text, one in zip(chunk, encoded, strict=True))
        self.offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        self.ids, self.chars = np.concatenate(ids), np.concatenate(chars)

    def span(self, context: int, answer: Answer) -> Span | None:
        """Returns the tokens of a context that cover an answer; None when none does."""
        chars = self.chars[self.offsets[context] : self.offsets[context + 1]]
        first = int(np.searchsorted(chars[:, 1], answer.start, side="right"))
        last = int(np.searchsorted(chars[:, 0], answer.start + len(answer.text), side="left")) - 1
        return (first, last) if first <= last else None


def _places(text: str, offsets: Sequence[tuple[int, int]]) -> npt.NDArray[np.int32]:
    """(T, 2) places of tokens in a text, without a space that a word begins with."""
    places = np.array(offsets, dtype=np.int32).reshape(-1, 2)
    if len(places):
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        first = np.minimum(places[:, 0], len(codes) - 1)
        places[:, 0] += (codes[first] == ord(" ")) & (places[:, 1] - places[:, 0] > 1)
    return places


def windows(length: int, room: int, overlap: int) -> Iterable[Span]:
    """Yields begin and end (exclusive) of windows of `room` tokens; neighbours share `overlap`."""
    start = 0
    while True:
        yield start, min(start + room, length)
        if start + room >= length:
            return
        start += room - overlap


def tokenise_windows(
    questions: Sequence[SquadQuestion], tokenizer: Tokenizer, max_length: int, stride: int, progress: Progress
) -> TokenSet:
    """Returns all windows of all questions, those of one question one after the other.

    A window is `[CLS] question [SEP] part of the context [SEP]`. Its label is the first and the last token of
    the first answer, counted in the window, or (0, 0), the `[CLS]`, when the answer is not wholly in it.
    Neighbours share `stride` tokens of the context, or half of what the question leaves. Columns: `question`
    (N,); `chars_at` (N,), such that the characters of token `i` are `chars[chars_at + i]`; `chars` (T, 2),
    positions in the context.
    """
    tokenizer.no_padding()
    tokenizer.no_truncation()
    before, between, after_both = frame_of(tokenizer, pairs=True).specials
    numbers = {text: i for i, text in enumerate(dict.fromkeys(one.context for one in questions))}
    contexts = Contexts(list(numbers), tokenizer)
    dtype = token_dtype(tokenizer)
    tail = np.array(after_both, dtype=dtype)
    pieces: list[npt.NDArray[np.integer]] = []
    lengths: list[int] = []
    labels: list[Span] = []
    second_at: list[int] = []
    of_question: list[int] = []
    chars_at: list[int] = []
    for start in range(0, len(questions), _CHUNK):
        chunk = questions[start : start + _CHUNK]
        encoded = tokenizer.encode_batch_fast([one.text for one in chunk], add_special_tokens=False)
        for i, (one, query) in enumerate(zip(chunk, encoded, strict=True), start):
            context = numbers[one.context]
            begin, end = int(contexts.offsets[context]), int(contexts.offsets[context + 1])
            answer = _answer_tokens(one, contexts, context)
            head = np.array([*before, *query.ids, *between], dtype=dtype)
            room = max_length - len(head) - len(tail)
            if room < 1:
                raise BadDataError(
                    f"{one.where}, field question: {len(query.ids)} tokens leave no room for the context "
                    f"in {max_length}; raise task.max_length or shorten the question"
                )
            if begin == end:
                raise BadDataError(f"{one.where}, field context: no tokens; remove the question")
            for first, after in windows(end - begin, room, min(stride, room // 2)):
                pieces.append(np.concatenate((head, contexts.ids[begin + first : begin + after], tail)))
                lengths.append(len(pieces[-1]))
                inside = answer is not None and first <= answer[0] and answer[1] < after
                shift = len(head) - first
                labels.append((answer[0] + shift, answer[1] + shift) if answer and inside else (0, 0))
                second_at.append(len(head))
                of_question.append(i)
                chars_at.append(begin - shift)
        progress(start + len(chunk))
    return TokenSet(
        np.concatenate(pieces),
        np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
        np.array(labels, dtype=np.int64),
        np.array(second_at, dtype=np.int64),
        {
            "question": np.array(of_question, dtype=np.int64),
            "chars_at": np.array(chars_at, dtype=np.int64),
            "chars": contexts.chars,
        },
    )


def _answer_tokens(question: SquadQuestion, contexts: Contexts, context: int) -> Span | None:
    if not question.answers:
        return None
    span = contexts.span(context, question.answers[0])
    if span is None:
        raise BadDataError(
            f"{question.where}, field answers: {question.answers[0].text!r} has no token in the vocabulary; "
            "remove the answer"
        )
    return span
