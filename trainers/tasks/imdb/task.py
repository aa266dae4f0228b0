"""Movie reviews as a classification of texts."""

from __future__ import annotations

from trainers.tasks.text_classification import TextClassification


class Imdb(TextClassification):
    """Two classes."""

    classes = ("negative", "positive")
    spellings = {"neg": 0, "pos": 1, "negative": 0, "positive": 1, "0": 0, "1": 1}  # noqa: RUF012
