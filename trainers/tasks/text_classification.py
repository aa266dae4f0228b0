"""Tasks that give a text one of a few classes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from trainers.config import RunConfig
from trainers.data import tokenizers
from trainers.data.batches import Batch
from trainers.data.cache import cached_folder
from trainers.data.fingerprint import digest_of, digest_text
from trainers.data.located import Located
from trainers.data.selection import balanced_subset, held_out
from trainers.data.sources import Source, open_source
from trainers.data.tokens import TokenSet, tokenise
from trainers.errors import BadDataError, BadSpecError
from trainers.models.origin import VOCABULARY_SIZE, Folder, Origin
from trainers.tasks.base import Prepared, Task
from trainers.tasks.scores import classification

_LAYOUT = 1
"""Grows when the cache's content changes for the same input."""
_REPORT_S = 2.0


class TextClassification(Task):
    """Text in, class out. A task of this kind says its classes, their spellings and its hub id."""

    headline = "accuracy"
    hub_id: ClassVar[str]
    """The dataset on the hub."""
    spellings: ClassVar[Mapping[str, int]]
    """Class of each label as files write it, in lower case."""

    def prepare(self, config: RunConfig, origin: Origin, report: Callable[[str], None]) -> Prepared:
        """See `Task.prepare`. What is already in the cache is neither read nor tokenised."""
        source = open_source(config.task, config.workspace, hub_id=self.hub_id)
        texts = _Texts(self, source, config)
        cache = Path(config.workspace.cache)
        file = self._tokenizer_file(origin, texts, cache, report)
        tokenizer = tokenizers.load(file.parent)
        pad_id = tokenizer.token_to_id("[PAD]")
        if pad_id is None:
            raise BadSpecError(f"{file}: the vocabulary has no [PAD]; use the tokenizer of a BERT")
        tokenizer_digest = digest_text(tokenizer.to_str())

        def build(folder: Path) -> None:
            for part, (part_texts, labels) in texts.selected().items():
                told = _Pace(report, f"{part}: tokenised", len(part_texts))
                tokenise(part_texts, labels, tokenizer, config.task.max_length, told).save(folder, part)

        key = digest_of([_LAYOUT, texts.identity, tokenizer_digest, config.task.max_length])
        folder = cached_folder(cache / "tokens", key, build)
        train, validation = TokenSet.open(folder, "train"), TokenSet.open(folder, "validation")
        return Prepared(
            train,
            validation,
            file,
            tokenizer.get_vocab_size(),
            pad_id,
            {
                **texts.identity,
                "tokenizer.sha256": tokenizer_digest,
                "max_length": config.task.max_length,
                "train.selected": len(train),
                "validation.selected": len(validation),
            },
        )

    def loss(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Cross-entropy, summed over the batch. A worker's stand-in counts nothing."""
        total = functional.cross_entropy(logits.float(), batch.labels, reduction="sum")
        return total if batch.examples else total * 0.0

    def score(self, logits: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> dict[str, float]:
        """Accuracy and macro precision, recall and F1."""
        return classification(logits.argmax(1), labels, len(self.classes))

    def label(self, row: Located) -> int:
        """The class of a row.

        Raises:
            BadDataError: a label that the task does not have; names the place.
        """
        number = self.spellings.get(str(row.label).strip().lower())
        if number is None:
            raise BadDataError(
                f"{row.where}, field label: unknown label {row.label!r}; "
                f"use one of {', '.join(self.spellings)}"
            )
        return number

    def _tokenizer_file(
        self, origin: Origin, texts: _Texts, cache: Path, report: Callable[[str], None]
    ) -> Path:
        """The tokenizer of a model folder, or a vocabulary trained on the training texts."""
        if isinstance(origin, Folder):
            file = origin.path / tokenizers.FILE
            return file if file.is_file() else origin.path / "vocab.txt"

        def build(folder: Path) -> None:
            train = texts.selected()["train"][0]
            report(f"training a WordPiece vocabulary on {len(train)} texts")
            tokenizers.train_wordpiece(train, VOCABULARY_SIZE).save(str(folder / tokenizers.FILE))

        key = digest_of([_LAYOUT, texts.identity, VOCABULARY_SIZE])
        return cached_folder(cache / "vocabularies", key, build) / tokenizers.FILE


class _Texts:
    """A run's texts and labels, read at most once and only when the cache lacks something."""

    def __init__(self, task: TextClassification, source: Source, config: RunConfig) -> None:
        self._task, self._source, self._config = task, source, config.task
        self._selected: dict[str, tuple[list[str], npt.NDArray[np.int64]]] | None = None
        chosen = {
            "train_examples": config.task.train_examples or "all",
            "validation_examples": config.task.validation_examples or "all",
            "validation_fraction": config.task.validation_fraction,
            "split_seed": config.task.split_seed,
        }
        self.identity: dict[str, str | int | float] = {
            "task": config.task.name.value,
            **chosen,
            **{
                f"{part}.{name}": value
                for part, files in source.parts.items()
                for name, value in (
                    ("files", files.files),
                    ("size_bytes", files.size_bytes),
                    ("sha256", files.sha256),
                )
            },
        }

    def selected(self) -> dict[str, tuple[list[str], npt.NDArray[np.int64]]]:
        """Texts and classes of the training and the validation part."""
        if self._selected is None:
            self._selected = self._select({part: self._read(part) for part in self._source.parts})
        return self._selected

    def _read(self, part: str) -> tuple[list[str], npt.NDArray[np.int64]]:
        texts: list[str] = []
        labels: list[int] = []
        for row in self._source.rows(part):
            labels.append(self._task.label(row))
            texts.append(row.text)
        if not texts:
            raise BadDataError(f"{self._source.name}: the {part} part has no rows")
        return texts, np.array(labels, dtype=np.int64)

    def _select(
        self, parts: dict[str, tuple[list[str], npt.NDArray[np.int64]]]
    ) -> dict[str, tuple[list[str], npt.NDArray[np.int64]]]:
        task = self._config
        if "validation" not in parts:
            texts, labels = parts["train"]
            train, validation = held_out(labels, task.validation_fraction, task.split_seed)
            parts = {
                name: ([texts[i] for i in rows], labels[rows])
                for name, rows in (("train", train), ("validation", validation))
            }
        wanted = {"train": task.train_examples, "validation": task.validation_examples}
        chosen = {}
        for part, (texts, labels) in parts.items():
            rows = balanced_subset(labels, wanted[part], task.split_seed, part)
            chosen[part] = ([texts[i] for i in rows], labels[rows])
        return chosen


class _Pace:
    """Says how far long work has come, at most every two seconds."""

    def __init__(self, report: Callable[[str], None], what: str, total: int) -> None:
        self._report, self._what, self._total = report, what, total
        self._last_s = time.monotonic()

    def __call__(self, done: int) -> None:
        if time.monotonic() - self._last_s > _REPORT_S:
            self._last_s = time.monotonic()
            self._report(f"{self._what} {done} of {self._total} texts")
