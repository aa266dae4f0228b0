from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import sqlalchemy as sa
from sqlalchemy import Connection

from service.db import schema
from service.domain.access import EVERYTHING, Visibility
from service.domain.outlook import StartForecast
from service.domain.serialization import adapter

_f, _x = schema.start_forecasts.c, schema.experiments.c

STALE_AFTER_S = 60.0
"""Forecasts older than this are not shown: no scheduler renews them."""


def start_forecasts(
    connection: Connection, experiment_ids: Collection[int], now_s: float, visible: Visibility = EVERYTHING
) -> dict[int, StartForecast]:
    """Returns when waiting experiments will start, by id, as far as a scheduler has forecast that.

    Experiments ahead that the reader does not see are left out.
    """
    statement = sa.select(_f.experiment_id, _f.start).where(
        _f.experiment_id.in_(list(experiment_ids)), _f.start.is_not(None), _f.at_s >= (now_s - STALE_AFTER_S)
    )
    found = {
        row.experiment_id: adapter(StartForecast).validate_json(row.start)
        for row in connection.execute(statement)
    }
    ahead = {id for start in found.values() for id in start.ahead}
    if not ahead or visible.projects is None:
        return found
    projects = connection.execute(sa.select(_x.id, _x.project).where(_x.id.in_(list(ahead))))
    seen = {row.id for row in projects if visible.includes(row.project)}
    return {
        id: replace(start, ahead=[each for each in start.ahead if each in seen])
        for id, start in found.items()
    }
