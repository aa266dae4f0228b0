"""Any labelled texts, or pairs of texts: one label each, or several.

A preset is `imdb`, the sentiment of movie reviews: the Large Movie Review Dataset (Maas et al., 2011).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from trainers.data.formats import Row, read_text
from trainers.data.layouts import SourcePart, named_parts
from trainers.data.sample import Column, Guess, Sample, split_labels
from trainers.errors import BadDataError
from trainers.model_kinds.heads import ClassHead
from trainers.tasks.info import (
    CLASS_SCORES,
    FRACTION,
    OF_PAIRS,
    OF_TEXTS,
    Decisions,
    Label,
    ListedFields,
    LossFields,
    PredictionView,
    Score,
    TaskInfo,
    yes_no,
)

Weight = Annotated[float, Field(gt=0.0, le=1e6, allow_inf_nan=False)]


class LabelWeights(dict[str, float]):
    """Weights of some labels; immutable by convention, so that it can be part of a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


ClassWeights = Annotated[
    Annotated[Literal["balanced"], Tag("name")]
    | Annotated[dict[Label, Weight], Field(max_length=10_000), AfterValidator(LabelWeights), Tag("by_label")],
    # For a mapping, report only what is wrong inside it, not that it is not a name.
    Discriminator(lambda value: "by_label" if isinstance(value, dict) else "name"),
]


class LabelFields(ListedFields):
    multi_label: bool = False
    """A text has any number of labels: a list, or a text with commas, bars or semicolons between them."""
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
    labels = [one for one in sample.columns if one.is_label and len(set(one.values)) > 1]
    label = several or sample.column("label") or (labels[-1] if labels else None)
    if not texts or label is None or label in texts or label.is_number:
        return None
    pair = texts[1] if len(texts) > 1 else None
    fields = sample.mapped(text=texts[0], text_pair=pair, label=label)
    if several is not None:
        fields["multi_label"] = True
    if (names := _names(label, sample)) is not None:
        fields["labels"] = names
    # A number behind it is what is to be predicted; such a label tells where a text is from.
    after = sample.columns[sample.columns.index(label) :]
    return Guess(fields, 1 if label.name != "label" and any(one.is_number for one in after) else 2)


def _names(label: Column, sample: Sample) -> list[str] | None:
    """Returns the list next to the data that the labels are positions in."""
    written = {
        one
        for value in label.values
        for one in (value if isinstance(value, list) else split_labels(str(value)))
    }
    if not all(str(one).isdigit() for one in written):
        return None
    highest = max(map(int, written), default=0)
    return next((list(names) for names in sample.lists if highest < len(names) <= 2 * (highest + 1)), None)


def _decisions(prediction: Any, truth: Any, probabilities: Any) -> Decisions:
    if isinstance(prediction, list):
        return yes_no(list(probabilities.values()), [label in truth for label in probabilities])
    return [(probabilities[prediction], prediction == truth)]


CLASS_PREDICTIONS = PredictionView(truth='"{label}"', decisions=_decisions)  # Of a label, or a list of them

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
    predictions=CLASS_PREDICTIONS,
    trial=OF_PAIRS,
    guess=_guess,
)


def labelled_folders(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds `{train,test}/{pos,neg}/*.txt`, perhaps `validation/`."""
    root = path / "aclImdb" if (path / "aclImdb").is_dir() else path
    if not ((root / "train" / "pos").is_dir() or (root / "train" / "neg").is_dir()):
        return None
    folders = named_parts(lambda name: root / name if (root / name).is_dir() else None)
    return {part: _one_text_per_file(folder) for part, folder in folders.items()}


def _one_text_per_file(folder: Path) -> SourcePart:
    files = [(path, label) for label in ("neg", "pos") for path in _texts_in(folder / label)]

    def read() -> Iterator[Row]:
        for path, label in files:
            yield Row({"text": read_text(path), "label": label}, str(path))

    return SourcePart([path for path, _ in files], read)


def _texts_in(folder: Path) -> list[Path]:
    # Listed, since a glob takes a folder that cannot be read for an empty one.
    texts = sorted(path for path in folder.iterdir() if path.suffix == ".txt") if folder.exists() else []
    if not texts:
        raise BadDataError(f"{folder}: no texts; both pos/*.txt and neg/*.txt are needed")
    return texts


def _guess_imdb(sample: Sample) -> Guess | None:
    label = sample.column("label")
    if label is None or sample.column("text") is None:
        return None
    written = {str(value).strip().lower() for value in label.values}
    return Guess({}, 3) if written and written <= {"neg", "pos", "negative", "positive"} else None


IMDB = TaskInfo(
    name="imdb",
    summary="sentiment of movie reviews",
    implementation="trainers.tasks.classification.task:Imdb",
    head=ClassHead,
    scores=CLASS_SCORES,
    headline="accuracy",
    own_fields=LossFields,
    layouts=(labelled_folders,),
    predictions=CLASS_PREDICTIONS,
    trial=OF_TEXTS,
    guess=_guess_imdb,
    hub_id="stanfordnlp/imdb",
    hub_examples=25_000,
)
