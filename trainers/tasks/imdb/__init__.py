"""Sentiment of movie reviews: the Large Movie Review Dataset (Maas et al., 2011)."""

from __future__ import annotations

from trainers.data.sample import Guess, Sample
from trainers.model_kinds.heads import ClassHead
from trainers.tasks.imdb.files import labelled_folders
from trainers.tasks.info import CLASS_SCORES, CutFields, TaskInfo


def _guess(sample: Sample) -> Guess | None:
    label = sample.column("label")
    if label is None or sample.column("text") is None:
        return None
    written = {str(value).strip().lower() for value in label.values}
    return Guess({}, 3) if written and written <= {"neg", "pos", "negative", "positive"} else None


IMDB = TaskInfo(
    name="imdb",
    summary="sentiment of movie reviews",
    implementation="trainers.tasks.imdb.task:Imdb",
    head=ClassHead,
    scores=CLASS_SCORES,
    headline="accuracy",
    own_fields=CutFields,
    layouts=(labelled_folders,),
    guess=_guess,
    hub_id="stanfordnlp/imdb",
    hub_examples=25_000,
)
