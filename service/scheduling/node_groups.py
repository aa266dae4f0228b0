"""Nodes that a pool's autoscaler can start, and how long they take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from service.config.hardware import MARKET_LABEL, Hardware, NodeGroup, lookup, on_market, without_market
from service.scheduling.cluster import (
    ACCELERATOR,
    CPU,
    GIB,
    MEMORY,
    ClusterNode,
    ClusterSnapshot,
    NodesToCome,
)

_LABEL = "ray.io/node-group"  # Ray gives it to nodes that its autoscaler started
REMEMBERED = 5  # Starts of a group, of which the median counts


class NodeStarts:
    """Follows a pool's groups from one look at its cluster to the next."""

    def __init__(
        self,
        groups: Mapping[str, NodeGroup],
        catalogue: Mapping[str, Hardware],
        before: ClusterSnapshot | None,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._there: frozenset[str] | None = None  # Ids of nodes
        self._wanted_s: dict[str, float] = {}  # Since when more is wanted than there is, by hardware
        known = {} if before is None else {each.group: each.started_s for each in before.to_come}
        self._groups = [
            _group(name, group, lookup(group.hardware, catalogue), known.get(name, ()))
            for name, group in groups.items()
        ]

    def want(self, hardware: Collection[str]) -> None:
        """Notes of which hardware experiments may hold more than there is: nodes start for it."""
        now = self._clock()
        self._wanted_s = {name: self._wanted_s.get(name, now) for name in hardware}

    def look(self, snapshot: ClusterSnapshot) -> ClusterSnapshot:
        """Returns the snapshot with what can come besides, and times the nodes that are new in it."""
        if not self._groups or not snapshot.reachable:
            return snapshot
        now, nodes = self._clock(), snapshot.nodes
        new = [node for node in nodes if self._there is not None and node.id not in self._there]
        for number, group in enumerate(self._groups):
            names = {group.hardware, without_market(group.hardware)}
            since = [at_s for name, at_s in self._wanted_s.items() if name in names]
            took = [now - min(since) for node in new if since and _is_of(node, group)]
            self._groups[number] = replace(group, started_s=(*group.started_s, *took)[-REMEMBERED:])
        self._there = frozenset(node.id for node in nodes)
        return replace(snapshot, to_come=_besides(self._groups, (), nodes))


def still_to_come(seen: ClusterSnapshot | None, nodes: Collection[ClusterNode]) -> tuple[NodesToCome, ...]:
    """Returns what could come at an earlier look, counted by the nodes of now: some have come, some gone."""
    return () if seen is None else _besides(seen.to_come, seen.nodes, nodes)


def _besides(
    groups: Collection[NodesToCome], then: Collection[ClusterNode], now: Collection[ClusterNode]
) -> tuple[NodesToCome, ...]:
    def there(group: NodesToCome, nodes: Collection[ClusterNode]) -> int:
        return sum(_is_of(node, group) for node in nodes)

    return tuple(
        replace(each, count=max(0, each.count + there(each, then) - there(each, now))) for each in groups
    )


def _group(name: str, group: NodeGroup, hardware: Hardware, started_s: tuple[float, ...]) -> NodesToCome:
    """Returns all that a group can start while nothing of it is there."""
    device = hardware.resource or hardware.kind.ray_resource
    resources = {CPU: float(group.cpus)}
    if device is not None:
        resources[device] = float(group.devices)
    if hardware.accelerator_type is not None:
        resources[f"{ACCELERATOR}{hardware.accelerator_type}"] = 1.0
    if group.memory_gib is not None:
        resources[MEMORY] = group.memory_gib * GIB
    devices = group.cpus if device is None else group.devices
    labels, named = hardware.labels, hardware.name
    if group.market is not None:
        labels, named = {**labels, MARKET_LABEL: group.market}, on_market(named, group.market)
    start_s = 60.0 * group.start_minutes
    return NodesToCome(name, named, devices, group.max, start_s, started_s, resources, labels)


def _is_of(node: ClusterNode, group: NodesToCome) -> bool:
    """Returns whether a node is one of a group: by Ray's label, else by what it has."""
    if _LABEL in node.labels:
        return node.alive and node.labels[_LABEL] == group.group
    counted = {name: amount for name, amount in group.resources.items() if name != MEMORY}
    alike = group.labels.items() <= node.labels.items() and counted.items() <= node.resources.items()
    return node.alive and alike
