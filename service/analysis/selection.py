from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Selection:
    """Narrows the runs that a question is about.

    Attributes:
        filter: In the grammar of `service.db.filters`.
        undisturbed: Leave out runs that neighbours disturbed while they were measured.
        with_overhead: Add to each run an even share of its experiment's overhead.
    """

    filter: str | None = None
    undisturbed: bool = False
    with_overhead: bool = False


EVERYTHING = Selection()
