"""Questions about a text that may not answer them: SQuAD 2.0 (Rajpurkar, Jia and Liang, 2018)."""

from __future__ import annotations

from pydantic import Field

from trainers.model_kinds.heads import SpanHead
from trainers.tasks.info import MAIN_FRACTION, OwnFields, Score, TaskInfo, columns_named
from trainers.tasks.squad_v2.files import official

_OF_SOME = Score("1", better="higher", share="some")


class SpanFields(OwnFields):
    """Windows of a context, and answers in them."""

    stride: int | None = Field(default=None, ge=1, le=512)
    """Tokens that neighbouring windows share; unset = 128, or a third of short windows."""
    max_answer_tokens: int = Field(default=30, ge=1, le=512)
    """Longest answer, in tokens."""

    def check(self, max_length: int) -> None:
        if self.stride is not None and self.stride > max_length // 2:
            raise ValueError(
                f"stride {self.stride} is more than half of max_length {max_length}; "
                f"lower task.stride to {max_length // 2} or raise task.max_length"
            )


SQUAD_V2 = TaskInfo(
    name="squad_v2",
    summary="the span of a text that answers a question, or none",
    implementation="trainers.tasks.squad_v2.task:SquadV2",
    head=SpanHead,
    scores={
        "f1": MAIN_FRACTION,
        "exact_match": MAIN_FRACTION,
        "f1_has_answer": _OF_SOME,
        "f1_best_span": _OF_SOME,
        "exact_match_has_answer": _OF_SOME,
        "exact_match_no_answer": _OF_SOME,
        "null_threshold": Score("1", tuned=True),
    },
    headline="f1",
    own_fields=SpanFields,
    counted="questions",
    columns=("id", "question", "context", "answers", "title", "is_impossible"),
    layouts=(official,),
    guess=columns_named("id", "question", "context", "answers"),
    hub_id="rajpurkar/squad_v2",
    hub_examples=131_944,  # windows at length 384
)
