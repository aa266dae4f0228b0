"""What waits and why, the hardware catalogue and the cluster."""

import time
from typing import Annotated

from api.access import SIGNED_IN
from api.deps import CatalogueDep, CurrentUser, Operations, PageSize, PageToken, QueueDep, StoreDep, given
from service.config.hardware import Hardware
from service.domain.records import Items, QueueListing
from service.domain.shares import HeldDevices, Share
from service.scheduling.cluster import Cluster
from service.scheduling.fair_pass import shares
from service.scheduling.queue import pools_of

router = Operations(prefix="/api/v1", tags=["queue"])


@router.operation("GET /queue", SIGNED_IN, "List what waits and why")
def get_queue(
    queue: QueueDep, user: CurrentUser, page_size: PageSize = 50, page_token: PageToken = None
) -> QueueListing:
    """What is queued, in the order in which it would be claimed, with the reason each waits.

    Each pool has a queue of its own, and a position is the place in it; `default` comes first.

    A page begins after the last experiment of the page before, by its turn: claims in between move nothing.
    An experiment of a project that the reader does not see keeps its place, without its name.
    """
    return queue.listing(page_size=page_size, page_token=page_token, visible=user.visible)


@router.operation("GET /shares", SIGNED_IN, "List the shares of the devices")
def list_shares(store: StoreDep, user: CurrentUser) -> Items[Share]:
    """Who is entitled to which part of each kind of device, and who has it, by project and user.

    Only who holds such devices or waits for some takes part. Projects that the reader does not see are one
    row.
    """
    return Items(shares(store, user.visible))


@router.operation("GET /hardware", SIGNED_IN, "List the hardware catalogue")
async def list_hardware(catalogue: CatalogueDep) -> Items[Hardware]:
    """Every kind of device that a spec may name, with price, power, peaks and where each comes from."""
    return Items(list(catalogue.values()))


@router.operation("GET /cluster/held", SIGNED_IN, "List the devices that are held")
def list_held_devices(
    store: StoreDep,
    user: CurrentUser,
    limit: Annotated[int, given("Most entries in the answer.", ge=1, le=10_000)] = 1000,
) -> Items[HeldDevices]:
    """Who holds which devices, the longest held first; without names where the reader does not see them."""
    return Items(store.drivers.held_devices(limit=limit, visible=user.visible))


@router.operation("GET /cluster", SIGNED_IN, "Get the clusters of all pools")
def get_cluster(queue: QueueDep) -> Cluster:
    """The Ray cluster of each pool as one of its schedulers last saw it.

    `pools` has every pool; the fields next to it are those of `default`, all there is with one cluster.
    """
    return Cluster.of_pools(pools_of(queue.clusters(), queue.schedulers_alive(), time.time()))
