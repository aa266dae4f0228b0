"""The stream of all that changes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request

from api.access import SIGNED_IN, while_permitted
from api.deps import CurrentUser, LastEventId, StreamsDep
from api.problems import declared
from api.stream import EventStream, parse_moment

router = APIRouter(prefix="/api/v1", tags=["experiments"])


async def _after(last_event_id: LastEventId = None) -> float | None:
    return parse_moment(last_event_id)


@router.get(
    "/stream",
    dependencies=[SIGNED_IN],
    response_class=EventStream,
    summary="Follow all experiments",
    responses=declared(),
)
async def stream_changes(
    request: Request, user: CurrentUser, streams: StreamsDep, after: Annotated[float | None, Depends(_after)]
) -> EventStream:
    """Server-sent events of what the reader sees; a list that was read up to 10 s before misses nothing.

    `experiment`: one that is new or has changed, as it is now. `deleted`: one that is gone. `costs`: what
    experiments at work cost by now, by id, every 5 s. `queue`: its order or the clusters have changed.
    `many`: more has changed than is sent one by one; read lists again. A reconnect with Last-Event-ID
    continues from there, and may repeat what was sent.
    """
    return EventStream(while_permitted(request, streams.follow_changes(user.visible, after)))
