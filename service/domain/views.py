"""Saved views of the list of experiments: its filter, order and columns under a name. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlencode

from service.domain.records import StoredRecord

PARAMETERS: Final[tuple[str, ...]] = ("filter", "state", "order_by", "columns")
"""Parameters of the list's address that a view keeps."""
LONGEST_NAME: Final = 80
LONGEST_QUERY: Final = 8_000
MOST_VIEWS: Final = 200
"""Most views of one owner."""


@dataclass(frozen=True, slots=True)
class View(StoredRecord):
    """The list of experiments as someone has saved it."""

    id: int
    """Number of the view."""
    name: str
    """Name for people; an owner has one view of a name."""
    owner: str
    """User who saved it."""
    project: str | None
    """Project that it is meant for; null = none in particular."""
    shared: bool
    """Whether everyone who sees the project sees the view."""
    query: str
    """Filter, state, order_by and columns, as the query of the list's address."""
    created_s: float
    """When it was first saved, in Unix seconds."""


def canonical_query(text: str) -> str:
    """Returns the parameters of a view in one order, without empty ones.

    Raises:
        ValueError: a parameter is unknown, or is there twice.
    """
    found: dict[str, str] = {}
    for name, value in parse_qsl(text.removeprefix("?"), max_num_fields=100):
        if name not in PARAMETERS:
            raise ValueError(f"'{name[:50]}' is not part of a view; use {', '.join(PARAMETERS)}")
        if name in found:
            raise ValueError(f"'{name}' is there twice; keep one of them")
        found[name] = value
    return urlencode({name: found[name] for name in PARAMETERS if name in found})
