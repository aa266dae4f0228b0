"""Spam in text messages, and what its errors cost.

Every process of the service imports this module, so it imports no torch; `task.py` is imported when a run
starts. It imports modules of `trainers.tasks`, not the package itself, which is about to register this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from trainers.data.formats import Row, read_lines
from trainers.data.layouts import TRAIN, SourcePart
from trainers.model_kinds.heads import ClassHead
from trainers.tasks.info import CLASS_SCORES, DeclaredMetric, LossFields, Score, TaskInfo

MISSED, FALSE_ALARM = 5.0, 1.0


def collection(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds the SMS Spam Collection (Almeida et al., 2011): a label, a tab and a message in each line."""
    file = path / "SMSSpamCollection" if path.is_dir() else path
    if file.name != "SMSSpamCollection" or not file.is_file():
        return None
    return {TRAIN: SourcePart([file], partial(_read, file))}


def _read(file: Path) -> Iterator[Row]:
    for line, number in read_lines(file):
        label, _, text = line.partition("\t")
        yield Row({"label": label, "text": text}, f"{file}, line {number}")


def cost_of_errors(predictions: Sequence[str], truths: Sequence[str]) -> float:
    """Returns the mean cost of a message."""
    pairs = list(zip(predictions, truths, strict=True))
    missed = sum(truth == "spam" != predicted for predicted, truth in pairs)
    false = sum(predicted == "spam" != truth for predicted, truth in pairs)
    return (MISSED * missed + FALSE_ALARM * false) / len(pairs)


SMS_SPAM = TaskInfo(
    name="sms_spam",
    summary="spam in text messages",
    implementation="stillhouse_example.task:SmsSpam",
    head=ClassHead,
    scores=CLASS_SCORES,
    headline="f1",
    own_fields=LossFields,
    layouts=(collection,),
)
COST_OF_ERRORS = DeclaredMetric(
    name="cost_of_errors",
    summary="mean cost of a message: 5 for spam that is missed, 1 for a false alarm",
    score=Score("1", better="lower"),
    tasks=("sms_spam",),
    compute=cost_of_errors,
)
