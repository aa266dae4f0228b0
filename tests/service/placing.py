"""Whether groups of workers fit next to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from service.scheduling.cluster import ClusterNode, FreeRoom


def fits(
    groups: Sequence[tuple[Mapping[str, float], Mapping[str, str], int]], nodes: Sequence[ClusterNode]
) -> bool:
    """Groups are resources of each worker, labels of its node, and the number of workers."""
    room = FreeRoom(nodes)
    return all(room.take(*group) for group in groups)
