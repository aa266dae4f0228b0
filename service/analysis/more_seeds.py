"""The further seeds that an undecided claim needs, as the spec of a new experiment. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from service.search import SEARCHES, Search
from service.search.protocol import Samples


def next_seeds(used: Iterable[int], count: int) -> list[int]:
    excluded = set(used)
    return list(itertools.islice((seed for seed in itertools.count() if seed not in excluded), count))


def further_spec(
    spec: Mapping[str, Any], seeds: Sequence[int], points: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Returns the same experiment with other seeds.

    A search whose runs the axes alone decide keeps only the given points; none = all that it has.
    """
    document = {**spec, "seeds": list(seeds)}
    search = dict(spec.get("search") or {})
    axes = dict(search.get("axes") or {})
    if points and SEARCHES[search.get("name", Search().name)].samples is Samples.unused:
        for axis in axes:
            wanted = [point[axis] for point in points if axis in point]
            if wanted:
                axes[axis] = [value for value in axes[axis] if value in wanted]
        document["search"] = {**search, "axes": axes}
    return document
