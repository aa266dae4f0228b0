"""Sentiment of movie reviews: the Large Movie Review Dataset (Maas et al., 2011)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from trainers.data.formats import Row, read_text
from trainers.data.layouts import SourcePart, named_parts
from trainers.data.sample import Guess, Sample
from trainers.errors import BadDataError
from trainers.model_kinds.heads import ClassHead
from trainers.tasks.info import CLASS_SCORES, CutFields, TaskInfo


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


def _guess(sample: Sample) -> Guess | None:
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
    own_fields=CutFields,
    layouts=(labelled_folders,),
    guess=_guess,
    hub_id="stanfordnlp/imdb",
    hub_examples=25_000,
)
