"""Mistakes in data that can be found before training, by the rules of the task itself. Imports no torch.

Reads the first rows of each part within an allowance; what only whole parts show, such as a label that
training lacks, is judged where all parts could be read to their ends.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from trainers.config import TaskConfig
from trainers.data.allowance import Allowance, Spent, within
from trainers.data.formats import HEADERLESS, Row, ending, read_lines
from trainers.data.layouts import SourcePart
from trainers.data.sample import Column, Sample, looks_like_a_header
from trainers.data.selection import hashes, normal
from trainers.data.sources import Source, parts_at, renamed
from trainers.errors import BadDataError
from trainers.tasks import TASKS
from trainers.tasks.base import build
from trainers.tasks.info import CutFields

LOOK_BYTES = 8 << 20  # Most that is read of a dataset: its rows are held in memory
LOOK_S = 2.0  # Longest time that it is read for
LENGTHS = (64, 128, 256, 512)  # Values of `task.max_length` whose effect is shown
PERCENTILES = (50, 90, 99, 100)
MOST_ROWS = 100_000  # Rows of a part that are read
_LENGTHS_OF = 10_000  # Texts of a part whose length is measured: every k-th
_ALL_BYTES, _ALL_S = 4 << 30, 600.0  # What is read in all; pipes and devices are never
_SAMPLE_ROWS = 300
_SAMPLE_BYTES, _SAMPLE_S = 4 << 20, 2.0
_FILES_TRIED = 20  # Files of a folder without parts that are each looked at as a dataset, the largest first
_LIST_BYTES = 1 << 16
_SHOWN = 3
_PIECE = re.compile(r"\w+|[^\w\s]")
_WHOLE, _REST, _DIGITS = 6, 3, 2
"""Characters of a word that is usually one token, of each further token, and of a token of digits: on English
prose the estimate is within 1% of BERT's vocabulary."""
Counts = Mapping[str, int]
CountTokens = Callable[[Sequence[str]], list[int]]


@dataclass(frozen=True, slots=True)
class FirstRows:
    parts: Mapping[str, Sequence[Row]]
    whole: bool  # Whether these are all rows of all parts
    mistakes: Sequence[str]  # One line for each part with a row that cannot be used


def mistakes_in(path: Path, task: TaskConfig, *, roots: Sequence[Path] = ()) -> Sequence[str]:
    """Returns what a run would refuse, a line each; no link may lead out of `roots`, empty = anywhere."""
    first = first_rows(path, task, roots=roots)
    if first.mistakes or not first.whole:
        return first.mistakes
    source = Source(path.name, first.parts, lambda part: iter(first.parts[part]))
    try:
        build(task.name).check_parts(source, task)
    except BadDataError as error:
        return [str(error)]
    return []


def longest_example(path: Path, task: TaskConfig, *, roots: Sequence[Path] = ()) -> int:
    """Returns how many tokens the longest of the first training examples has at least.

    With any tokenizer a word with a letter or digit is a token or more, and special tokens stand before and
    after each text. 0 where examples are not rows, as in tasks that divide or join texts.
    """
    if not issubclass(task.info.own_fields, CutFields):
        return 0
    rules, longest = build(task.name), 0
    for row in first_rows(path, task, roots=roots).parts.get("train", ()):
        if texts := rules.texts_of(row, task):
            words = sum(any(map(str.isalnum, word)) for text in texts for word in text.split())
            longest = max(longest, words + 1 + len(texts))
    return min(longest, task.max_length)


def first_rows(path: Path, task: TaskConfig, *, roots: Sequence[Path] = ()) -> FirstRows:
    try:
        with within(Allowance(LOOK_BYTES, LOOK_S, roots)):
            sources = parts_at(path, task)
    except BadDataError as error:
        return FirstRows({}, False, [str(error)])
    except (Spent, OSError):  # Elsewhere it may be readable: the run decides.
        return FirstRows({}, False, [])
    rules = build(task.name)
    parts: dict[str, list[Row]] = {}
    mistakes: list[str] = []
    whole = True
    for part, source in sources.items():
        rows = parts.setdefault(part, [])
        try:
            with within(Allowance(LOOK_BYTES // len(sources), LOOK_S / len(sources), roots)):
                for row in renamed(source.read(), task.columns):
                    rules.texts_of(row, task)
                    rows.append(row)
        except BadDataError as error:
            mistakes.append(str(error))
        except (Spent, OSError):
            whole = False
    return FirstRows(parts, whole, mistakes)


@dataclass(frozen=True, slots=True)
class Lengths:
    tokens: Mapping[int, int]  # Length of examples at each of `PERCENTILES`
    words: Mapping[int, int]
    cut: Mapping[int, float]  # Share of the examples with more tokens than each of `LENGTHS`


@dataclass(slots=True)
class PartContents:
    files: Sequence[str]  # First files of the part, relative to the path
    file_count: int
    rows: int = 0
    whole: bool = True  # Whether all rows were read
    usable: int = 0  # Rows that the task can use
    empty: int = 0  # Rows with an empty text
    labels: dict[str, Counts] = field(default_factory=dict)  # How often each label occurs, by column
    numbers: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # least, mean, greatest
    lengths: Lengths | None = None
    duplicates: int = 0  # Examples whose texts occurred before in the part
    mistakes: list[str] = field(default_factory=list)  # What is wrong with the first rows that cannot be used
    keys: set[int] = field(default_factory=set)  # Hashes of the examples' texts


@dataclass(frozen=True, slots=True)
class Proposal:
    task: Mapping[str, Any]  # Section `task` of a spec, without defaults
    certainty: int  # See `Guess`
    path: Path
    mistakes: Sequence[str] = ()  # What a submission would refuse, in a few rows or of whole parts

    @property
    def cuts(self) -> bool:
        """Whether the task cuts long texts; others divide or pack them."""
        return issubclass(TASKS[self.task["name"]].own_fields, CutFields)


@dataclass(frozen=True, slots=True)
class DataContents:
    path: Path
    files: Mapping[str, int]  # Sizes in bytes
    proposals: Sequence[Proposal]  # Tasks that can read it, the likeliest first
    columns: Mapping[str | int, str]  # Columns as the files have them, with what they look like
    parts: Mapping[str, PartContents]  # Parts as the first proposal reads them
    shared: Mapping[str, int]  # Examples that two parts have in common
    token_count: str  # How tokens were counted
    refused: Mapping[str, str]  # Why other tasks cannot read it, by task


def inspect(path: Path, tokenizer: Path | None = None) -> DataContents:
    """Reads a file or folder as the likeliest task does; estimates tokens without a tokenizer's folder."""
    count = estimated_tokens if tokenizer is None else _counter(tokenizer)
    proposals, refused = _proposals(path)
    if not proposals and path.is_dir():
        files = sorted((one for one in path.iterdir() if one.is_file()), key=_size, reverse=True)
        for file in files[:_FILES_TRIED]:
            others, _ = _proposals(file)
            proposals.extend(others)
    proposals.sort(key=lambda one: (-one.certainty, bool(one.mistakes), -_size(one.path)))
    best = proposals[0] if proposals else None
    parts: dict[str, PartContents] = {}
    columns: Mapping[str | int, str] = {}
    if best is not None:
        parts = _contents(best, count)
        sample = _sample(best.path, TaskConfig.model_validate({**best.task, "path": str(best.path)}))
        columns = {} if sample is None else {one.name: _kind(one) for one in sample.columns}
    names = list(parts)
    shared = {
        f"{one} and {other}": len(parts[one].keys & parts[other].keys)
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    }
    how = "a fast estimate" if tokenizer is None else f"the tokenizer of {tokenizer}"
    return DataContents(path, _files(path), proposals, columns, parts, shared, how, refused)


def estimated_tokens(texts: Sequence[str]) -> list[int]:
    """Returns estimates of the texts' WordPiece tokens, from the lengths of words and numbers."""

    def tokens(piece: str) -> int:
        if piece.isdigit():
            return -(-len(piece) // _DIGITS)
        return 1 + max(0, len(piece) - _WHOLE) // _REST

    return [sum(map(tokens, _PIECE.findall(text))) for text in texts]


def _counter(folder: Path) -> CountTokens:
    from trainers.data import tokenizers

    encode = partial(tokenizers.load(folder).encode_batch_fast, add_special_tokens=False)
    return lambda texts: [len(one) for one in encode(list(texts))]


# -- Which tasks can read it -----------------------------------------------------------------------


def _proposals(path: Path) -> tuple[list[Proposal], dict[str, str]]:
    """Returns the tasks whose checks the first rows pass, and why each other task's do not."""
    proposals: list[Proposal] = []
    refused: dict[str, str] = {}
    for name, info in TASKS.items():
        try:
            sample = _sample(path, TaskConfig(name=name, path=str(path)))
        except BadDataError as error:
            refused[name] = str(error)
            continue
        guess = None if sample is None else info.guess(sample)
        if guess is None:
            refused[name] = f"no columns for {', '.join(info.columns)}"
            continue
        try:
            task = TaskConfig.model_validate({"name": name, "path": str(path), **guess.fields})
        except ValidationError as error:
            refused[name] = str(error.errors()[0]["msg"])
            continue
        mistakes = mistakes_in(path, task)
        if mistakes and not _mostly_usable(path, task):
            refused[name] = mistakes[0]
        else:
            proposals.append(Proposal({"name": name, **guess.fields}, guess.certainty, path, tuple(mistakes)))
    return proposals, refused


def _sample(path: Path, task: TaskConfig) -> Sample | None:
    rows = [] if task.headerless else _without_header(path, task)
    rows = rows or _first_rows(path, task)
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row.fields))
    columns = []
    for name in names:
        values = [value for row in rows if (value := row.fields.get(name)) not in (None, "")]
        position = int(name) if all(str(one).isdigit() for one in names) else name
        columns.append(Column(position, values))
    return Sample(columns, _lists(path))


def _without_header(path: Path, task: TaskConfig) -> list[Row]:
    """Returns the rows of delimited files whose first line is a row; none where it names the columns."""
    headerless = task.model_copy(update={"columns": {task.info.columns[0]: 0}})
    try:
        with within(Allowance(_SAMPLE_BYTES, _SAMPLE_S)):
            files = parts_at(path, task)["train"].files
        ends = {ending(file) for file in files}
        if not (ends <= HEADERLESS.keys() or (len(files) == 1 and ends == {".txt"})):
            return []
        rows = _first_rows(path, headerless)
    except (BadDataError, Spent):
        return []
    cells = [list(row.fields.values()) for row in rows]
    if not cells or not all(isinstance(cell, str) for row in cells for cell in row):
        return []
    return [] if looks_like_a_header([cell.strip() for cell in cells[0]], cells[1:]) else rows


def _mostly_usable(path: Path, task: TaskConfig) -> bool:
    rules, usable = build(task.name), 0
    try:
        rows = list(renamed(iter(_first_rows(path, task)), task.columns))
    except BadDataError:
        return False
    for row in rows:
        with contextlib.suppress(BadDataError):
            rules.texts_of(row, task)
            usable += 1
    return 2 * usable > len(rows)


def _first_rows(path: Path, task: TaskConfig) -> list[Row]:
    rows: list[Row] = []
    with contextlib.suppress(Spent), within(Allowance(_SAMPLE_BYTES, _SAMPLE_S)):
        for row in islice(parts_at(path, task)["train"].read(), _SAMPLE_ROWS):
            rows.append(row)
    return rows


def _lists(path: Path) -> list[list[str]]:
    folder = path if path.is_dir() else path.parent
    lists = []
    for file in sorted(folder.glob("*.txt"))[:20]:
        try:
            if file.is_file() and file.stat().st_size <= _LIST_BYTES:
                lines = [line.strip() for line, _ in read_lines(file) if line.strip()]
                if len(lines) > 1 and len(set(lines)) == len(lines) and max(map(len, lines)) <= 100:
                    lists.append(lines)
        except BadDataError:
            continue
    return lists


def _kind(column: Column) -> str:
    if column.is_several_labels:
        return "labels"
    if column.is_number:
        return "number"
    if column.is_label:
        return "label"
    return "text" if column.is_text else type(column.values[0]).__name__ if column.values else "empty"


# -- What the parts hold ---------------------------------------------------------------------------


def _contents(proposal: Proposal, count: CountTokens) -> dict[str, PartContents]:
    task = TaskConfig.model_validate({**proposal.task, "path": str(proposal.path)})
    root = proposal.path if proposal.path.is_dir() else proposal.path.parent
    with within(Allowance(_ALL_BYTES, _ALL_S)):
        return {
            part: _read_part(source, task, root, count)
            for part, source in parts_at(proposal.path, task).items()
        }


def _read_part(source: SourcePart, task: TaskConfig, root: Path, count: CountTokens) -> PartContents:
    rules = build(task.name)
    files = [str(file.relative_to(root)) for file in source.files[:_SHOWN]]
    if len(source.files) > _SHOWN:
        files.append(f"and {len(source.files) - _SHOWN:,} others")
    part = PartContents(files, len(source.files))
    texts: list[Sequence[str]] = []
    values: dict[str, list[Any]] = {}
    for row in _usable_rows(renamed(source.read(), task.columns), part):
        content: Sequence[str] = ()
        try:
            content = rules.texts_of(row, task)
        except BadDataError as error:
            if len(part.mistakes) < _SHOWN:
                part.mistakes.append(str(error))
        part.empty += _has_empty_text(row, task)
        if not content:
            continue
        part.usable += 1
        texts.append(content)
        for name in task.info.columns:
            value = row.fields.get(name)
            if value is not None and value not in content:
                values.setdefault(name, []).append(value)
    keys = hashes(normal("\n".join(one)) for one in texts).tolist()
    part.keys = set(keys)
    part.duplicates = len(keys) - len(part.keys)
    for name, column in values.items():
        _describe(Column(name, column), part)
    part.lengths = _lengths(texts, count) if texts else None
    return part


def _usable_rows(rows: Iterator[Row], part: PartContents) -> Iterator[Row]:
    try:
        for row in rows:
            if part.rows == MOST_ROWS:
                part.whole = False
                return
            part.rows += 1
            yield row
    except Spent:
        part.whole = False
    except BadDataError as error:
        part.whole = False
        part.mistakes.append(str(error))


def _has_empty_text(row: Row, task: TaskConfig) -> bool:
    values = [row.fields[name] for name in task.info.columns if name in row.fields]
    return any(isinstance(value, str) and not value.strip() for value in values)


def _describe(column: Column, part: PartContents) -> None:
    name = str(column.name)
    if column.is_number:
        numbers = [float(value) for value in column.values]
        part.numbers[name] = (min(numbers), sum(numbers) / len(numbers), max(numbers))
    elif column.is_several_labels:
        part.labels[name] = Counter(
            str(label)
            for value in column.values
            for label in (value if isinstance(value, list) else value.split(","))
        )
    elif column.is_label:
        part.labels[name] = Counter(map(str, column.values))


def _lengths(texts: Sequence[Sequence[str]], count: CountTokens) -> Lengths:
    measured = texts[:: -(-len(texts) // _LENGTHS_OF)]
    flat = [text for one in measured for text in one]
    owners = np.repeat(np.arange(len(measured)), [len(one) for one in measured])
    # [CLS], and a [SEP] after each text.
    tokens = np.bincount(owners, count(flat)) + 1 + np.bincount(owners)
    words = np.bincount(owners, [len(text.split()) for text in flat])
    return Lengths(
        {percent: int(np.percentile(tokens, percent)) for percent in PERCENTILES},
        {percent: int(np.percentile(words, percent)) for percent in PERCENTILES},
        {length: float(np.mean(tokens > length)) for length in LENGTHS},
    )


def _files(path: Path) -> dict[str, int]:
    if path.is_file():
        return {path.name: path.stat().st_size}
    return {
        str(file.relative_to(path)): file.stat().st_size
        for file in islice(sorted(path.rglob("*")), 10_000)
        if file.is_file()
    }


def _size(path: Path) -> int:
    return sum(_files(path).values())
