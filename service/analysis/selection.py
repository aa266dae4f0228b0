"""Which runs an answer is about, and what their figures hold. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Selection:
    """Narrows the runs of the experiments that a question is about.

    Attributes:
        filter: only runs that it takes; the grammar of `service.db.filters`.
        undisturbed: leave out runs that neighbours disturbed while they were measured.
        with_overhead: add to each run an even share of its experiment's overhead.
    """

    filter: str | None = None
    undisturbed: bool = False
    with_overhead: bool = False


EVERYTHING = Selection()
