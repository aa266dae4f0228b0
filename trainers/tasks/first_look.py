"""Mistakes in data that can be found before training, by the rules of the task itself.

Reads the first rows of each part within an allowance; what only whole parts show, such as a label that the
training part lacks, is judged where all parts could be read to their ends. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainers import config as configuration
from trainers.data.allowance import Allowance, Spent, within
from trainers.data.rows import Row
from trainers.data.sources import parts_at, renamed
from trainers.errors import BadDataError
from trainers.tasks.base import build
from trainers.tasks.info import CutFields

LOOK_BYTES = 8 << 20
"""Most that is read of a dataset: its rows are held in memory."""
LOOK_S = 2.0
"""Longest time that it is read for."""


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The first rows of a dataset, or all of them.

    Attributes:
        whole: Whether these are all rows of all parts.
        mistakes: One line for each part with a row that cannot be used.
    """

    name: str
    parts: Mapping[str, Sequence[Row]]
    whole: bool
    mistakes: Sequence[str]

    def rows(self, part: str) -> Iterator[Row]:
        return iter(self.parts[part])


def mistakes_in(path: Path, task: configuration.Task, *, roots: Sequence[Path] = ()) -> Sequence[str]:
    """Returns what a run of the task would refuse in a file or folder, one line for each mistake.

    No link may lead out of `roots`; empty = anywhere.
    """
    first = first_rows(path, task, roots=roots)
    if first.mistakes or not first.whole:
        return first.mistakes
    try:
        build(task.name).check_parts(first, task)
    except BadDataError as error:
        return [str(error)]
    return []


def longest_example(path: Path, task: configuration.Task, *, roots: Sequence[Path] = ()) -> int:
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


def first_rows(path: Path, task: configuration.Task, *, roots: Sequence[Path] = ()) -> FirstRows:
    try:
        with within(Allowance(LOOK_BYTES, LOOK_S, roots)):
            sources = parts_at(path, task)
    except BadDataError as error:
        return FirstRows(path.name, {}, False, [str(error)])
    except (Spent, OSError):  # Elsewhere it may be readable: the run decides.
        return FirstRows(path.name, {}, False, [])
    rules = build(task.name)
    found: dict[str, list[Row]] = {}
    mistakes: list[str] = []
    whole = True
    for part, source in sources.items():
        rows = found.setdefault(part, [])
        try:
            with within(Allowance(LOOK_BYTES // len(sources), LOOK_S / len(sources), roots)):
                for row in renamed(source.read(), task.columns):
                    rules.check_row(row, task)
                    rows.append(row)
        except BadDataError as error:
            mistakes.append(str(error))
        except (Spent, OSError):
            whole = False
    return FirstRows(path.name, found, whole, mistakes)
