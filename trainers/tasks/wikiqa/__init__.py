"""Which sentences answer a question: WikiQA (Yang, Yih and Meek, 2015)."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from trainers.data.formats import Row, read_lines, read_tsv
from trainers.data.layouts import SourcePart, files_in
from trainers.data.sample import Guess, Sample
from trainers.errors import BadDataError
from trainers.model_kinds.heads import ClassHead
from trainers.tasks.info import (
    FRACTION,
    MAIN_FRACTION,
    LossFields,
    PredictionView,
    Score,
    TaskInfo,
    Trial,
    yes_no,
)

_COLUMNS = ("question", "sentence", "label")


def official(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds `WikiQA-{train,dev,test}`, the last two optional, all `.tsv` or all `.txt`; or one `.txt`.

    The `.tsv` files have a header and the text as it was written: they are read where both forms are
    complete.
    """

    def named(end: str, folder: Path, name: str) -> list[Path]:
        file = folder / f"WikiQA-{name}{end}"
        return [file] if file.is_file() else []

    forms = (
        files_in(path, lambda file: False, partial(named, ".tsv"), read_tsv),
        files_in(path, lambda file: file.suffix == ".txt", partial(named, ".txt"), read_tokenised),
    )
    return max((form for form in forms if form is not None), key=len, default=None)


def read_tokenised(path: Path) -> Iterator[Row]:
    """Yields rows of a file with question, sentence and label between tabs, without a header."""
    for line, number in read_lines(path):
        if not line.strip():
            continue
        values = line.split("\t")
        where = f"{path}, line {number}"
        if len(values) != len(_COLUMNS):
            raise BadDataError(
                f"{where}: {len(values)} fields, but a line has {len(_COLUMNS)}: "
                f"{', '.join(_COLUMNS)}, with tabs between them"
            )
        yield Row(dict(zip(_COLUMNS, values, strict=True)), where)


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
    own_fields=LossFields,
    counted="questions",
    columns=("question", "sentence", "label", "question_id"),
    labels=("label", "Label"),
    trial=Trial(each="sentence", shared=("question",), shown="ranking"),
    layouts=(official,),
    predictions=PredictionView(
        decisions=lambda _, right, shares: yes_no(shares, [at in right for at in range(len(shares))])
    ),
    guess=_guess,
    hub_id="microsoft/wiki_qa",
    hub_examples=20_360,
)
