"""What waits and why, the hardware catalogue and the cluster."""

from __future__ import annotations

import time

from fastapi import APIRouter

from api.deps import CatalogueDep, QueueDep
from api.problems import declared
from service.config.hardware import HardwareEntry
from service.domain.records import Items, QueueListing
from service.scheduling.cluster import Cluster

router = APIRouter(prefix="/api/v1", tags=["queue"])


@router.get("/queue", responses=declared(), summary="List what waits and why")
def get_queue(queue: QueueDep) -> QueueListing:
    """Everything queued, in the order in which it would be claimed, with the reason it waits."""
    return QueueListing(queue.entries(), [scheduler.name for scheduler in queue.schedulers_alive()])


@router.get("/hardware", responses=declared(), summary="List the hardware catalogue")
async def list_hardware(catalogue: CatalogueDep) -> Items[HardwareEntry]:
    """Every kind of device that a spec may name, with price, power, peaks and where each comes from."""
    return Items([HardwareEntry.of(entry, catalogue) for entry in catalogue.values()])


@router.get("/cluster", responses=declared(), summary="Get the cluster")
def get_cluster(queue: QueueDep) -> Cluster:
    """The Ray cluster as the scheduler last saw it."""
    return Cluster.of(queue.cluster(), time.time())
