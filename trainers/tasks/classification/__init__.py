"""Any labelled texts, or pairs of texts: one label each, or several."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainers.models.heads import ClassHead
from trainers.tasks.info import CLASS_SCORES, FRACTION, CutFields, Score, TaskInfo


class LabelFields(CutFields):
    """What the labels are."""

    labels: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] | None = Field(
        default=None, min_length=2, max_length=10_000
    )
    """Names of the classes in their order, so that numbers in the data mean positions in it; unset = the
    training part's labels, sorted."""
    multi_label: bool = False
    """A text has any number of labels: a list, or a text with commas."""

    def check(self, max_length: int) -> None:
        """Refuses a label that is listed twice."""
        labels = self.labels or ()
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ValueError(f"labels lists {twice!r} twice; list each label once")


CLASSIFICATION = TaskInfo(
    name="classification",
    summary="classes of any labelled texts or pairs of texts",
    implementation="trainers.tasks.classification.task:Classification",
    head=ClassHead,
    scores={
        **CLASS_SCORES,
        "f1_micro": FRACTION,
        "matthews": Score("1", better="higher"),
        "calibration_error": Score("1", better="lower"),
    },
    headline="accuracy",
    own_fields=LabelFields,
    columns=("text", "text_pair", "label"),
)
