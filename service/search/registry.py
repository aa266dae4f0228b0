from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from service.search.protocol import Samples
from trainers.config import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchInfo:
    """A search algorithm.

    Attributes:
        name: value of `search.name`.
        summary: its runs in a few words.
        section: the spec's section with the algorithm's own fields.
        samples: whether it takes `search.samples`.
        suggests: its runs are stored without axis values, and get them from `Search.suggest` in turn.
        ends_runs_early: `Search.judge` returns a judge, and `Search.least_share` is below 1.
    """

    name: str
    summary: str
    section: type[Section]
    samples: Samples
    suggests: bool = False
    ends_runs_early: bool = False


SEARCHES: dict[str, SearchInfo] = {}
"""All values of `search.name`; `service.search` adds ours."""


def names(wanted: Callable[[SearchInfo], bool]) -> str:
    """Returns the names of some searches, for messages: `random, asha or tpe`; empty if there are none."""
    found = [search.name for search in SEARCHES.values() if wanted(search)]
    return " or ".join(filter(None, [", ".join(found[:-1]), *found[-1:]]))
