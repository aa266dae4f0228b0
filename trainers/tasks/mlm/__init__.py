"""Masked language modelling over plain text (Devlin et al., 2019): some tokens are hidden and guessed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from trainers.data.formats import READERS, ending, read_plain
from trainers.data.layouts import (
    TEST,
    TRAIN,
    VALIDATION,
    SourcePart,
    files_in,
    has_tabs,
    loosely_named,
    tables,
)
from trainers.data.prose import form_of
from trainers.data.sample import Guess, Sample
from trainers.model_kinds.heads import VocabularyHead
from trainers.tasks.info import MAIN_FRACTION, OwnFields, Score, TaskInfo

_READERS = {".txt": read_plain, ".txt.gz": read_plain, ".tokens": read_plain, **READERS}


def plain_texts(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds a file of texts, one per line or in a field `text`, or `train.*`, perhaps `valid.*`, `test.*`."""
    return tables(path, _READERS)


def published_texts(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds texts whose names contain `train` and the like: `ptb.train.txt`, `wiki.train.tokens`."""

    def accept(file: Path) -> bool:
        return _READERS.get(ending(file)) is read_plain and not has_tabs(file)

    return files_in(path, accept, partial(loosely_named, accept), read_plain)


class MaskFields(OwnFields):
    masked_fraction: float = Field(default=0.15, gt=0.0, lt=1.0)
    """Share of a sequence's tokens that are to be guessed."""
    whole_word: bool = False
    """Mask all pieces of a word together."""
    detokenise: Literal["none", "penn_treebank", "wikitext"] = "none"
    """Tokenised form that the text is in and is freed of: joined to words and punctuation as written; the
    numbers `N` of penn_treebank become `<unk>`, which is never guessed."""


def _guess(sample: Sample) -> Guess | None:
    text = sample.column("text") or next(iter(sample.texts), None)
    if text is None or not text.is_text:
        return None
    form = form_of("\n".join(text.values))
    return Guess({**sample.mapped(text=text), **({"detokenise": form} if form else {})}, 1)


MLM = TaskInfo(
    name="mlm",
    summary="hidden tokens of plain text",
    implementation="trainers.tasks.mlm.task:Mlm",
    head=VocabularyHead,
    scores={"accuracy": MAIN_FRACTION, "mrr": MAIN_FRACTION, "sequence_ms": Score("ms", better="lower")},
    headline="validation_loss",
    own_fields=MaskFields,
    usual_length=128,
    counted="sequences",
    columns=("text",),
    layouts=(plain_texts, published_texts),
    guess=_guess,
    hub_id="Salesforce/wikitext:wikitext-2-raw-v1",
    default_examples={TRAIN: 65_536, VALIDATION: 8_192, TEST: 8_192},
)
