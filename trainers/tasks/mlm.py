"""Masked language modelling over plain text (Devlin et al., 2019): some tokens are hidden and guessed.

The text is read once, tokenised and packed into sequences of one length that lie in one mapped
file; neither step holds more of it in memory than a piece. What is hidden is drawn anew each epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from trainers import config as configuration
from trainers.config import RunConfig
from trainers.data import tokenizers
from trainers.data.batches import Batch
from trainers.data.cache import cached_folder
from trainers.data.encoding import encoder_of, token_dtype
from trainers.data.fingerprint import digest_of, digest_text
from trainers.data.layouts import OFFICIAL
from trainers.data.masking import Masking
from trainers.data.packing import Packer
from trainers.data.sources import Source, open_source, source_identity
from trainers.data.tokens import TokenSet, TokenWriter
from trainers.errors import BadDataError
from trainers.models.heads import VocabularyHead
from trainers.models.origin import VOCABULARY_SIZE, Folder, Origin
from trainers.tasks.base import Prepared, Task
from trainers.tasks.dataset import Pace, padding_id

EXAMPLES: Mapping[str, int] = {"train": 65_536, "validation": 8_192}
"""Sequences of each part when the spec does not say."""
_LAYOUT = 1
"""Grows when the cache's content changes for the same input."""
_MASKED_FRACTION = 0.15
_BATCH_CHARACTERS = 1 << 20
"""Text that is tokenised at a time."""
_SAMPLE_CHARACTERS = 16 << 20
"""Text that a vocabulary is trained on: more changes hardly a piece."""


class Mlm(Task):
    """Sequences of `task.max_length` tokens; `Salesforce/wikitext` on the hub."""

    headline = "validation_loss"
    higher_is_better = False
    timed = True
    hub_id = "Salesforce/wikitext:wikitext-2-raw-v1"
    layouts = OFFICIAL[configuration.TaskName.mlm]

    def prepare(self, config: RunConfig, origin: Origin, report: Callable[[str], None]) -> Prepared:
        """See `Task.prepare`. What is already in the cache is neither read nor tokenised."""
        task = config.task
        corpus = _Corpus(open_source(task, config.workspace, hub_id=self.hub_id, layouts=self.layouts), task)
        cache = Path(config.workspace.cache)
        file = _tokenizer_file(origin, corpus, cache, report)
        tokenizer = tokenizers.load(file.parent)
        sizes = {"train_examples": _wanted(task, "train"), "validation_examples": _wanted(task, "validation")}
        identity = {
            **corpus.identity,
            **sizes,
            "tokenizer.sha256": digest_text(tokenizer.to_str()),
            "max_length": task.max_length,
        }

        def build(folder: Path) -> None:
            for part in EXAMPLES:
                _pack(corpus, part, tokenizer, task, folder, report)

        folder = cached_folder(cache / "tokens", digest_of([_LAYOUT, identity]), build)
        train, validation = TokenSet.open(folder, "train"), TokenSet.open(folder, "validation")
        fraction, whole_word = task.masked_fraction or _MASKED_FRACTION, bool(task.whole_word)
        return Prepared(
            train,
            validation,
            file,
            tokenizers.vocabulary_size(tokenizer),
            padding_id(tokenizer, file),
            {
                **identity,
                "masked_fraction": fraction,
                "whole_word": whole_word,
                "train.selected": len(train),
                "validation.selected": len(validation),
            },
            VocabularyHead(),
            GuessScoring(),
            Masking(tokenizer, fraction=fraction, whole_word=whole_word),
        )

    def loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Cross-entropy, the mean over each sequence's guessed tokens, summed over sequences."""
        of_tokens = functional.cross_entropy(logits.float(), _right(batch), reduction="none")
        return (of_tokens / batch.guesses_of_sequence()).sum()


def _right(batch: Batch) -> torch.Tensor:
    """(M,) the tokens to be guessed."""
    assert batch.guessed is not None
    return batch.labels.flatten().index_select(0, batch.guessed)


class GuessScoring:
    """Accuracy and mean reciprocal rank over all guessed tokens of the validation part."""

    _TOKENS = 512
    """Guesses that are ranked at a time; more only take memory."""

    def observe(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """(B, 3) of each sequence: guesses, right ones, and the sum of 1 / rank of the right token.

        The rank is among the whole vocabulary; tokens with the same logit share their mean rank,
        and only a token that stands alone at the top is right.
        """
        right = _right(batch)
        found = []
        for start in range(0, len(right), self._TOKENS):
            part = logits[start : start + self._TOKENS].float()
            own = part.gather(1, right[start : start + self._TOKENS, None])
            below, equal = (part < own).sum(1), (part == own).sum(1)
            # Counted from the end, so that a NaN ranks last.
            rank = part.shape[1] - below - (equal - 1) * 0.5
            found.append(torch.stack([torch.ones_like(rank), (rank == 1.0).float(), 1.0 / rank], dim=1))
        of_sequences = logits.new_zeros((len(batch.labels), 3), dtype=torch.float32)
        if found:
            assert batch.guessed is not None
            of_sequences.index_add_(0, batch.guessed // batch.labels.shape[1], torch.cat(found))
        return of_sequences

    def score(self, observed: npt.NDArray[np.float32]) -> dict[str, float]:
        """See `Scoring.score`."""
        guesses, right, reciprocal = observed.astype(np.float64).sum(0)
        return {"accuracy": float(right / guesses), "mrr": float(reciprocal / guesses)}


class _Corpus:
    """The texts of a dataset, by part.

    A dataset without a validation part is divided by a hash of each text, so that the same text
    never lies in both parts.
    """

    def __init__(self, source: Source, task: configuration.Task) -> None:
        self._source, self._task = source, task
        self._divided = "validation" not in source.parts
        self.name = source.name
        self.identity: dict[str, str | int | float] = {
            "task": task.name.value,
            "validation_fraction": task.validation_fraction if self._divided else "own part",
            "split_seed": task.split_seed if self._divided else "own part",
            **source_identity(source),
        }

    def texts(self, part: str) -> Generator[str]:
        """Texts of a part in the order of the files; blank ones hold nothing and are left out.

        Raises:
            BadDataError: naming file, line and field.
        """
        key = self._task.split_seed.to_bytes(8, "little")
        limit = int(self._task.validation_fraction * 2**64)
        for row in self._source.rows("train" if self._divided else part):
            value = row.fields.get("text")
            if isinstance(value, str) and not value.strip():
                continue
            text = row.text("text")
            if self._divided:
                digest = hashlib.blake2b(text.encode(), digest_size=8, key=key).digest()
                if (int.from_bytes(digest, "little") < limit) != (part == "validation"):
                    continue
            yield text

    def pieces(self, part: str) -> Iterator[list[str]]:
        """The same in lists of about `_BATCH_CHARACTERS`."""
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

    def nothing(self, part: str) -> BadDataError:
        """The error of a part without text."""
        if self._divided and part == "validation":
            return BadDataError(
                f"{self.name}: too few texts to hold out a validation part; add texts, one per line, "
                "or a file validation.txt"
            )
        return BadDataError(f"{self.name}: the {part} part holds no text")


def _wanted(task: configuration.Task, part: str) -> int:
    asked = task.train_examples if part == "train" else task.validation_examples
    return EXAMPLES[part] if asked is None else asked


def _tokenizer_file(origin: Origin, corpus: _Corpus, cache: Path, report: Callable[[str], None]) -> Path:
    """The tokenizer of a model folder, or a vocabulary trained on the beginning of the training text."""
    if isinstance(origin, Folder):
        return tokenizers.file_in(origin.path)

    def build(folder: Path) -> None:
        texts: list[str] = []
        size = 0
        for piece in corpus.pieces("train"):
            texts.extend(piece)
            size += sum(map(len, piece))
            if size >= _SAMPLE_CHARACTERS:
                break
        if not texts:
            raise corpus.nothing("train")
        report(f"training a WordPiece vocabulary on {len(texts)} texts")
        tokenizers.train_wordpiece(texts, VOCABULARY_SIZE).save(str(folder / tokenizers.FILE))

    key = digest_of([_LAYOUT, corpus.identity, VOCABULARY_SIZE, _SAMPLE_CHARACTERS])
    return cached_folder(cache / "vocabularies", key, build) / tokenizers.FILE


def _pack(
    corpus: _Corpus,
    part: str,
    tokenizer: Tokenizer,
    task: configuration.Task,
    folder: Path,
    report: Callable[[str], None],
) -> None:
    """Write a part's sequences; reading ends when there are enough.

    Raises:
        BadDataError: the part holds no text, or less than the spec asks for.
    """
    wanted = _wanted(task, part)
    encode, dtype = encoder_of(tokenizer), token_dtype(tokenizer)
    packer = Packer(
        task.max_length,
        begin=tokenizers.special_id(tokenizer, "[CLS]"),
        separator=tokenizers.special_id(tokenizer, "[SEP]"),
        dtype=dtype,
    )
    told = Pace(report, f"{part}: tokenised and packed", wanted, "sequences")
    done = 0
    with closing(TokenWriter(folder, part, dtype)) as writer:
        for texts in corpus.pieces(part):
            full = packer.add(*encode(texts))[: wanted - done]
            writer.append(full, np.full(len(full), task.max_length))
            done += len(full)
            told(done)
            if done == wanted:
                break
        else:
            rest = packer.rest()
            if len(rest):
                writer.append(rest, np.array([len(rest)]))
                done += 1
        if not done:
            raise corpus.nothing(part)
        asked = task.train_examples if part == "train" else task.validation_examples
        if asked is not None and done < asked:
            raise BadDataError(
                f"{part}_examples asks for {asked}, but the {part} part packs into {done} sequences of "
                f"{task.max_length} tokens; lower task.{part}_examples"
            )
        writer.finish()
    report(f"{part}: {done} sequences of {task.max_length} tokens, {writer.tokens} tokens")
