"""Customs codes from descriptions of goods, at a chosen number of digits."""

from __future__ import annotations

from typing import Literal

from trainers.model_kinds.heads import ClassHead
from trainers.tasks.info import CLASS_SCORES, FRACTION, CutFields, Score, TaskInfo, columns_named
from trainers.tasks.tariff.files import official


class CodeFields(CutFields):
    """Which part of a code is learned."""

    level: Literal[2, 4, 6, 8, 10] = 6
    """Digits of the code that is learned."""


TARIFF = TaskInfo(
    name="tariff",
    summary="customs codes of goods",
    implementation="trainers.tasks.tariff.task:Tariff",
    head=ClassHead,
    scores={
        **CLASS_SCORES,
        "top5_accuracy": FRACTION,
        **{f"accuracy_level_{level}": FRACTION for level in (2, 4, 6, 8)},
        "unseen_pct": Score("%", better="lower"),
    },
    headline="accuracy",
    own_fields=CodeFields,
    columns=("text", "code"),
    layouts=(official,),
    guess=columns_named("text", "code"),
)
