"""Mistakes in data that can be found before training, by the rules of the task itself. Imports no torch.

Reads the first rows of each part within an allowance; what only whole parts show, such as a label that
training lacks, is judged where all parts could be read to their ends.
"""

import contextlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from trainers.checkpoints.predictions import source_of
from trainers.config import TaskConfig
from trainers.data.allowance import Allowance, Spent, within
from trainers.data.formats import READERS, SEVERAL, Row, ending, has_header, read_lines
from trainers.data.layouts import (
    NAMES,
    TRAIN,
    VALIDATION,
    AmbiguousPartError,
    SourcePart,
    has_tabs,
    has_word,
    matching_parts,
)
from trainers.data.sample import Column, Sample, split_labels
from trainers.data.selection import hashes, normal
from trainers.data.sources import MALFORMED, UNLABELLED, SkippedRows, Source, parts_at, read_rows, renamed
from trainers.errors import BadDataError
from trainers.tasks import TASKS
from trainers.tasks.base import build
from trainers.tasks.info import CutFields, OwnFields, TaskInfo

LOOK_BYTES = 8 << 20  # Most that is read of a dataset: its rows are held in memory
LOOK_S = 2.0  # Longest time that it is read for
LENGTHS = (64, 128, 256, 512)  # Values of `task.max_length` whose effect is shown
PERCENTILES = (50, 90, 99, 100)
MOST_ROWS = 100_000  # Rows of a part that are read
_LENGTHS_OF = 10_000  # Texts of a part whose length is measured: every k-th
_COUNTED_BYTES = 64 << 20  # What is read to count training examples
_ALL_BYTES, _ALL_S = 4 << 30, 600.0  # What is read in all; pipes and devices are never
_SAMPLE_ROWS = 300
_SAMPLE_BYTES, _SAMPLE_S = 4 << 20, 2.0
_FILES_TRIED = 20  # Files of a folder without parts that are each looked at as a dataset, the largest first
_LIST_BYTES = 1 << 16
_SHOWN = 3
_SAMPLES, _BARS = 20, 24  # Examples of a part that are shown, and bars of its lengths
_KINDS = (UNLABELLED, MALFORMED)
_GARBLED = re.compile(r"[ÂÃ][\x80-\xbf]|â[\x80-\x9f\u0192-\u2122]|[\x80-\x9f\ufffd\ufeff]")
"""Characters of UTF-8 that were decoded as another encoding, or not at all."""
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
    skipped: SkippedRows = field(default_factory=SkippedRows)


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
    skipped = SkippedRows()
    whole = True

    def sound(row: Row) -> Row:
        rules.texts_of(row, task)
        return row

    for part, source in sources.items():
        rows = parts.setdefault(part, [])
        try:
            with within(Allowance(LOOK_BYTES // len(sources), LOOK_S / len(sources), roots)):
                for row in read_rows(renamed(source.read(), part, task), sound, task, skipped):
                    rows.append(row)
        except BadDataError as error:
            mistakes.append(str(error))
        except (Spent, OSError):
            whole = False
    return FirstRows(parts, whole, mistakes, skipped)


@dataclass(frozen=True, slots=True)
class Lengths:
    tokens: Mapping[int, int]  # Length of examples at each of `PERCENTILES`
    words: Mapping[int, int]
    cut: Mapping[int, float]  # Share of the examples with more tokens than each of `LENGTHS`
    histogram: Sequence[tuple[int, int]]  # Tokens up to which, and how many examples have so many


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
    skipped: SkippedRows = field(default_factory=SkippedRows)  # Rows that cannot be used
    remarks: list[str] = field(default_factory=list)  # What is doubtful about rows that can be used
    mistakes: list[str] = field(default_factory=list)  # Why the rest of the part cannot be read
    keys: set[int] = field(default_factory=set)  # Hashes of the examples' texts
    # Place, texts and labels by field of some examples, drawn at random.
    samples: list[tuple[str, Sequence[str], Mapping[str, Any]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Proposal:
    task: Mapping[str, Any]  # Section `task` of a spec, without defaults
    certainty: int  # See `Guess`
    path: Path
    unused: Mapping[str, str] = field(default_factory=dict)  # Why a file is left out, by its path

    @property
    def cuts(self) -> bool:
        """Whether the task cuts long texts; others divide or pack them."""
        return issubclass(TASKS[self.task["name"]].own_fields, CutFields)

    @property
    def config(self) -> TaskConfig:
        return TaskConfig.model_validate({**self.task, "path": str(self.path)})


@dataclass(frozen=True, slots=True)
class DataContents:
    path: Path
    files: Mapping[str, int]  # Sizes in bytes
    proposals: Sequence[Proposal]  # Tasks that can read it, the likeliest first
    columns: Mapping[str | int, str]  # Columns as the files have them, with what they look like
    parts: Mapping[str, PartContents]  # Parts as the first proposal reads them
    unused: Mapping[str, str]  # Why the first proposal does not read a file, by its path
    shared: Mapping[str, int]  # Examples that two parts have in common
    token_count: str  # How tokens were counted
    refused: Mapping[str, str]  # Why other tasks cannot read it, by task


def inspect(path: Path, tokenizer: Path | None = None) -> DataContents:
    """Reads a file or folder as the likeliest task does; estimates tokens without a tokenizer's folder."""
    proposals, refused = _proposals(path)
    if not proposals and path.is_dir():
        parts_there = matching_parts(path)
        files = sorted((one for one in path.iterdir() if one.is_file()), key=_size, reverse=True)
        forms = {ending(file) for file in parts_there.values()}
        files = [
            one
            for one in files
            if one not in parts_there.values() and ending(one) in (forms or {ending(one)})
        ]
        for file in files[:_FILES_TRIED]:
            others = {part: other.name for part, other in parts_there.items()}
            found, _ = _proposals(path, {TRAIN: file.name, **others}) if others else _proposals(file)
            proposals.extend(found)
    proposals.sort(key=lambda one: (-one.certainty, -_size(one.path)))
    parts: dict[str, PartContents] = {}
    columns: Mapping[str | int, str] = {}
    unused: Mapping[str, str] = {}
    if proposals:
        parts = contents_as(proposals[0].config, proposals[0].path, Allowance(_ALL_BYTES, _ALL_S), tokenizer)
        proposals[0] = best = _skipping(proposals[0], [part.skipped for part in parts.values()])
        task = best.config
        sample = _sample(best.path, task, TRAIN, by_position=task.headerless)
        columns = {} if sample is None else {one.name: _kind(one) for one in sample.columns}
        unused = _unused(path, best)
    how = "a fast estimate" if tokenizer is None else f"the tokenizer of {tokenizer}"
    return DataContents(
        path, _files(path), proposals, columns, parts, unused, shared_examples(parts), how, refused
    )


def contents_as(
    task: TaskConfig, path: Path, allowance: Allowance, tokenizer: Path | None = None
) -> dict[str, PartContents]:
    """Reads what a file or folder holds as a task does, as far as the allowance goes."""
    count = estimated_tokens if tokenizer is None else _counter(tokenizer)
    root = path if path.is_dir() else path.parent
    with within(allowance):
        return {
            part: _read_part(part, source, task.model_copy(update={"skip": _KINDS}), root, count)
            for part, source in parts_at(path, task).items()
        }


def shared_examples(parts: Mapping[str, PartContents]) -> dict[str, int]:
    return {
        f"{one} and {other}": len(parts[one].keys & parts[other].keys)
        for one, other in itertools.combinations(parts, 2)
    }


def texts_at(
    task: TaskConfig,
    path: Path,
    allowance: Allowance,
    places: Set[tuple[Any, ...]],
    before_s: float,
) -> dict[tuple[Any, ...], Sequence[str]]:
    """Returns the texts of rows by their file and number, of files that have not changed since a time."""
    rules, found = build(task.name), dict[tuple[Any, ...], Sequence[str]]()
    files = {file for file, _ in places}
    with contextlib.suppress(Spent), within(allowance):
        for part, source in parts_at(path, task).items():
            own = [file for file in source.files if str(file) in files]
            if not own or max(file.stat().st_mtime for file in own) > before_s:
                continue
            for row in renamed(source.read(), part, task):
                if (place := tuple(source_of(row.where).values())) in places:
                    found[place] = rules.texts_of(row, task)
                    if len(found) == len(places):
                        return found
    return found


def _unused(path: Path, best: Proposal) -> dict[str, str]:
    read = {file for part in parts_at(best.path, best.config).values() for file in part.files}
    lists = {file for file, names in _lists(path) if names == best.task.get("labels")}
    others = {name: path / name for name in _files(path)} if path.is_dir() else {}
    return {
        name: best.unused.get(name) or _why_unused(file)
        for name, file in others.items()
        if file not in read and file not in lists
    }


def _why_unused(file: Path) -> str:
    if ending(file) not in {*READERS, *SEVERAL, ".txt"}:
        return "not a format of data"
    part = next((part for part, names in NAMES.items() for name in names if has_word(file, name)), None)
    return (
        "its name has no part's name in it, such as train; to read it, set task.parts"
        if part is None
        else f"could be the {part} part; to read it, set task.parts.{part}"
    )


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


def _proposals(path: Path, parts: Mapping[str, str] | None = None) -> tuple[list[Proposal], dict[str, str]]:
    """Returns the tasks that can read most of the first rows, and why each other task cannot."""
    proposals: list[Proposal] = []
    refused: dict[str, str] = {}
    for name in TASKS:
        try:
            proposals.append(_proposal(name, path, parts or {}))
        except BadDataError as error:
            refused[name] = str(error)
        except ValidationError as error:
            refused[name] = str(error.errors()[0]["msg"])
    return proposals, refused


def _proposal(name: str, path: Path, parts: Mapping[str, str]) -> Proposal:
    info, task = TASKS[name], TaskConfig.model_validate({"name": name, "path": str(path), "parts": parts})
    try:
        sources = parts_at(path, task)
    except AmbiguousPartError:
        parts = {part: file.name for part, file in matching_parts(path).items()}
        task = task.model_copy(update={"parts": parts})
        sources = parts_at(path, task)
    headed = [_has_header(file) for source in sources.values() for file in source.files[:_SHOWN]]
    samples = {part: _sample(path, task, part, by_position=not all(headed)) for part in sources}
    train = samples[TRAIN]
    guess = None if train is None else info.guess(train)
    if train is None or guess is None:
        raise BadDataError(f"no columns for {', '.join(info.columns)}")
    columns, lacking = _columns_of_all(guess.fields.get("columns", {}), samples, info)
    if lacking and path.is_file():
        raise BadDataError(next(iter(lacking.values())))
    unused = {
        str(file.relative_to(path)): why for part, why in lacking.items() for file in sources[part].files
    }
    if lacking or parts:
        parts = {part: _name_of(of.files, path) for part, of in sources.items() if part not in lacking}
    fields = {
        "name": name,
        **({"parts": parts} if parts else {}),
        **guess.fields,
        **({"columns": columns} if columns else {}),
    }
    proposal = Proposal(fields, guess.certainty, path, unused)
    first = first_rows(path, proposal.config.model_copy(update={"skip": _KINDS}))
    usable = sum(map(len, first.parts.values()))
    if (
        first.mistakes
        or (first.whole and not usable)
        or 2 * usable < usable + first.skipped.counts[MALFORMED]
    ):
        raise BadDataError((*first.mistakes, *first.skipped.first, "no rows")[0])
    return _skipping(proposal, [first.skipped])


def _skipping(proposal: Proposal, skipped: Sequence[SkippedRows]) -> Proposal:
    kinds = [
        kind
        for kind in _KINDS
        if kind in proposal.task.get("skip", ()) or any(one.counts[kind] for one in skipped)
    ]
    return replace(proposal, task={**proposal.task, "skip": kinds}) if kinds else proposal


def _columns_of_all(
    columns: Mapping[str, str | int], samples: Mapping[str, Sample | None], info: TaskInfo
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the columns, by part where they differ from training, and why a part lacks some."""
    every: dict[str, Any] = dict(columns)
    lacking: dict[str, str] = {}
    train = samples[TRAIN]
    assert train is not None
    for part, sample in samples.items():
        if sample is None or part == TRAIN:
            continue
        theirs, without = _other_names(columns, train, sample, info)
        if without:
            lacking[part] = f"no column for {', '.join(without)} in the {part} part"
            continue
        for name, column in theirs.items():
            if not isinstance(every.get(name), dict):
                every[name] = dict.fromkeys(samples, every.get(name, name))
            every[name][part] = column
    return every, lacking


def _other_names(
    columns: Mapping[str, Any], train: Sample, other: Sample, info: TaskInfo
) -> tuple[dict[str, str | int], list[str]]:
    """Returns what another part calls fields whose column it lacks, and fields that it has no column for."""
    there, here = ({column.name: column for column in sample.columns} for sample in (train, other))
    places = dict(zip(there, here, strict=True)) if len(there) == len(here) else {}
    guess = info.guess(other)
    theirs: dict[str, str | int] = {}
    lacking: list[str] = []
    for name in info.columns:
        column = columns.get(name, name)
        if column not in there or (column in here and (here[column].values or name not in info.labels)):
            continue
        guessed = None if guess is None else guess.fields.get("columns", {}).get(name, name)
        found = places.get(column)
        if found is None or found in there or not there[column].is_like(here[found]):
            found = guessed
        if found is not None and found in here:
            theirs[name] = found
        elif guess is None:
            lacking.append(name)
    return theirs, lacking


def _name_of(files: Sequence[Path], folder: Path) -> str:
    names = [file.relative_to(folder).as_posix() for file in files]
    prefix = "".join(
        letters[0] for letters in takewhile(lambda of: len({*of}) == 1, zip(*names, strict=False))
    )
    return names[0] if len(names) == 1 else f"{prefix}*{ending(files[0])}"


def _has_header(file: Path) -> bool:
    try:
        with within(Allowance(_SAMPLE_BYTES, _SAMPLE_S)):
            is_table = ending(file) != ".txt" or has_tabs(file)
            return not is_table or has_header(file, ".tsv" if ending(file) == ".txt" else ending(file))
    except Spent:
        return True


def _sample(path: Path, task: TaskConfig, part: str, *, by_position: bool) -> Sample | None:
    if by_position and not task.headerless:
        task = task.model_copy(update={"columns": {task.info.columns[0]: 0}})
    rows: list[Row] = []
    with contextlib.suppress(Spent), within(Allowance(_SAMPLE_BYTES, _SAMPLE_S)):
        for row in islice(parts_at(path, task)[part].read(), _SAMPLE_ROWS):
            if not row.broken:
                rows.append(row)
    if not rows:
        return None
    names = list(dict.fromkeys(name for row in rows for name in row.fields))
    columns = []
    for name in names:
        values = [value for row in rows if (value := row.fields.get(name)) not in (None, "")]
        position = int(name) if all(str(one).isdigit() for one in names) else name
        columns.append(Column(position, values))
    return Sample(columns, [names for _, names in _lists(path)])


def _lists(path: Path) -> list[tuple[Path, list[str]]]:
    folder = path if path.is_dir() else path.parent
    lists = []
    for file in sorted(folder.glob("*.txt"))[:20]:
        try:
            if file.is_file() and file.stat().st_size <= _LIST_BYTES:
                lines = [line.strip() for line, _ in read_lines(file) if line.strip()]
                if len(lines) > 1 and len(set(lines)) == len(lines) and max(map(len, lines)) <= 100:
                    lists.append((file, lines))
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


def train_count(path: Path, task: TaskConfig, *, roots: Sequence[Path] = ()) -> int | None:
    """Returns about how many examples a run trains on; None = they are not rows, or cannot be read here.

    Of more than what is read of a first look, the rest is counted by its size.
    """
    if not issubclass(task.info.own_fields, CutFields):
        return None
    allowance, rows = Allowance(_COUNTED_BYTES, LOOK_S, roots), 0
    try:
        with within(allowance):
            parts = parts_at(path, task)
            try:
                for _ in parts[TRAIN].read():
                    rows += 1
            except Spent:
                read = _COUNTED_BYTES - max(0, allowance.left_bytes)
                rows = round(rows * max(1.0, sum(file.stat().st_size for file in parts[TRAIN].files) / read))
    except (BadDataError, Spent, OSError):
        return None
    held_out = 0.0 if VALIDATION in parts else task.validation_fraction
    return round(rows * (1.0 - held_out)) or None


def _read_part(
    name: str, source: SourcePart, task: TaskConfig, root: Path, count: CountTokens
) -> PartContents:
    rules = build(task.name)
    files = [str(file.relative_to(root)) for file in source.files[:_SHOWN]]
    if len(source.files) > _SHOWN:
        files.append(f"and {len(source.files) - _SHOWN:,} others")
    part = PartContents(files, len(source.files))
    texts: list[Sequence[str]] = []
    values: dict[str, list[Any]] = {}
    text_fields = [one for one in task.info.columns if one not in task.info.labels]
    # A text may have several customs codes, and as many labels as `multi_label` allows.
    judged = "label" in task.info.labels and not getattr(task.own(OwnFields), "multi_label", False)
    placed: list[tuple[str, Sequence[str], Any]] = []
    chance = random.Random(0)

    def use(row: Row) -> tuple[Row, Sequence[str]]:
        part.empty += any(one in row.fields and row.lacks(one) for one in text_fields)
        return row, rules.texts_of(row, task)

    rows = _usable_rows(renamed(source.read(), name, task), part)
    for row, content in read_rows(rows, use, task, part.skipped):
        if not content:
            continue
        part.usable += 1
        # Each row is as likely to be one of the samples as another (reservoir sampling).
        at = len(part.samples) if len(part.samples) < _SAMPLES else chance.randrange(part.usable)
        if at < _SAMPLES:
            labels = {one: row.fields[one] for one in task.info.labels if one in row.fields}
            part.samples[at : at + 1] = [(row.where, content, labels)]
        texts.append(content)
        placed.append((row.where, content, row.fields.get("label") if judged else None))
        for one in task.info.labels:
            value = row.fields.get(one)
            if value is not None:
                values.setdefault(one, []).append(value)
    part.remarks.extend(_remarks(placed))
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


def _remarks(rows: Sequence[tuple[str, Sequence[str], Any]]) -> Iterator[str]:
    """Yields what is doubtful about usable rows, given as their place, texts and label."""
    garbled = [
        (where, damage.string[max(0, damage.start() - 10) : damage.end() + 10])
        for where, texts, _ in rows
        if (damage := next(filter(None, map(_GARBLED.search, texts)), None))
    ]
    if garbled:
        where, shown = garbled[0]
        yield (
            f"{len(garbled):,} {'row looks' if len(garbled) == 1 else 'rows look'} decoded with the wrong "
            f"encoding, the first at {where} ({shown!r}); repair the text, such as with ftfy.fix_text"
        )
    labels: dict[int, str] = {}
    contrary: dict[int, str] = {}
    for where, texts, label in rows:
        if isinstance(label, str | int):
            key = hash(normal("\n".join(texts)))
            if labels.setdefault(key, str(label).strip()) != str(label).strip():
                contrary.setdefault(key, where)
    if contrary:
        yield (
            f"{len(contrary):,} {'text has' if len(contrary) == 1 else 'texts have'} two labels, the first "
            f"at {next(iter(contrary.values()))}; keep one row of each"
        )


def _describe(column: Column, part: PartContents) -> None:
    name = str(column.name)
    filled = replace(column, values=[value for value in column.values if value not in ("", [])])
    if filled.is_number:
        numbers = [float(value) for value in filled.values]
        part.numbers[name] = (min(numbers), sum(numbers) / len(numbers), max(numbers))
    elif filled.is_several_labels:
        part.labels[name] = Counter(
            str(label)
            for value in column.values
            for label in ((value if isinstance(value, list) else split_labels(value)) or ["(none)"])
        )
    elif filled.is_label:
        part.labels[name] = Counter(map(str, filled.values))


def _lengths(texts: Sequence[Sequence[str]], count: CountTokens) -> Lengths:
    measured = texts[:: -(-len(texts) // _LENGTHS_OF)]
    flat = [text for one in measured for text in one]
    owners = np.repeat(np.arange(len(measured)), [len(one) for one in measured])
    # [CLS], and a [SEP] after each text.
    tokens = np.bincount(owners, count(flat)) + 1 + np.bincount(owners)
    words = np.bincount(owners, [len(text.split()) for text in flat])
    numbers, edges = np.histogram(tokens, min(_BARS, int(tokens.max())), (0, tokens.max()))
    return Lengths(
        {percent: int(np.percentile(tokens, percent)) for percent in PERCENTILES},
        {percent: int(np.percentile(words, percent)) for percent in PERCENTILES},
        {length: float(np.mean(tokens > length)) for length in LENGTHS},
        list(zip(np.ceil(edges[1:]).astype(int).tolist(), numbers.tolist(), strict=True)),
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
