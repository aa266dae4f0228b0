"""The further seeds that an undecided claim asks for, as the spec of a new experiment. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def next_seeds(used: Iterable[int], count: int) -> list[int]:
    """The smallest seeds that were not used yet."""
    taken = set(used)
    return list(itertools.islice((seed for seed in itertools.count() if seed not in taken), count))


def further_spec(
    spec: Mapping[str, Any], seeds: Sequence[int], points: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The same experiment with other seeds.

    Args:
        spec: canonical document of the experiment.
        seeds: to run.
        points: axis values that are asked about; a grid keeps only those. None = the whole grid.
    """
    document = {**spec, "seeds": list(seeds)}
    search = dict(spec.get("search") or {})
    axes = dict(search.get("axes") or {})
    if points and search.get("name", "grid") == "grid":
        for axis in axes:
            wanted = [point[axis] for point in points if axis in point]
            if wanted:
                axes[axis] = [value for value in axes[axis] if value in wanted]
        document["search"] = {**search, "axes": axes}
    return document
