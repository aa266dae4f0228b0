"""One row of a dataset: its fields as written, and where it stands."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainers.errors import BadDataError


@dataclass(frozen=True, slots=True)
class Row:
    """A row; its readers raise `BadDataError` naming place and field.

    Attributes:
        fields: Values by name, as the file has them.
        where: `file, line n` for messages.
        columns: What the file calls a field, where `task.columns` renames it.
    """

    fields: Mapping[str, Any]
    where: str
    columns: Mapping[str, str] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Returns a field that must be a text that is not blank and can be encoded."""
        value = self._present(name)
        if not isinstance(value, str):
            raise self.refusal(name, f"a {type(value).__name__}, not a string")
        if not value.strip():
            raise self.refusal(name, "empty; remove the row or fill it")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise self.refusal(name, "contains half of a surrogate pair") from None
        return value

    def label(self, name: str) -> str | int:
        """Returns a field that must be a class: a name or a number."""
        value = self._present(name)
        if not isinstance(value, str | int):
            raise self.refusal(name, f"{value!r} is neither a name nor a number; write one of the two")
        return value

    def number(self, name: str) -> float:
        """Returns a field that must be a finite number, written as one or as a text."""
        value = self._present(name)
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self.refusal(name, f"{str(value)[:80]!r} is not a finite number; write one such as 3.5")
        return number

    def values(self, name: str) -> list[Any]:
        """Returns a field that must be a list, written as one or as a text with JSON."""
        value = self._present(name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise self.refusal(name, f"{value[:80]!r} is not a JSON list") from None
        if not isinstance(value, list):
            raise self.refusal(name, f"a {type(value).__name__}, not a list")
        return value

    def refusal(self, name: str, problem: str) -> BadDataError:
        return BadDataError(f"{self.where}, field {self.columns.get(name, name)}: {problem}")

    def renamed(self, columns: Mapping[str, str]) -> Row:
        """Returns the row with fields under the task's names; `columns` has the file's name of each."""
        for name, column in columns.items():
            if column not in self.fields:
                raise BadDataError(
                    f"{self.where}: no column {column!r}, which task.columns.{name} names (found: "
                    f"{', '.join(map(str, self.fields)) or 'nothing'}); name one of these"
                )
        named = {name: self.fields[column] for name, column in columns.items()}
        return Row({**self.fields, **named}, self.where, columns)

    def _present(self, name: str) -> Any:
        value = self.fields.get(name)
        if value is None:
            found = ", ".join(map(str, self.fields)) or "nothing"
            advice = ""
            if name in self.fields:
                advice = "; remove the row or fill it"
            elif self.fields:
                advice = f"; set task.columns.{name} to one of these"
            raise self.refusal(name, f"missing (found: {found}){advice}")
        return value
