"""Any labelled texts, or pairs of texts: one label each, or several."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from trainers.data.sample import Column, Guess, Sample
from trainers.model_kinds.heads import ClassHead
from trainers.tasks.info import CLASS_SCORES, FRACTION, Label, ListedFields, Score, TaskInfo

Weight = Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)]


class Weights(dict[str, float]):
    """Weights of some labels; immutable by convention, so that it can be part of a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


ClassWeights = Annotated[
    Annotated[Literal["balanced"], Tag("name")]
    | Annotated[dict[Label, Weight], Field(max_length=10_000), AfterValidator(Weights), Tag("by_label")],
    # For a mapping, report only what is wrong inside it, not that it is not a name.
    Discriminator(lambda value: "by_label" if isinstance(value, dict) else "name"),
]


class LabelFields(ListedFields):
    multi_label: bool = False
    """A text has any number of labels: a list, or a text with commas."""
    class_weights: ClassWeights | None = None
    """Factor of each label's training loss: balanced = inverse to its frequency, or a factor by label, 1 for
    those left out; unset = 1."""

    def check(self, max_length: int) -> None:
        super().check(max_length)
        labels = self.labels or ()
        if labels and isinstance(self.class_weights, dict):
            unknown = next((label for label in self.class_weights if label not in labels), None)
            if unknown is not None:
                raise ValueError(
                    f"class_weights weighs {unknown!r}, which labels does not list; correct or remove it"
                )


def _guess(sample: Sample) -> Guess | None:
    texts = sample.texts[:2]
    several = next((one for one in sample.columns if one.is_several_labels), None)
    labels = [one for one in sample.columns if one.is_label]
    label = several or sample.column("label") or (labels[-1] if labels else None)
    if not texts or label is None or label in texts or label.is_number:
        return None
    pair = texts[1] if len(texts) > 1 else None
    fields = sample.mapped(text=texts[0], text_pair=pair, label=label)
    if several is not None:
        fields["multi_label"] = True
    if (names := _names(label, sample)) is not None:
        fields["labels"] = names
    return Guess(fields, 2)


def _names(label: Column, sample: Sample) -> list[str] | None:
    """Returns the list next to the data that the labels are positions in."""
    written = {
        one for value in label.values for one in (value if isinstance(value, list) else str(value).split(","))
    }
    if not all(str(one).isdigit() for one in written):
        return None
    highest = max(map(int, written), default=0)
    return next((list(names) for names in sample.lists if highest < len(names) <= 2 * (highest + 1)), None)


CLASSIFICATION = TaskInfo(
    name="classification",
    summary="classes of any labelled texts or pairs of texts",
    implementation="trainers.tasks.classification.task:Classification",
    head=ClassHead,
    scores={
        **CLASS_SCORES,
        "f1_micro": FRACTION,
        "precision_micro": FRACTION,
        "recall_micro": FRACTION,
        "matthews": Score("1", better="higher"),
        "calibration_error": Score("1", better="lower"),
    },
    headline="accuracy",
    own_fields=LabelFields,
    columns=("text", "text_pair", "label"),
    guess=_guess,
)
