"""The first rows of a table by column, and which columns look like texts, labels or numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LABEL = r"[\w.&/-]+(?: [\w.&/-]+){0,3}"
_LIST = re.compile(rf"(?:{_LABEL}(?:\s*[,|;]\s*{_LABEL})*)?")
_MARKS = re.compile(r"[,|;]")
_MOST_LABELS = 1000
_LABEL_CHARACTERS = 40


def split_labels(text: str) -> list[str]:
    """Returns the labels in a text that separates them by commas, bars or semicolons."""
    return [label.strip() for label in _MARKS.split(text) if label.strip()]


@dataclass(frozen=True, slots=True)
class Column:
    """Values of one column that are not null, under its name, or its position in a file without a header."""

    name: str | int
    values: Sequence[Any]

    @property
    def is_text(self) -> bool:
        """Whether values are strings of several words, few of which occur twice, or sentences."""
        words = [len(value.split()) for value in self.values if isinstance(value, str)]
        return (
            len(words) == len(self.values) > 0
            and sum(words) >= 2 * len(words)
            and not (
                len(words) >= 10
                and len(set(self.values)) * (2 if sum(words) < 4 * len(words) else 20) <= len(words)
            )
        )

    @property
    def is_label(self) -> bool:
        """Whether values are names or whole numbers, most of which occur again."""
        return _recurring(self.values) and not self.is_text

    @property
    def is_several_labels(self) -> bool:
        """Whether values are lists of labels, or strings with commas, bars or semicolons between labels."""
        if not self.values:
            return False
        if all(isinstance(value, list) for value in self.values):
            return _recurring([one for value in self.values for one in value])
        if not all(isinstance(value, str) and _LIST.fullmatch(value) for value in self.values):
            return False
        split = [split_labels(value) for value in self.values]
        return any(len(one) > 1 for one in split) and _recurring([label for one in split for label in one])

    @property
    def is_number(self) -> bool:
        """Whether values are numbers, some of them with a fraction."""
        numbers = [_number(value) for value in self.values]
        return bool(numbers) and None not in numbers and any(one is not None and one % 1 for one in numbers)

    def is_like(self, other: Column) -> bool:
        """Whether another column may hold the same: texts, numbers, or none but these values."""
        kinds = (self.is_text and other.is_text) or (self.is_number and other.is_number)
        return kinds or {*map(str, other.values)} <= {*map(str, self.values)}


@dataclass(frozen=True, slots=True)
class Sample:
    """The first rows of a part; `lists` are lines of short text files next to it, such as class names."""

    columns: Sequence[Column]
    lists: Sequence[Sequence[str]] = ()

    @property
    def names(self) -> set[str | int]:
        return {column.name for column in self.columns}

    @property
    def texts(self) -> list[Column]:
        return [column for column in self.columns if column.is_text]

    def column(self, name: str) -> Column | None:
        return next((column for column in self.columns if column.name == name), None)

    def mapped(self, **fields: Column | None) -> dict[str, Any]:
        """Returns the field `columns` of the section `task`; nothing where columns have the fields' names."""
        columns = {name: column.name for name, column in fields.items() if column is not None}
        if not any(isinstance(column, int) for column in columns.values()):
            columns = {name: column for name, column in columns.items() if column != name}
        return {"columns": columns} if columns else {}


@dataclass(frozen=True, slots=True)
class Guess:
    fields: Mapping[str, Any]  # Fields of the section `task` besides `name` and `path`
    certainty: int  # 3 = the task's own format, 2 = columns of the right kind, 1 = it would do


def looks_like_a_header(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> bool:
    # The column of an index has no name.
    if len(set(names)) < len(names) or not all(names[1:]) or not any(names):
        return False
    if any(len(name) > 64 or len(name.split()) > 3 or _number(name) is not None for name in names):
        return False
    return not any(name == cell for row in rows for name, cell in zip(names, row, strict=False))


def _recurring(values: Sequence[Any]) -> bool:
    if not values or not all(isinstance(value, str | int) for value in values):
        return False
    distinct = {str(value) for value in values}
    return (
        len(distinct) <= min(_MOST_LABELS, max(2, len(values) // 3))
        and max(map(len, distinct)) <= _LABEL_CHARACTERS
        and not all(_number(value) is not None and not str(value).lstrip("-").isdigit() for value in distinct)
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
