"""Sentiment of movie reviews: the Large Movie Review Dataset (Maas et al., 2011)."""

from __future__ import annotations

from trainers.models.heads import ClassHead
from trainers.tasks.imdb.files import labelled_folders
from trainers.tasks.info import CLASS_SCORES, CutFields, TaskInfo

IMDB = TaskInfo(
    name="imdb",
    summary="sentiment of movie reviews",
    implementation="trainers.tasks.imdb.task:Imdb",
    head=ClassHead,
    scores=CLASS_SCORES,
    headline="accuracy",
    own_fields=CutFields,
    layouts=(labelled_folders,),
    hub_id="stanfordnlp/imdb",
    hub_examples=25_000,
)
