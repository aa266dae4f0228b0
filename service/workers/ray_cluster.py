"""The cluster that this process is connected to: its nodes, and the devices that the job holds there."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from service.domain.records import Placement
from service.recording.mailbox import Ready
from service.recording.outages import Repeated, wait_out
from service.recording.relay import drain_notices
from service.scheduling.cluster import ClusterNode, ClusterSnapshot
from service.scheduling.run_plan import Shape
from service.store import StoreOutage
from trainers.config import DevicePricing

logger = logging.getLogger(__name__)

LOOK_S = 0.25  # How often the cluster is looked at: how precisely the release of devices is known
_ANSWER_S = 2.0
_labels: dict[str, Mapping[str, str]] = {}  # Of nodes, by Ray's id
SEEN_S = 5.0  # How often a placement is stored as still held


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """Resources that Ray has reserved for the job: amounts per worker, and labels of the first one's node."""

    id: str
    created_s: float
    bundles: tuple[Mapping[str, float], ...]
    labels: Mapping[str, str]

    def holds(self, shape: Shape) -> bool:
        wanted = dict(shape.resources)
        return (
            len(self.bundles) == shape.workers
            and dict(shape.labels).items() <= self.labels.items()
            and all(
                bundle.keys() == wanted.keys()
                and all(abs(bundle[name] - amount) < 1e-3 for name, amount in wanted.items())
                for bundle in self.bundles
            )
        )


class PlacementWatch:
    """A thread that follows what the job holds. A context: what is held at its end counts as released.

    Ray does not report when a placement group is removed, so it is polled. If the database is unavailable,
    placements are kept here until they can be stored.
    """

    def __init__(
        self,
        look: Callable[[], Iterable[PlacementGroup]],
        pricing: Callable[[], Iterable[tuple[Shape, DevicePricing]]],
        record: Callable[[Sequence[Placement]], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._look, self._pricing, self._record, self._clock = look, pricing, record, clock
        self._lock = threading.Lock()
        self._held: dict[str, Placement] = {}
        self._shapes: dict[str, Shape] = {}
        self._unstored: set[str] = set()
        self._ready_s: dict[str, float] = {}
        self._repeated = Repeated(self.look, LOOK_S, "placements")

    def __enter__(self) -> PlacementWatch:
        self._repeated.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._repeated.stop()
        now = self._clock()
        with self._lock:
            for placement in list(self._held.values()):
                if placement.released_s is None:
                    self._change(replace(placement, released_s=now, seen_s=now))
        wait_out(self._store, "the end of placements")

    def ready(self, ready: Ready) -> None:
        """Takes a trial's report that its workers could begin; the first of a placement counts."""
        if ready.placement is not None:
            with self._lock:
                self._ready_s.setdefault(ready.placement, ready.at_s)

    def starting(self, since_s: float = math.inf) -> list[Shape]:
        """Returns the shapes of workers that were placed by then (Unix time) but have not reported ready."""
        with self._lock:
            return [
                self._shapes[id]
                for id, placement in self._held.items()
                if placement.released_s is None and id not in self._ready_s and placement.placed_s <= since_s
            ]

    def look(self) -> None:
        """Compares Ray's reservations with the known ones, and stores the changes."""
        groups = {group.id: group for group in self._look()}
        now = self._clock()
        with self._lock:
            for id, group in groups.items():
                if id not in self._held and (placement := self._priced(group, now)) is not None:
                    self._change(placement)
            for id, placement in list(self._held.items()):
                if placement.released_s is not None:
                    continue  # The database was unavailable since.
                known = replace(placement, ready_s=self._ready_s.get(id, placement.ready_s))
                if id not in groups:
                    known = replace(known, released_s=now, seen_s=now)
                elif now - placement.seen_s >= SEEN_S:
                    known = replace(known, seen_s=now)
                if known != placement:
                    self._change(known)
        try:
            self._store()
        except StoreOutage as error:
            logger.warning("the database is unavailable; placements are stored later: %s", error)

    def _priced(self, group: PlacementGroup, now: float) -> Placement | None:
        for shape, pricing in self._pricing():
            if group.holds(shape):
                self._shapes[group.id] = shape
                devices = shape.workers * pricing.charged_devices
                return Placement(
                    id=group.id,
                    hardware=pricing.hardware,
                    workers=shape.workers,
                    devices=devices,
                    price_usd_per_hour=devices * pricing.price_usd_per_hour,
                    power_w=devices * pricing.modelled_w,
                    placed_s=group.created_s,
                    ready_s=None,
                    released_s=None,
                    seen_s=now,
                )
        return None  # It holds no devices: the trial that opens a worker group.

    def _change(self, placement: Placement) -> None:
        self._held[placement.id] = placement
        self._unstored.add(placement.id)

    def _store(self) -> None:
        with self._lock:
            changed = [self._held[id] for id in sorted(self._unstored)]
        if not changed:
            return
        self._record(changed)
        with self._lock:
            for placement in changed:
                if self._held.get(placement.id) == placement:
                    self._unstored.discard(placement.id)
                    if placement.released_s is not None:
                        del self._held[placement.id]


def look_at_cluster() -> ClusterSnapshot:
    import ray
    from ray._private.state import available_resources_per_node
    from ray.core.generated.common_pb2 import NodeDeathInfo

    available = available_resources_per_node()
    drains = drain_notices()
    nodes = tuple(
        ClusterNode(
            id=node["NodeID"],
            name=node["NodeName"] or node["NodeManagerAddress"],
            alive=node["Alive"],
            resources=dict(node["Resources"]),
            # A resource that is used up is not listed.
            available={
                name: available[node["NodeID"]].get(name, 0.0) if node["NodeID"] in available else amount
                for name, amount in node["Resources"].items()
            },
            labels=dict(node["Labels"]),
            draining=node["NodeID"] in drains
            or node["DeathReason"] == NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED,
            drain_deadline_s=drains.get(node["NodeID"]),
            message=node["DeathReasonMessage"] or None,
        )
        for node in ray.nodes()
    )
    return ClusterSnapshot(time.time(), True, None, nodes)


def node_answers(id: str) -> bool:
    """Returns whether a node takes connections: Ray itself counts it as alive for a while after it died."""
    import ray

    for node in ray.nodes():
        if node["NodeID"] == id and node["Alive"]:
            try:
                address = node["NodeManagerAddress"], node["NodeManagerPort"]
                socket.create_connection(address, timeout=_ANSWER_S).close()
            except OSError:
                return False
            return True
    return False


def drain(head: str, labels: Mapping[str, str], within_s: float, why: str) -> list[str]:
    """Announces that the nodes with these labels go; returns their names.

    Raises:
        OSError: nothing answers at `head`, the `host:port` of Ray's GCS.
        RuntimeError: Ray refuses.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    host, _, port = head.rpartition(":")
    socket.create_connection((host, int(port)), _ANSWER_S).close()  # Ray itself would try for 40 s.
    gcs = GcsClient(address=head)
    going = [
        node
        for node in gcs.get_all_node_info().values()
        if node.state == GcsNodeInfo.ALIVE and labels.items() <= dict(node.labels).items()
    ]
    deadline_ms = int(1e3 * (time.time() + within_s))
    for node in going:
        reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        accepted, refusal = gcs.drain_node(node.node_id.hex(), reason, why, deadline_ms)
        if not accepted:
            raise RuntimeError(f"refuses to drain node {node.node_name}: {refusal}")
    return [node.node_name for node in going]


def look_at_placements() -> tuple[PlacementGroup, ...]:
    """Returns the placement groups of this job that hold their resources now.

    Removes those of actors that are dead: Ray keeps them, and places them, until the job ends. Ray Train's
    controller leaves one if it is killed while its workers wait for room.
    """
    import ray
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData
    from ray.util.placement_group import PlacementGroup as Handle

    # The public table has neither whose a group is nor when it was created.
    own = ray.get_runtime_context().get_job_id()
    placements = []
    for serialised in state._connect_and_get_accessor().get_placement_group_table():
        group = PlacementGroupTableData.FromString(serialised)
        if group.creator_job_id.hex() != own or group.state == PlacementGroupTableData.REMOVED:
            continue
        if group.creator_actor_dead and not ray.ActorID(group.creator_actor_id).is_nil():
            ray.util.remove_placement_group(Handle(ray.PlacementGroupID(group.placement_group_id)))
            continue
        if group.state != PlacementGroupTableData.CREATED:
            continue
        first = group.bundles[0].node_id.hex()
        if first not in _labels:  # Asked once: a node keeps its labels.
            _labels.update((node["NodeID"], dict(node["Labels"])) for node in ray.nodes())
        created_ns = (
            group.stats.creation_request_received_ns + 1000 * group.stats.end_to_end_creation_latency_us
        )
        placements.append(
            PlacementGroup(
                id=group.placement_group_id.hex(),
                created_s=created_ns / 1e9,
                bundles=tuple(dict(bundle.unit_resources) for bundle in group.bundles),
                labels=_labels.get(first, {}),
            )
        )
    return tuple(placements)


def own_node_resource() -> str:
    """Returns the resource that Ray names after the node of this process."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    for node in ray.nodes():
        if node["NodeID"] == own:
            for name in node["Resources"]:
                if name.startswith("node:") and not name.startswith("node:__"):
                    return str(name)
    raise RuntimeError("the driver's own node has no resource named after it")
