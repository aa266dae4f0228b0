"""What waits and why, the hardware catalogue and the cluster."""

from __future__ import annotations

import time

from fastapi import APIRouter

from api.deps import CatalogueDep, QueueDep, StoreDep
from api.problems import declared
from api.shapes import (
    Catalogue,
    ClusterShape,
    ExperimentShape,
    HardwareShape,
    NodeShape,
    QueueEntryShape,
    QueueShape,
)

router = APIRouter(prefix="/api/v1", tags=["queue"])


@router.get("/queue", response_model=QueueShape, responses=declared(), summary="List what waits and why")
def get_queue(store: StoreDep, queue: QueueDep) -> QueueShape:
    """Everything queued, in the order in which it would be claimed, with the reason it waits."""
    entries = queue.entries()
    states = store.run_counts_of([entry.experiment.id for entry in entries])
    return QueueShape(
        items=[
            QueueEntryShape(
                position=entry.position,
                reason=entry.reason,
                experiment=ExperimentShape.of(entry.experiment, states[entry.experiment.id]),
            )
            for entry in entries
        ],
        schedulers_alive=[scheduler.name for scheduler in queue.schedulers_alive()],
    )


@router.get(
    "/hardware", response_model=Catalogue, responses=declared(), summary="List the hardware catalogue"
)
async def list_hardware(catalogue: CatalogueDep) -> Catalogue:
    """Every kind of device that a spec may name, with price, power, peaks and where each comes from."""
    return Catalogue(items=[HardwareShape.of(entry, catalogue) for entry in catalogue.values()])


@router.get("/cluster", response_model=ClusterShape, responses=declared(), summary="Get the cluster")
def get_cluster(queue: QueueDep) -> ClusterShape:
    """The Ray cluster as the scheduler last saw it."""
    snapshot = queue.cluster()
    if snapshot is None:
        return ClusterShape(at_s=None, age_s=None, reachable=False, dashboard_url=None, nodes=[], totals={})
    return ClusterShape(
        at_s=snapshot.at_s,
        age_s=max(0.0, time.time() - snapshot.at_s),
        reachable=snapshot.reachable,
        dashboard_url=snapshot.dashboard_url,
        nodes=[NodeShape.model_validate(node) for node in snapshot.nodes],
        totals=dict(snapshot.totals),
    )
