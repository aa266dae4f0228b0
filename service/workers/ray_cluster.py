"""The cluster that this process is connected to: its nodes, and what the job holds there."""

from __future__ import annotations

import time

from service.recording.placement_watch import PlacementGroup
from service.scheduling.cluster import ClusterNode, ClusterSnapshot


def look_at_cluster() -> ClusterSnapshot:
    import ray
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()
    nodes = tuple(
        ClusterNode(
            id=node["NodeID"],
            name=node["NodeManagerHostname"],
            alive=node["Alive"],
            resources=dict(node["Resources"]),
            # A resource that is used up is not listed.
            available={
                name: available[node["NodeID"]].get(name, 0.0) if node["NodeID"] in available else amount
                for name, amount in node["Resources"].items()
            },
            labels=dict(node["Labels"]),
        )
        for node in ray.nodes()
    )
    return ClusterSnapshot(time.time(), True, None, nodes)


def look_at_placements() -> tuple[PlacementGroup, ...]:
    """Returns the placement groups of this job that hold their resources now."""
    import ray
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData

    # The public table has neither whose a group is nor when it was created.
    own = ray.get_runtime_context().get_job_id()
    labels = {node["NodeID"]: dict(node["Labels"]) for node in ray.nodes()}
    found = []
    for serialised in state._connect_and_get_accessor().get_placement_group_table():
        group = PlacementGroupTableData.FromString(serialised)
        if group.creator_job_id.hex() != own or group.state != PlacementGroupTableData.CREATED:
            continue
        created_ns = (
            group.stats.creation_request_received_ns + 1000 * group.stats.end_to_end_creation_latency_us
        )
        found.append(
            PlacementGroup(
                id=group.placement_group_id.hex(),
                created_s=created_ns / 1e9,
                bundles=tuple(dict(bundle.unit_resources) for bundle in group.bundles),
                labels=labels.get(group.bundles[0].node_id.hex(), {}),
            )
        )
    return tuple(found)


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
