"""Which sentences answer a question: WikiQA (Yang, Yih and Meek, 2015)."""

from __future__ import annotations

from trainers.data.sample import Guess, Sample
from trainers.model_kinds.heads import ClassHead
from trainers.tasks.info import FRACTION, MAIN_FRACTION, CutFields, Score, TaskInfo
from trainers.tasks.wikiqa.files import official


def _guess(sample: Sample) -> Guess | None:
    names = {str(name).lower() for name in sample.names}
    return Guess({}, 3) if names >= {"question", "label"} and names & {"sentence", "answer"} else None


WIKIQA = TaskInfo(
    name="wikiqa",
    summary="which sentences answer a question",
    implementation="trainers.tasks.wikiqa.task:WikiQa",
    head=ClassHead,
    scores={
        "map": MAIN_FRACTION,
        "mrr": MAIN_FRACTION,
        "precision": FRACTION,
        "recall": FRACTION,
        "f1": MAIN_FRACTION,
        "accuracy": MAIN_FRACTION,
        "threshold": Score("1", tuned=True),
    },
    headline="map",
    own_fields=CutFields,
    counted="questions",
    columns=("question", "sentence", "label", "question_id"),
    layouts=(official,),
    guess=_guess,
    hub_id="microsoft/wiki_qa",
    hub_examples=20_360,
)
