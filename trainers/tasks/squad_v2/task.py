import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from trainers.config import TaskConfig
from trainers.data.encoding import ends_of, token_dtype
from trainers.data.formats import Row
from trainers.data.selection import Indices, held_out_groups, numbers_of
from trainers.data.tokens import TokenSet, frame_of
from trainers.errors import BadDataError
from trainers.model_kinds.heads import SpanHead
from trainers.tasks.base import Facts, Parts, Progress, Scoring
from trainers.tasks.dataset import DatasetTask, Tokenising
from trainers.tasks.scores import Batch, Tensor, cross_entropies
from trainers.tasks.squad_v2 import SpanFields
from trainers.tasks.squad_v2.scoring import GoldQuestions, SpanScoring

_CHUNK = 1024
_STRIDE = 128
Span = tuple[int, int]  # First and last (inclusive) of something


@dataclass(frozen=True, slots=True)
class AnswerText:
    text: str
    start: int


@dataclass(frozen=True, slots=True)
class SquadQuestion:
    where: str  # File, place and id, for messages
    id: str
    title: str  # Title of the article; empty when it has none
    context: str
    text: str
    answers: tuple[AnswerText, ...]  # The first is learned; none = the context does not answer it

    @property
    def texts(self) -> tuple[str, str]:
        return self.text, self.context

    @property
    def stratum(self) -> int:
        return int(bool(self.answers))


class SquadV2(DatasetTask[SquadQuestion, SpanHead]):
    """Find the span that answers, or none; an example is a window, sizes count questions."""

    def example(self, row: Row, task: TaskConfig) -> SquadQuestion:
        number = str(row.label("id")).strip()
        if not number:
            raise row.refusal("id", "empty; give every question a unique id")
        row = replace(row, where=f"{row.where}, question {number}")
        text, context = row.text("question"), row.text("context")
        answers = _answers(row, context)
        impossible = row.fields.get("is_impossible")
        if isinstance(impossible, bool) and impossible == bool(answers):
            raise row.refusal(
                "is_impossible", f"{str(impossible).lower()}, but the question has {len(answers)} answers"
            )
        title = row.fields.get("title")
        # Rows of a table repeat the context for each question: it is kept once.
        return SquadQuestion(
            row.where, number, title if isinstance(title, str) else "", sys.intern(context), text, answers
        )

    def settings(self, task: TaskConfig) -> Facts:
        return {"stride": _stride(task)}

    def divide(
        self, parts: Mapping[str, list[SquadQuestion]], task: TaskConfig
    ) -> dict[str, list[SquadQuestion]]:
        for questions in parts.values():
            _refuse_duplicates(questions)
        return super().divide(parts, task)

    def units(self, examples: Sequence[SquadQuestion]) -> Sequence[str]:
        """Returns articles, joined where they share a context, by title; contexts if there is one article."""
        groups = _articles(examples).tolist()
        names: dict[int, str] = {}
        for group, one in zip(groups, examples, strict=True):
            name = one.title or one.context
            names[group] = min(names.get(group, name), name)
        if len(set(names.values())) == 1:
            return [one.context for one in examples]
        return [names[group] for group in groups]

    def split_stratum(self, example: SquadQuestion) -> int:
        """Returns 0: there are too few articles to balance them."""
        return 0

    def unit_names(self, examples: Sequence[SquadQuestion]) -> Iterable[str]:
        return [one.id for one in examples]

    def hold_out(self, whole: Sequence[SquadQuestion], task: TaskConfig) -> tuple[Indices, Indices]:
        """Holds out whole articles, or contexts where there is one article."""
        return held_out_groups(_articles(whole), task.validation_fraction, task.split_seed)

    def review(self, parts: Parts[SquadQuestion], head: SpanHead, task: TaskConfig) -> Iterable[str]:
        for part, questions in parts.items():
            answered = sum(one.stratum for one in questions)
            if answered in (0, len(questions)):
                share = "all have an answer" if answered else "none has an answer"
                yield f"{part}: of {len(questions)} questions {share}"

    def tokenise(self, examples: Sequence[SquadQuestion], head: SpanHead, by: Tokenising) -> TokenSet:
        return tokenise_windows(examples, by.tokenizer, by.task.max_length, _stride(by.task), by.progress)

    def write_gold(self, gold: Path, examples: Sequence[SquadQuestion]) -> None:
        answers = [[answer.text for answer in one.answers] for one in examples]
        GoldQuestions([one.context for one in examples], answers).write(gold)

    def stand_in(self, row: Row, head: SpanHead, task: TaskConfig) -> Mapping[str, Any] | None:
        own = {"id": row.where} if row.lacks("id") else {}
        found = super().stand_in(row, head, task)
        return None if found is None else {**own, **found, "is_impossible": None}

    def any_truth(self, head: SpanHead, task: TaskConfig) -> list[Any]:
        return []

    def head(self, parts: Parts[SquadQuestion], chosen: Parts[SquadQuestion], task: TaskConfig) -> SpanHead:
        return SpanHead()

    def scoring(self, tokens: TokenSet, head: SpanHead, task: TaskConfig, gold: Path) -> Scoring:
        return SpanScoring(tokens, GoldQuestions.read(gold), task.own(SpanFields).max_answer_tokens)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns the mean cross-entropy of first and last token, summed over windows; padding cannot win."""
        import torch

        scores = logits.float()
        if batch.attention_mask is not None:
            scores = scores.masked_fill(~batch.attention_mask[:, :, None], -torch.inf)
        # Positions are the classes, in (2 B, S): with more dimensions a GPU has no deterministic kernel.
        scores = scores.transpose(1, 2).flatten(0, 1)
        return cross_entropies(scores, batch.labels.flatten(), self.cross_entropy).sum() / 2


def _stride(task: TaskConfig) -> int:
    return task.own(SpanFields).stride or min(_STRIDE, task.max_length // 3)


def _answers(row: Row, context: str) -> tuple[AnswerText, ...]:
    """Reads answers as a list of objects, an object of lists (the hub's form), or either as JSON."""
    value: Any = row.fields.get("answers")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise row.refusal("answers", f"not JSON ({error})") from None
    if isinstance(value, Mapping):
        texts, starts = value.get("text"), value.get("answer_start")
        if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
            raise row.refusal("answers", "text and answer_start are not two lists of the same length")
        pairs = list(zip(texts, starts, strict=True))
    elif isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        pairs = [(one.get("text"), one.get("answer_start")) for one in value]
    else:
        raise row.refusal(
            "answers", 'missing or malformed; expected {"text": [...], "answer_start": [...]}, empty if none'
        )
    return tuple(_answer(row, context, text, start) for text, start in pairs)


def _answer(row: Row, context: str, text: Any, start: Any) -> AnswerText:
    if not isinstance(text, str) or not text.strip():
        raise row.refusal("answers", f"{text!r} is not the text of an answer")
    if not isinstance(start, int) or isinstance(start, bool):
        raise row.refusal("answers", f"answer_start {start!r} of {text!r} is not a whole number")
    if start < 0 or context[start : start + len(text)] != text:
        place = context.find(text)
        hint = f"it occurs at {place}" if place >= 0 else "it does not occur"
        raise row.refusal("answers", f"{text!r} is not at character {start} of the context ({hint})")
    return AnswerText(text, start)


def _refuse_duplicates(questions: Sequence[SquadQuestion]) -> None:
    seen: dict[str, str] = {}
    for one in questions:
        if one.id in seen:
            raise BadDataError(
                f"{one.where}, field id: already used ({seen[one.id]}); give each question a unique id"
            )
        seen[one.id] = one.where


def _articles(questions: Sequence[SquadQuestion]) -> Indices:
    """(N,) the article of each question, joined by shared contexts; the context if that is one group."""
    # Imported here: only a dataset without validation part pays for the import.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    contexts = numbers_of([one.context for one in questions])
    titles = numbers_of([one.title or one.context for one in questions])
    size = max(contexts.max(), titles.max()) + 1
    # Contexts and titles are the nodes: an article may repeat a context of another.
    edges = coo_array((np.ones(len(questions)), (contexts, titles + size)), shape=(2 * size, 2 * size))
    groups = connected_components(edges, directed=False)[1].astype(np.int64)[contexts]
    return contexts if len(np.unique(groups)) == 1 else groups


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
        self.offsets = ends_of(np.array(lengths))
        self.ids, self.chars = np.concatenate(ids), np.concatenate(chars)

    def span(self, context: int, answer: AnswerText) -> Span | None:
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
    before, between, after_both = frame_of(tokenizer, pairs=True)
    numbers = {text: i for i, text in enumerate(dict.fromkeys(one.context for one in questions))}
    contexts = Contexts(list(numbers), tokenizer)
    dtype = token_dtype(tokenizer)
    tail = np.array(after_both, dtype=dtype)
    made: list[tuple[npt.NDArray[np.integer], Span, int, int, int]] = []
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
                window = np.concatenate((head, contexts.ids[begin + first : begin + after], tail))
                inside = answer is not None and first <= answer[0] and answer[1] < after
                shift = len(head) - first
                label = (answer[0] + shift, answer[1] + shift) if answer and inside else (0, 0)
                made.append((window, label, len(head), i, begin - shift))
        progress(start + len(chunk))
    pieces, labels, second_at, of_question, chars_at = zip(*made, strict=True)
    return TokenSet(
        np.concatenate(pieces),
        ends_of(np.array([len(window) for window in pieces])),
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
