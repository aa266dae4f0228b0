"""Customs codes from descriptions of goods, at a chosen number of digits."""

import codecs
import csv
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from trainers.data.allowance import read_start
from trainers.data.formats import Row, ending, read_csv, read_json
from trainers.data.layouts import SourcePart
from trainers.errors import BadDataError
from trainers.model_kinds.heads import ClassHead
from trainers.tasks.info import (
    CLASS_SCORES,
    FRACTION,
    OF_TEXTS,
    LossFields,
    PredictionView,
    Score,
    TaskInfo,
    columns_named,
)

Reader = Callable[[Path], Iterator[Row]]

_SNIFFED_BYTES = 4096
_HARMONIZED = {"hscode", "description", "parent", "level"}
_US = {"HTS Number", "Indent", "Description"}
_UK_TEXTS = ("description", "original_description")
_UK_LISTS = ("synonyms", "colloquial_terms", "known_brands")


def official(path: Path) -> Mapping[str, SourcePart] | None:
    """Finds one official file, or a folder with any of them, whose rows are then taken together."""
    if path.is_dir() and (any(path.glob("train[-.]*")) or (path / "train").is_dir()):
        return None
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    by_file = {file: reader for file in files if file.is_file() and (reader := _reader_of(file)) is not None}
    if not by_file:
        return None
    readers = [partial(reader, file) for file, reader in by_file.items()]
    return {"train": SourcePart(list(by_file), lambda: chain.from_iterable(read() for read in readers))}


def _reader_of(file: Path) -> Reader | None:
    form = ending(file).removesuffix(".gz")
    if form == ".csv":
        start = read_start(file, _SNIFFED_BYTES).decode("utf-8-sig", "replace")
        columns = set(next(csv.reader(start.splitlines()[:1]), []))
        if columns >= _HARMONIZED:
            return read_harmonized_system
        return read_us_tariff if columns >= _US else None
    if form == ".json":
        opening = read_start(file, _SNIFFED_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
        return read_uk_commodities if opening.startswith(b"[") else None
    return None


def read_harmonized_system(path: Path) -> Iterator[Row]:
    """Yields rows of the Harmonized System as CSV: columns `hscode`, `description`, `parent`, `level`."""
    for row in read_csv(path):
        row.require()
        if row.fields["hscode"] != "TOTAL":  # the sum of all, which has no code
            yield Row({"text": row.text("description"), "code": row.fields["hscode"]}, row.where)


def read_us_tariff(path: Path) -> Iterator[Row]:
    """Yields rows of the Harmonized Tariff Schedule of the United States as CSV.

    A row belongs below the last one with a smaller `Indent`, and its text is the chain from the heading down,
    joined by colons. Rows without a number only head others.
    """
    above: list[tuple[int, str]] = []
    for row in read_csv(path):
        row.require()
        try:
            indent = int(row.fields["Indent"])
        except ValueError:
            raise row.refusal("Indent", f"{row.fields['Indent']!r} is not a whole number") from None
        while above and above[-1][0] >= indent:
            above.pop()
        above.append((indent, row.text("Description").strip().removesuffix(":")))
        if row.fields["HTS Number"]:
            text = ": ".join(description for _, description in above)
            yield Row({"text": text, "code": row.fields["HTS Number"]}, row.where)


def read_uk_commodities(path: Path) -> Iterator[Row]:
    """Yields a row for each phrase of labelled UK commodities, except for empty ones."""
    for number, item in enumerate(read_json(path, "a JSON list of commodities"), 1):
        where = f"{path}, item {number}"
        if not isinstance(item, dict):
            raise BadDataError(f"{where}: a JSON {type(item).__name__}, not an object")
        row = Row(item, where)
        for name in ("commodity_code", _UK_TEXTS[0]):
            if name not in item:
                raise row.refusal(name, f"missing (found: {', '.join(item) or 'nothing'})")
        for name, phrase in _phrases(row):
            if phrase is not None and phrase != "":
                text = Row({name: phrase}, where).text(name)
                yield Row({"text": text, "code": item["commodity_code"]}, where)


def _phrases(row: Row) -> Iterator[tuple[str, Any]]:
    for name in _UK_TEXTS:
        yield name, row.fields.get(name)
    for name in _UK_LISTS:
        phrases = row.fields.get(name) or []
        if isinstance(phrases, str):  # one alone, as the published file has it here and there
            phrases = [phrases]
        if not isinstance(phrases, list):
            raise row.refusal(name, f"a {type(phrases).__name__}, not a list of texts")
        for phrase in phrases:
            yield name, phrase


class CodeFields(LossFields):
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
    labels=("code",),
    trial=OF_TEXTS,
    layouts=(official,),
    # The likeliest codes, best first.
    predictions=PredictionView(
        truth='"{label}"',
        prediction=r'^\["{label}"',
        decisions=lambda codes, truth, shares: [(shares[codes[0]], codes[0] == truth)],
    ),
    guess=columns_named("text", "code"),
)
