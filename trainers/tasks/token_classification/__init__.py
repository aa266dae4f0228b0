"""Entities in a text, or other labelled stretches of words."""

from __future__ import annotations

from trainers.data.sample import Guess, Sample
from trainers.model_kinds.heads import TokenHead
from trainers.tasks.info import NO_LOSS, ListedFields, Score, TaskInfo
from trainers.tasks.token_classification.files import column_files
from trainers.tasks.token_classification.tags import is_tag


class TagFields(ListedFields):
    """What the tags are."""

    def check(self, max_length: int) -> None:
        super().check(max_length)
        other = next((tag for tag in self.labels or () if not is_tag(tag)), None)
        if other is not None:
            raise ValueError(f"labels lists {other!r}, which is not O, B-<label> or I-<label>; list BIO tags")


_ENTITIES = Score("1", better="higher")


def _guess(sample: Sample) -> Guess | None:
    known = sample.names >= {"tokens", "tags"} or sample.names >= {"text", "spans"}
    return Guess({}, 3) if known else None


TOKEN_CLASSIFICATION = TaskInfo(
    name="token_classification",
    summary="entities in texts, by BIO tags or spans",
    implementation="trainers.tasks.token_classification.task:TokenClassification",
    head=TokenHead,
    scores={
        "entity_f1": Score("1", better="higher", margin=NO_LOSS, drawn=True),
        "entity_precision": _ENTITIES,
        "entity_recall": _ENTITIES,
        "entity_f1_macro": _ENTITIES,
        "tag_accuracy": Score("1", better="higher"),
    },
    headline="entity_f1",
    own_fields=TagFields,
    columns=("tokens", "tags", "text", "spans"),
    layouts=(column_files,),
    guess=_guess,
)
