"""Plain text as sequences whose hidden tokens are guessed.

The text is read, tokenised and packed piece by piece. What is hidden is drawn again each epoch.
"""

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from trainers.config import RunConfig, TaskConfig
from trainers.data import tokenizers
from trainers.data.cache import FileSet, digest_of, digest_text
from trainers.data.encoding import encoder_of, token_dtype
from trainers.data.formats import Row
from trainers.data.layouts import TEST, TRAIN, VALIDATION, SplitRule, split_rule
from trainers.data.prose import UNKNOWN, detokenised
from trainers.data.selection import hashes, normal, numbered_names
from trainers.data.sources import SkippedRows, Source, open_source, read_rows, source_identity
from trainers.data.storage import prepared_folder
from trainers.data.tokens import Packer, TokenSet, TokenWriter, frame_of
from trainers.errors import BadDataError
from trainers.model_kinds.heads import VocabularyHead
from trainers.models.origin import VOCABULARY_SIZE, Origin
from trainers.tasks.base import Carried, Facts, Judged, Observed, Prepared, Task
from trainers.tasks.dataset import Pace, overlap_policy, tokenizer_file
from trainers.tasks.mlm import MaskFields
from trainers.tasks.scores import Batch, Tensor, cross_entropies

_LAYOUT = 2  # Grows when the cache's content changes for the same input
_UNITS, _NOTES = "test.units.json", "notes.json"
_BATCH_CHARACTERS = 1 << 20  # Text that is tokenised at a time
_SAMPLE_CHARACTERS = 16 << 20  # Text that a vocabulary is trained on: more changes hardly a piece


class Mlm(Task):
    def prepare(self, config: RunConfig, origin: Origin, report: Callable[[str], None]) -> Prepared:
        # Imported here: tasks are read without torch.
        from trainers.data.masking import Masking

        task = config.task
        source = open_source(task, config.workspace)
        corpus = _Corpus(source, task)
        texts_identity = corpus.identity(source)
        key = digest_of([_LAYOUT, texts_identity, VOCABULARY_SIZE, _SAMPLE_CHARACTERS])
        file = tokenizer_file(origin, lambda: _beginning(corpus), key, config.workspace, report)
        tokenizer = tokenizers.load(file.parent)
        special = tokenizers.SpecialTokens.of(tokenizer, file.parent)
        sizes = {f"{part}_examples": _wanted(task, part) for part in corpus.parts}
        identity = {
            **texts_identity,
            **sizes,
            "tokenizer.sha256": digest_text(tokenizer.to_str()),
            "max_length": task.max_length,
        }

        def build(folder: Path) -> None:
            # The test part first: what it has, the others leave out.
            unknown = special.names.get("unk_token", "")
            for part in reversed(corpus.parts):
                corpus.pack(part, tokenizer, unknown, folder, report)
            if TEST in corpus.parts:
                (folder / _UNITS).write_text(
                    json.dumps(_sequence_names(TokenSet.open(folder, TEST))), encoding="utf-8"
                )
            (folder / _NOTES).write_text(json.dumps(corpus.notes), encoding="utf-8")

        key = digest_of([_LAYOUT, identity])
        folder = prepared_folder(config.workspace, "tokens", key, build, report)
        for line in json.loads((folder / _NOTES).read_text(encoding="utf-8")):
            report(line)
        parts = {part: TokenSet.open(folder, part) for part in corpus.parts}
        test = parts.get(TEST)
        own = task.own(MaskFields)
        return Prepared(
            parts[TRAIN],
            parts[VALIDATION],
            file,
            tokenizers.vocabulary_size(tokenizer),
            special.id_of("pad_token"),
            {
                **identity,
                "masked_fraction": own.masked_fraction,
                "whole_word": own.whole_word,
                **{f"{part}.selected": len(tokens) for part, tokens in parts.items()},
            },
            VocabularyHead(),
            GuessScoring(len(parts[VALIDATION])),
            Masking(tokenizer, special, fraction=own.masked_fraction, whole_word=own.whole_word),
            test=test,
            test_scoring=None if test is None else GuessScoring(len(test), losses=True),
            test_units=None if test is None else folder / _UNITS,
        )

    def texts_of(self, row: Row, task: TaskConfig) -> Sequence[str]:
        text = _text_of(row)
        return () if text is None else (text,)

    def check_parts(self, source: Source[object], task: TaskConfig) -> None:
        corpus = _Corpus(source, task)
        for part in corpus.parts:
            if next(corpus.texts(part), None) is None:
                raise corpus.nothing(part)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns the cross-entropy, the mean over each sequence's guessed tokens, summed over sequences."""
        of_tokens = cross_entropies(logits, _right(batch), self.cross_entropy)
        return (of_tokens / batch.guesses_of_sequence()).sum()


def _right(batch: Batch) -> Tensor:
    assert batch.guessed is not None
    return batch.labels.flatten().index_select(0, batch.guessed)


class GuessScoring:
    """Accuracy and mean reciprocal rank over all guessed tokens; `judge` needs `losses`."""

    _TOKENS = 512  # Guesses that are ranked at a time; more only take memory

    def __init__(self, sequences: int, *, losses: bool = False) -> None:
        self.units, self._losses = sequences, losses

    def observe(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns (B, 4) per sequence: guesses, right ones, sums of 1 / rank of the right token and its loss.

        Tokens with the same logit share their mean rank; only one that stands alone at the top is right.
        """
        import torch

        right = _right(batch)
        rows = []
        for start in range(0, len(right), self._TOKENS):
            part = logits[start : start + self._TOKENS].float()
            own = part.gather(1, right[start : start + self._TOKENS, None])
            below, equal = (part < own).sum(1), (part == own).sum(1)
            # Counted from the end, so that a NaN ranks last.
            rank = part.shape[1] - below - (equal - 1) * 0.5
            loss = part.logsumexp(1) - own[:, 0] if self._losses else torch.zeros_like(rank)
            rows.append(torch.stack([torch.ones_like(rank), (rank == 1.0).float(), 1.0 / rank, loss], dim=1))
        of_sequences = logits.new_zeros((len(batch.labels), 4), dtype=torch.float32)
        if rows:
            assert batch.guessed is not None
            of_sequences.index_add_(0, batch.guessed // batch.labels.shape[1], torch.cat(rows))
        return of_sequences

    def score(self, observed: Observed, carried: Carried | None = None) -> dict[str, float]:
        guesses, right, reciprocal, _ = observed.astype(np.float64).sum(0)
        return {"accuracy": float(right / guesses), "mrr": float(reciprocal / guesses)}

    def judge(self, observed: Observed, carried: Carried) -> Judged:
        """Returns the right guesses of each sequence, and all of them; its loss is the score."""
        guesses, right, _, loss = observed.astype(np.float64).T
        return Judged(
            np.arange(len(observed)),
            loss / np.maximum(guesses, 1.0),
            right.astype(np.int64).tolist(),
            guesses.astype(np.int64).tolist(),
        )


class _Corpus:
    """The texts of a dataset, by part.

    A missing test part is every second text of the validation part, or a share of the training part; then a
    validation part is made of the training part. Texts are divided by hash, so that none is in two parts.
    """

    def __init__(self, source: Source[object], task: TaskConfig) -> None:
        self._source, self._task = source, task
        self._divided = VALIDATION not in source.parts
        self._rule = split_rule(source.parts, task.test)
        self.parts = (TRAIN, VALIDATION) if self._rule is SplitRule.none else (TRAIN, VALIDATION, TEST)
        self.name = source.name
        self.form = task.own(MaskFields).detokenise
        self.notes: list[str] = []
        self._seen: dict[int, str] = {}

    def identity(self, source: Source[FileSet]) -> Facts:
        task = self._task
        return {
            "task": task.name,
            "validation_fraction": task.validation_fraction if self._divided else "own part",
            "split_seed": task.split_seed if self._divided else "own part",
            "overlap": overlap_policy(task),
            "detokenise": self.form,
            **source_identity(source, task),
        }

    def texts(self, part: str) -> Generator[str]:
        """Yields the texts of a part in the order of the files; blank ones are left out."""
        skipped = SkippedRows()
        for text in read_rows(self._source.rows(self._read_from(part)), _text_of, self._task, skipped):
            if text is not None and self._part_of(text, part) == part:
                yield detokenised(text, self.form)
        self.notes.extend(line for line in skipped.lines(part) if line not in self.notes)

    def _read_from(self, part: str) -> str:
        if part == TEST and self._rule is SplitRule.half:
            return VALIDATION
        made = (part == TEST and self._rule is SplitRule.held_out) or (part == VALIDATION and self._divided)
        return TRAIN if made else part

    def _part_of(self, text: str, part: str) -> str:
        """Returns the part of the run that a text belongs to, of those that are read from where `part` is."""
        place = self._read_from(part)
        if place == VALIDATION and self._rule is SplitRule.half:
            return TEST if _share(text) < 0.5 else VALIDATION
        if place == TRAIN:
            fraction = self._task.validation_fraction
            if self._rule is SplitRule.held_out and _share(text) < fraction:
                return TEST
            if self._divided and _share(text, self._task.split_seed.to_bytes(8, "little")) < fraction:
                return VALIDATION
        return place

    def pieces(self, part: str) -> Iterator[list[str]]:
        piece: list[str] = []
        size = 0
        with closing(self.texts(part)) as texts:
            for text in texts:
                piece.append(text)
                size += len(text)
                if size >= _BATCH_CHARACTERS:
                    yield piece
                    piece, size = [], 0
        if piece:
            yield piece

    def pieces_apart(self, part: str) -> Generator[list[str]]:
        """Yields a part's texts without those of later parts, which must have been read before."""
        policy = overlap_policy(self._task)
        if policy == "allow":
            yield from self.pieces(part)
            return
        own: dict[int, str] = {}
        dropped = 0
        try:
            for piece in self.pieces(part):
                keys = hashes(map(normal, piece)).tolist()
                rest = [text for text, key in zip(piece, keys, strict=True) if key not in self._seen]
                if len(rest) < len(piece) and policy == "error":
                    text, other = next(
                        (t, self._seen[k]) for t, k in zip(piece, keys, strict=True) if k in self._seen
                    )
                    raise BadDataError(
                        f"{self.name}: the same text is in the {part} and the {other} part: "
                        f"{text[:80]!r}; remove it from one, or set task.overlap: drop"
                    )
                dropped += len(piece) - len(rest)
                if part != TRAIN:
                    own.update(dict.fromkeys(keys, part))
                if rest:
                    yield rest
        finally:
            self._seen = {**own, **self._seen}
            if dropped:
                self.notes.append(
                    f"{part}: {dropped} texts dropped because they are also in a later part (task.overlap)"
                )

    def pack(
        self, part: str, tokenizer: Tokenizer, unknown: str, folder: Path, report: Callable[[str], None]
    ) -> None:
        """Writes a part's sequences; what later parts have is left out."""
        wanted = _wanted(self._task, part)
        encode, dtype = encoder_of(tokenizer), token_dtype(tokenizer)
        (begin,), (separator,) = frame_of(tokenizer, pairs=False)
        packer = Packer(self._task.max_length, begin=begin, separator=separator, dtype=dtype)
        progress = Pace(report, f"{part}: tokenised and packed", wanted, "sequences")
        done = 0
        with closing(TokenWriter(folder, part, dtype)) as writer, closing(self.pieces_apart(part)) as pieces:
            for texts in pieces:
                if self.form != "none":
                    texts = [text.replace(UNKNOWN, unknown) for text in texts]
                full = packer.add(*encode(texts))[: wanted - done]
                writer.append(full, np.full(len(full), self._task.max_length))
                done += len(full)
                progress(done)
                if done == wanted:
                    break
            else:
                rest = packer.rest()
                if len(rest):
                    writer.append(rest, np.array([len(rest)]))
                    done += 1
            if not done:
                raise self.nothing(part)
            exact = self._task.examples_of(part)
            if exact is not None and done < exact:
                raise BadDataError(
                    f"{part}_examples is {exact}, but the {part} part packs into {done} sequences of "
                    f"{self._task.max_length} tokens; lower task.{part}_examples"
                )
            writer.finish()
        report(f"{part}: {done} sequences of {self._task.max_length} tokens, {writer.tokens} tokens")

    def nothing(self, part: str) -> BadDataError:
        if self._read_from(part) != part:
            return BadDataError(
                f"{self.name}: too few texts to hold out a {part} part; add texts, one per line, "
                f"or a file {part}.txt" + (", or set task.test: none" if part == TEST else "")
            )
        advice = "; add texts, remove the file, or set task.test: none" if part == TEST else ""
        return BadDataError(f"{self.name}: the {part} part contains no text{advice}")


def _text_of(row: Row) -> str | None:
    value = row.fields.get("text")
    return None if isinstance(value, str) and not value.strip() else row.text("text")


def _share(text: str, key: bytes = b"") -> float:
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=key).digest()
    return float(int.from_bytes(digest, "little") / 2**64)


def _sequence_names(tokens: TokenSet) -> list[str]:
    contents = (
        np.ascontiguousarray(tokens.tokens[begin:end], dtype=np.int64).tobytes()
        for begin, end in pairwise(tokens.offsets.tolist())
    )
    return list(numbered_names(hashlib.blake2b(content, digest_size=8).hexdigest() for content in contents))


def _wanted(task: TaskConfig, part: str) -> int:
    return task.examples_of(part) or task.info.default_examples[part]


def _beginning(corpus: _Corpus) -> list[str]:
    texts: list[str] = []
    size = 0
    for piece in corpus.pieces(TRAIN):
        # A vocabulary has its own token for what is unknown.
        texts.extend(piece if corpus.form == "none" else (text.replace(UNKNOWN, "") for text in piece))
        size += sum(map(len, piece))
        if size >= _SAMPLE_CHARACTERS:
            break
    if not texts:
        raise corpus.nothing(TRAIN)
    return texts
