"""One row of a dataset and where it stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Located:
    """A row and where it stands.

    Attributes:
        text: the text.
        label: as written.
        where: `file, line n` for messages.
    """

    text: str
    label: str | int
    where: str
