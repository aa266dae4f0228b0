"""Masked language modelling over plain text (Devlin et al., 2019): some tokens are hidden and guessed."""

from typing import Literal

from pydantic import Field

from trainers.data.formats import read_plain
from trainers.data.layouts import TEST, TRAIN, VALIDATION
from trainers.data.prose import form_of
from trainers.data.sample import Guess, Sample
from trainers.model_kinds.heads import VocabularyHead
from trainers.tasks.info import MAIN_FRACTION, OwnFields, PredictionView, Score, TaskInfo


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
    labels=(),
    # A sequence's score is its loss.
    predictions=PredictionView(error=lambda score, prediction, truth: score, can_be_right=False),
    readers={".txt": read_plain, ".txt.gz": read_plain, ".tokens": read_plain},
    guess=_guess,
    hub_id="Salesforce/wikitext:wikitext-2-raw-v1",
    default_examples={TRAIN: 65_536, VALIDATION: 8_192, TEST: 8_192},
)
