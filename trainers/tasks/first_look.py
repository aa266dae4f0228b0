"""Mistakes in data that can be found before anything is trained, by the rules of the task itself.

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

LOOK_BYTES = 8 << 20
"""Most that is read of a dataset: its rows are held in memory."""
LOOK_S = 2.0
"""Longest time that it is read for."""


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The first rows of a dataset, or all of them.

    Attributes:
        name: What people call it.
        parts: Rows of each part, under the task's names.
        whole: whether these are all rows of all parts.
        mistakes: one line for each part with a row that cannot be used.
    """

    name: str
    parts: Mapping[str, Sequence[Row]]
    whole: bool
    mistakes: Sequence[str]

    def rows(self, part: str) -> Iterator[Row]:
        """Yields the rows of a part."""
        return iter(self.parts[part])


def mistakes_in(path: Path, task: configuration.Task, *, roots: Sequence[Path] = ()) -> Sequence[str]:
    """Returns what a run of the task would refuse of a file or folder: one line for each mistake.

    Args:
        path: Dataset.
        task: Task of the run.
        roots: folders that no link may lead out of; empty = anywhere.
    """
    first = first_rows(path, task, roots=roots)
    if first.mistakes or not first.whole:
        return first.mistakes
    try:
        build(task.name).check_parts(first, task)
    except BadDataError as error:
        return [str(error)]
    return []


def first_rows(path: Path, task: configuration.Task, *, roots: Sequence[Path] = ()) -> FirstRows:
    """Reads the first rows of a dataset as a run of the task would.

    Args:
        path, task, roots: See `mistakes_in`.
    """
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
