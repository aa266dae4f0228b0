"""Masked language modelling over plain text (Devlin et al., 2019): some tokens are hidden and guessed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from trainers.data.formats import READERS, ending, read_plain
from trainers.data.layouts import TEST, TRAIN, VALIDATION, SourcePart, files_in, tables
from trainers.data.sample import Guess, Sample
from trainers.model_kinds.heads import VocabularyHead
from trainers.tasks.info import MAIN_FRACTION, OwnFields, Score, TaskInfo

_PLAIN = (".txt", ".txt.gz")


def plain_texts(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds a file of texts, one per line or in a field `text`, or `train.*`, perhaps `valid.*`, `test.*`."""
    if path.is_file() and ending(path) not in _PLAIN:
        return tables(path)
    return files_in(
        path,
        lambda file: True,
        _named,
        lambda file: (read_plain if ending(file) in _PLAIN else READERS[ending(file)])(file),
    )


def _named(folder: Path, name: str) -> Path | None:
    ends = (*_PLAIN, *READERS)
    return next((folder / f"{name}{end}" for end in ends if (folder / f"{name}{end}").is_file()), None)


class MaskFields(OwnFields):
    masked_fraction: float = Field(default=0.15, gt=0.0, lt=1.0)
    """Share of a sequence's tokens that are to be guessed."""
    whole_word: bool = False
    """Mask all pieces of a word together."""


def _guess(sample: Sample) -> Guess | None:
    text = sample.column("text") or next(iter(sample.texts), None)
    return None if text is None or not text.is_text else Guess(sample.mapped(text=text), 1)


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
    layouts=(plain_texts,),
    guess=_guess,
    hub_id="Salesforce/wikitext:wikitext-2-raw-v1",
    default_examples={TRAIN: 65_536, VALIDATION: 8_192, TEST: 8_192},
)
