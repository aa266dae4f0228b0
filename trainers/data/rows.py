"""One row of a dataset: its fields as written, and where it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainers.errors import BadDataError


@dataclass(frozen=True, slots=True)
class Row:
    """A row and where it stands.

    Attributes:
        fields: values by name, as the file has them.
        where: `file, line n` for messages.
    """

    fields: Mapping[str, Any]
    where: str

    def text(self, name: str) -> str:
        """Returns a field that must be a text with something in it.

        Raises:
            BadDataError: missing, of another type, empty, or not encodable.
        """
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
        """Returns a field that must be a class: a name or a number.

        Raises:
            BadDataError: missing, or of another type.
        """
        value = self._present(name)
        if not isinstance(value, str | int):
            raise self.refusal(name, f"{value!r} is neither a name nor a number")
        return value

    def refusal(self, name: str, problem: str) -> BadDataError:
        """Returns the error that says what is wrong with a field of this row."""
        return BadDataError(f"{self.where}, field {name}: {problem}")

    def _present(self, name: str) -> Any:
        value = self.fields.get(name)
        if value is None:
            raise self.refusal(name, f"missing (found: {', '.join(map(str, self.fields)) or 'nothing'})")
        return value
