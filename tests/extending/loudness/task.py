"""What of the task needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.extending.loudness import CLASSES, LoudnessFields
from trainers import config as configuration
from trainers.data.formats import Row
from trainers.data.tokens import TokenSet
from trainers.model_kinds.heads import ClassHead
from trainers.tasks.base import Judged, Scoring
from trainers.tasks.classification import LabelFields
from trainers.tasks.classification.task import Classification, ClassScoring, Labelled


class Loudness(Classification):
    """Calm or loud."""

    def fields(self, task: configuration.Task) -> LabelFields:
        """See `Classification.fields`."""
        return LabelFields(labels=CLASSES)

    def example(self, row: Row, task: configuration.Task) -> Labelled:
        """See `DatasetTask.example`."""
        found = super().example(row, task)
        assert found is not None
        marks = "!" * task.own(LoudnessFields).marks if found.labels == ("loud",) else ""
        return replace(found, texts=(found.texts[0] + marks,))

    def settings(self, task: configuration.Task) -> dict[str, str | int | float]:
        """See `DatasetTask.settings`."""
        return {"marks": task.own(LoudnessFields).marks}

    def scoring(self, tokens: TokenSet, head: ClassHead, task: configuration.Task, gold: Path) -> Scoring:
        """See `DatasetTask.scoring`."""
        return ErrorScoring(tokens.labels, CLASSES)


class ErrorScoring(ClassScoring):
    """Share of wrong answers."""

    def score(
        self, observed: npt.NDArray[np.float32], carried: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """See `Scoring.score`."""
        accuracy = super().score(observed, carried)["accuracy"]
        return {"error_rate": 1.0 - accuracy, "cut_off": 0.5}

    def judge(self, observed: npt.NDArray[np.float32], carried: Mapping[str, float]) -> Judged:
        """See `Scoring.judge`."""
        judged = super().judge(observed, carried)
        return Judged(judged.numbers, 1.0 - judged.scores, judged.predictions, judged.truths, judged.labels)
