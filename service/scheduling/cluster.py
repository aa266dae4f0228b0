"""What a pool's cluster has, as its scheduler last saw it, and what could never run there. Pure.

The scheduler writes the snapshot; the API and the preview read it, so that neither needs Ray.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import NamedTuple

from service.config.document import Problem, SpecError
from service.config.hardware import CATALOGUE, Hardware, lookup
from service.domain.access import DEFAULT_POOL
from service.domain.serialization import Serializable
from service.specs.experiment import ExperimentSpec
from trainers.config import SHARERS
from trainers.device_kinds import DEVICE_KINDS

CPU = "CPU"
MEMORY = "memory"  # In bytes; these are Ray's names of resources
ACCELERATOR = "accelerator_type:"  # Beginning of Ray's resources that a node has for its model of accelerator
NODE_ID = "ray.io/node-id"  # Label that Ray gives each node
NODE_STATES = ("alive", "draining", "drained", "lost")
GIB = 1 << 30
_DEVICES = frozenset({CPU, *(kind.ray_resource for kind in DEVICE_KINDS.values())})


@dataclass(frozen=True, slots=True)
class ClusterNode(Serializable):
    """One node of the cluster."""

    id: str  # Ray's id of the node; empty = it can come
    name: str  # Host name or address; of one that can come, its group
    alive: bool  # Whether it answers Ray
    resources: dict[str, float]  # All that it has, by Ray resource name
    available: dict[str, float]  # What of that is free
    labels: dict[str, str] = field(default_factory=dict)  # What it is called, by Ray label name
    draining: bool = False  # Whether it is about to go: it starts nothing more
    drain_deadline_s: float | None = None  # When it goes, Unix time; null when that is not known
    message: str | None = None  # Why it has gone, as Ray puts it; null while it is there

    @property
    def stays(self) -> bool:
        return self.alive and not self.draining

    @property
    def departure(self) -> str:
        """Returns in words that it is gone or about to go."""
        if not self.alive:
            return f"node {self.name} was {self.state}"
        at = self.drain_deadline_s
        when = "" if at is None else f", and goes at {datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"
        return f"node {self.name} is draining{when}"

    def has(self, labels: Mapping[str, str]) -> bool:
        return self.stays and all(
            (self.id if name == NODE_ID else self.labels.get(name)) == value for name, value in labels.items()
        )

    @property
    def state(self) -> str:
        if self.alive:
            return "draining" if self.draining else "alive"
        return "drained" if self.draining else "lost"

    @property
    def devices(self) -> dict[str, tuple[float, float]]:
        """Returns CPUs and accelerators by kind, such as `A100`: all, and those that are free."""
        if not self.alive:
            return {}
        marks = (name.removeprefix(ACCELERATOR) for name in self.resources if name.startswith(ACCELERATOR))
        model = next(marks, None)
        return {
            CPU if name == CPU else model or name: (total, self.available.get(name, total))
            for name, total in self.resources.items()
            if name in _DEVICES
        }

    @property
    def pin(self) -> dict[str, str]:
        return {NODE_ID: self.id} if self.id else {}

    @property
    def left(self) -> ClusterNode:
        """Returns the node with only what is free of it."""
        return replace(self, resources={**self.resources, **self.available})

    @property
    def idle(self) -> bool:
        """Returns whether none of its CPUs is reserved, as far as is known."""
        return self.available.get(CPU, self.resources.get(CPU, 0.0)) >= self.resources.get(CPU, 0.0)


@dataclass(frozen=True, slots=True)
class NodesToCome(Serializable):
    """Nodes of one group that the autoscaler of a pool can start besides those that are there."""

    group: str  # Name of the group
    hardware: str  # Name in the catalogue
    devices: int  # Devices of each
    count: int  # How many more can come
    declared_s: float  # How long one takes to start, as declared
    started_s: tuple[float, ...]  # How long the last ones have taken
    resources: dict[str, float]  # What each has, by Ray resource name
    labels: dict[str, str]  # What each is called, by Ray label name

    @property
    def start_s(self) -> float:
        return statistics.median(self.started_s) if self.started_s else self.declared_s

    @property
    def nodes(self) -> tuple[ClusterNode, ...]:
        return (ClusterNode("", self.group, True, self.resources, {}, self.labels),) * self.count

    @property
    def node_in_words(self) -> str:
        minutes = max(1, round(self.start_s / 60.0))
        return f"a node of {self.devices} {self.hardware}, about {minutes} minute{'s' * (minutes > 1)}"

    @property
    def words(self) -> str:
        return f"starts {self.node_in_words}"


@dataclass(frozen=True, slots=True)
class ClusterSnapshot(Serializable):
    at_s: float
    reachable: bool  # Whether Ray answered
    dashboard_url: str | None
    nodes: tuple[ClusterNode, ...]
    to_come: tuple[NodesToCome, ...] = ()  # What the pool's autoscaler can start besides

    @property
    def possible(self) -> tuple[ClusterNode, ...]:
        """Returns the nodes, and after them those that can come."""
        return self.nodes + tuple(node for each in self.to_come for node in each.nodes)

    def to_start(
        self, amounts: Mapping[str, float], labels: Mapping[str, str], workers: int
    ) -> NodesToCome | None:
        """Returns what starts for workers that wait; None = they fit into what is free, or nothing can."""
        able = [each for each in self.to_come if FreeRoom(each.nodes).holds(amounts, labels, 1)]
        if not able or FreeRoom([node.left for node in self.nodes]).holds(amounts, labels, workers):
            return None
        return able[0]

    @property
    def totals(self) -> dict[str, float]:
        total: dict[str, float] = {}
        for node in self.nodes:
            for name, amount in node.resources.items() if node.stays else ():
                total[name] = total.get(name, 0.0) + amount
        return total


@dataclass(frozen=True, slots=True)
class Pool(Serializable):
    """A pool and its Ray cluster, as one of its schedulers last saw it."""

    pool: str  # Name of the pool, which specs give
    schedulers: tuple[str, ...]
    """Its schedulers with a recent heartbeat; without one nothing of it is claimed."""
    at_s: float | None  # When the scheduler looked; null when none ever did
    age_s: float | None  # How long ago that was
    reachable: bool  # Whether Ray answered
    dashboard_url: str | None  # Ray's dashboard, for people; null when there is none
    nodes: tuple[ClusterNode, ...]  # Its nodes, as Ray lists them
    totals: dict[str, float]  # Sum over living nodes that are not draining, by Ray resource name
    to_come: tuple[NodesToCome, ...]  # Nodes that its autoscaler can start besides


@dataclass(frozen=True, slots=True)
class Cluster(Pool):
    """The pool `default` with its cluster, and every pool."""

    pools: tuple[Pool, ...]  # All pools, `default` first

    @classmethod
    def of_pools(cls, pools: Sequence[Pool]) -> Cluster:
        first = pools[0]
        return cls(**{field.name: getattr(first, field.name) for field in fields(Pool)}, pools=tuple(pools))


def devices_of(hardware: Hardware, nodes: Iterable[ClusterNode]) -> float:
    """Returns how many devices of a kind the nodes have that are alive and not draining."""
    name = hardware.resource or hardware.kind.ray_resource or CPU
    marks = [f"{ACCELERATOR}{hardware.accelerator_type}"] if hardware.accelerator_type else []
    able = (
        node.resources
        for node in nodes
        if node.has(hardware.labels) and all(node.resources.get(mark, 0.0) > 0 for mark in marks)
    )
    return float(sum(each.get(name, 0.0) for each in able))


def worker_resources(spec: ExperimentSpec, catalogue: Mapping[str, Hardware] = CATALOGUE) -> dict[str, float]:
    """Returns what one worker of a resolved spec reserves, by Ray's resource name."""
    hardware = lookup(spec.hardware, catalogue)
    share = 1.0 / SHARERS if spec.queue.share_device else 1.0
    wanted: dict[str, float] = {CPU: share * spec.resources.cpus_per_worker}
    if hardware.kind.ray_resource is not None:
        wanted[hardware.kind.ray_resource] = share
    if hardware.accelerator_type is not None:
        wanted[f"{ACCELERATOR}{hardware.accelerator_type}"] = 0.001
    if hardware.resource is not None:
        wanted[hardware.resource] = share
    if spec.resources.memory_gib_per_worker is not None:
        wanted[MEMORY] = spec.resources.memory_gib_per_worker * GIB
    return wanted


class Hold(NamedTuple):
    """What workers of a run reserve, each of them, and on which nodes."""

    workers: int
    resources: Mapping[str, float]
    labels: Mapping[str, str]


def exclusive_holds(
    spec: ExperimentSpec, nodes: Sequence[ClusterNode], catalogue: Mapping[str, Hardware] = CATALOGUE
) -> tuple[Hold, ...]:
    """Returns where a resolved spec could be measured alone, most workers first, then idle, then small nodes.

    On CPUs its workers hold a node's CPUs in equal parts; where no node is large enough for all of them, each
    holds a node of its own. With accelerators, each worker holds its device's share of the node's CPUs.
    Nodes that can come count where none that is there could hold it.
    """
    there = [node for node in nodes if node.id]
    if len(there) < len(nodes) and (holds := exclusive_holds(spec, there, catalogue)):
        return holds
    hardware = lookup(spec.hardware, catalogue)
    wanted = worker_resources(spec, catalogue)
    able = [node for node in nodes if node.has(hardware.labels) and _places(node.resources, wanted)]
    ordered = sorted(able, key=lambda node: (not node.idle, node.resources[CPU], node.id))
    device = hardware.kind.ray_resource or hardware.resource
    found: list[Hold] = []
    for workers in spec.worker_numbers:
        if device is None:
            found += _whole_nodes(workers, wanted, hardware.labels, ordered)
        else:
            found += _devices_with_cpus(workers, wanted, hardware.labels, ordered, device)
    if len(there) == len(nodes):
        return tuple(found)
    return tuple(hold for number, hold in enumerate(found) if hold not in found[:number])


def holds_of(
    spec: ExperimentSpec, nodes: Sequence[ClusterNode], catalogue: Mapping[str, Hardware]
) -> tuple[Hold, ...]:
    """Returns what workers of a resolved spec reserve, at each number that they may have, the most first."""
    if spec.measure == "exclusive":
        return exclusive_holds(spec, nodes, catalogue)
    wanted, labels = worker_resources(spec, catalogue), lookup(spec.hardware, catalogue).labels
    return tuple(Hold(workers, wanted, labels) for workers in spec.worker_numbers)


def _whole_nodes(
    workers: int, wanted: Mapping[str, float], labels: Mapping[str, str], nodes: Sequence[ClusterNode]
) -> list[Hold]:
    found = []
    for node in nodes:
        cpus = int(node.resources[CPU])
        each = {**wanted, CPU: float(cpus // workers)}
        if cpus % workers == 0 and each[CPU] >= wanted[CPU] and _places(node.resources, each) >= workers:
            found.append(Hold(workers, each, {**labels, **node.pin}))
    if found or workers == 1:
        return found
    # Only the largest nodes have room for one that takes all their CPUs, and none has room for two.
    most = max((node.resources[CPU] for node in nodes), default=0.0)
    each = {**wanted, CPU: most}
    if sum(_places(node.resources, each) for node in nodes) >= workers:
        found.append(Hold(workers, each, labels))
    return found


def _devices_with_cpus(
    workers: int,
    wanted: Mapping[str, float],
    labels: Mapping[str, str],
    nodes: Sequence[ClusterNode],
    device: str,
) -> list[Hold]:
    shares = {
        node.id or node.name: max(wanted[CPU], float(node.resources[CPU] // node.resources[device]))
        for node in nodes
    }
    found = []
    if len(set(shares.values())) > 1:
        for node in nodes:
            each = {**wanted, CPU: shares[node.id or node.name]}
            if _places(node.resources, each) >= workers:
                found.append(Hold(workers, each, {**labels, **node.pin}))
    if not found and shares:
        each = {**wanted, CPU: max(shares.values())}
        if sum(_places(node.resources, each) for node in nodes) >= workers:
            found.append(Hold(workers, each, labels))
    return found


def at_a_time(
    spec: ExperimentSpec, nodes: Sequence[ClusterNode], catalogue: Mapping[str, Hardware] = CATALOGUE
) -> int:
    """Returns how many runs of a resolved spec the idle cluster holds, each as wide as it can be."""
    holds = holds_of(spec, nodes, catalogue)
    for workers in spec.worker_numbers:
        count = sum(
            sum(_places(node.resources, hold.resources) for node in nodes if node.has(hold.labels)) // workers
            for hold in holds
            if hold.workers == workers
        )
        if count:
            return count
    return 0


def unsatisfiable(
    spec: ExperimentSpec, snapshot: ClusterSnapshot | None, catalogue: Mapping[str, Hardware] = CATALOGUE
) -> str | None:
    """Returns why the cluster could never run a resolved spec, even when idle; None = it could.

    Nodes that can come count as those that are there. What is not known (no snapshot, Ray unreachable) is not
    held against the spec.
    """
    if snapshot is None or not snapshot.reachable:
        return None
    wanted = worker_resources(spec, catalogue)
    fewest = spec.worker_numbers[-1]
    labels = lookup(spec.hardware, catalogue).labels
    possible = snapshot.possible
    nodes = [node.resources for node in possible if node.has(labels)]
    going = [node.departure for node in snapshot.nodes if node.alive and node.draining]
    without = f" ({'; '.join(going)})" if going else ""
    if not any(node.stays for node in possible):
        return f"the cluster has no live node{without}"
    if not nodes:
        shown = ", ".join(f"{name}={value}" for name, value in labels.items())
        fix = "label a node with it, or add one"
        return f"no node has hardware {spec.hardware} (Ray label {shown}){without}; {fix}"
    places = sum(_places(node, wanted) for node in nodes)
    if places >= fewest:
        if spec.measure != "exclusive" or exclusive_holds(spec, possible, catalogue):
            return None
        most = max(node.get(CPU, 0.0) for node in nodes)
        return (
            f"measure: exclusive needs a whole node for {fewest} workers of {in_words(wanted)} that divide "
            f"its CPUs evenly, or {fewest} equal nodes, but the largest node has {most:g} CPUs; "
            "change parallel.workers, lower resources.cpus_per_worker, set measure: shared, or add nodes"
        )
    if places:
        least = "at least " if spec.parallel.min_workers is not None else ""
        return (
            f"{least}{fewest} workers of {in_words(wanted)} are needed, but the cluster has room for "
            f"{places} at a time; lower parallel.workers or resources.cpus_per_worker, or add nodes"
        )
    return f"no node has {_missing(wanted, nodes, spec.hardware)}; {_remedy(wanted, nodes)}"


class FreeRoom:
    """What is left of nodes while workers are placed, each on the first node that has room."""

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        self._free = [(node, dict(node.resources)) for node in nodes]

    def holds(self, amounts: Mapping[str, float], labels: Mapping[str, str], workers: int) -> bool:
        for node, left in self._free:
            if workers <= 0:
                break
            if node.has(labels):
                workers -= _places(left, amounts)
        return workers <= 0

    def take(self, amounts: Mapping[str, float], labels: Mapping[str, str], workers: int) -> bool:
        """Places a group of workers; False = there is no room for all of them."""
        for node, left in self._free:
            if workers <= 0:
                break
            if node.has(labels) and (here := min(workers, _places(left, amounts))):
                workers -= here
                for name, amount in amounts.items():
                    left[name] -= here * amount
        return workers <= 0


def _places(left: Mapping[str, float], amounts: Mapping[str, float]) -> int:
    """Returns how many workers fit into what is left of a node; shares of a device may not add up exactly."""
    return int(min((left.get(name, 0.0) + 1e-6) // amount for name, amount in amounts.items() if amount))


def _missing(wanted: Mapping[str, float], nodes: list[dict[str, float]], hardware: str) -> str:
    """Returns the resource that no node has enough of, or all when it is the combination."""
    for name, amount in reversed(list(wanted.items())):
        most = max(node.get(name, 0.0) for node in nodes)
        if most < amount:
            if name.startswith(ACCELERATOR):
                return f"hardware {hardware} (Ray resource {name})"
            return f"{in_words({name: amount})} (the maximum is {in_words({name: most})})"
    return f"{in_words(wanted)} at once"


def _remedy(wanted: Mapping[str, float], nodes: list[dict[str, float]]) -> str:
    if not any(name.startswith(ACCELERATOR) for name in wanted):
        return "lower resources, or add nodes"
    names = {name.partition(":")[2] for node in nodes for name in node if name.startswith(ACCELERATOR)}
    return f"the cluster has {', '.join(sorted(names)) or 'no accelerators'}"


def in_words(amounts: Mapping[str, float]) -> str:
    """Returns amounts of resources as people read them: `2 CPUs + 1 GPU`."""
    words = []
    for name, amount in amounts.items():
        if name == MEMORY:
            words.append(f"{amount / GIB:g} GiB memory")
        elif name in (CPU, *(kind.ray_resource for kind in DEVICE_KINDS.values())):
            words.append(f"{amount:g} {name}{'' if amount == 1 else 's'}")
        else:
            words.append(name.partition(":")[2] or name)
    return " + ".join(words)


def order_of_pool(pool: str) -> tuple[bool, str]:
    """Sorts pools for people: `default` first, the others by name."""
    return pool != DEFAULT_POOL, pool


def start_command(pool: str) -> str:
    if pool == DEFAULT_POOL:
        return "stillhouse scheduler"
    return f"stillhouse scheduler --pool {pool} --ray-address URL"


def no_scheduler(pool: str, serving: Collection[str]) -> str | None:
    """Returns that no living scheduler serves a pool, and how to start one; None = one does."""
    if pool in serving:
        return None
    named = f" of pool '{pool}'" if serving or pool != DEFAULT_POOL else ""
    return f"no scheduler{named} is running; start one with: {start_command(pool)}"


def require_pool(pool: str, known: Collection[str]) -> None:
    """Refuses a pool that no scheduler was ever started for (`SpecError`)."""
    if pool == DEFAULT_POOL or pool in known:
        return
    names = ", ".join(sorted({DEFAULT_POOL, *known}, key=order_of_pool))
    problem = f"there is no pool '{pool}', but {names}; for a new one, run: {start_command(pool)}"
    raise SpecError([Problem("invalid-value", "pool", problem)])
