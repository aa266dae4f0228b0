"""Sentiment of movie reviews: the Large Movie Review Dataset (Maas et al., 2011)."""

from __future__ import annotations

from trainers.config import TaskName
from trainers.data.layouts import OFFICIAL
from trainers.tasks.text_classification import TextClassification


class Imdb(TextClassification):
    """Two classes; `stanfordnlp/imdb` on the hub."""

    classes = ("negative", "positive")
    hub_id = "stanfordnlp/imdb"
    layouts = OFFICIAL[TaskName.imdb]
    spellings = {"neg": 0, "pos": 1, "negative": 0, "positive": 1, "0": 0, "1": 1}  # noqa: RUF012
