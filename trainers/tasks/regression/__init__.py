"""A number for a text or a pair of texts, such as how alike they are."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from trainers.data.sample import Guess, Sample
from trainers.model_kinds.heads import NumberHead
from trainers.tasks.info import NO_LOSS, OF_PAIRS, CutFields, PredictionView, Score, TaskInfo

Number = Annotated[float, Field(allow_inf_nan=False)]


class NumberFields(CutFields):
    label_range: tuple[Number, Number] | None = None
    """Least and greatest label: others in the data are errors, and predictions are clipped to it; unset = any
    numbers."""

    def check(self, max_length: int) -> None:
        if self.label_range is not None and not self.label_range[0] < self.label_range[1]:
            low, high = self.label_range
            raise ValueError(f"label_range [{low}, {high}] is empty; write the smaller number first")


def _guess(sample: Sample) -> Guess | None:
    texts = sample.texts[:2]
    numbers = [one for one in sample.columns if one.is_number]
    if not texts or not numbers:
        return None
    pair = texts[1] if len(texts) > 1 else None
    number = sample.column("label") if sample.column("label") in numbers else numbers[0]
    return Guess(sample.mapped(text=texts[0], text_pair=pair, label=number), 2)


REGRESSION = TaskInfo(
    name="regression",
    summary="a number for any texts or pairs of texts",
    implementation="trainers.tasks.regression.task:Regression",
    head=NumberHead,
    scores={
        "pearson": Score("1", better="higher", margin=NO_LOSS, drawn=True),
        "spearman": Score("1", better="higher", margin=NO_LOSS),
        "rmse": Score("label", better="lower", drawn=True),
    },
    headline="pearson",
    own_fields=NumberFields,
    columns=("text", "text_pair", "label"),
    # Shares of Pearson's correlation do not tell how far a number is off.
    predictions=PredictionView(
        error=lambda score, prediction, truth: abs(float(prediction) - float(truth)), can_be_right=False
    ),
    trial=replace(OF_PAIRS, shown="number"),
    guess=_guess,
)
