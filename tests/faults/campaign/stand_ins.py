"""What is replaced in the product before a campaign forks its processes from this one."""

from __future__ import annotations

import gc
import importlib
from typing import Any

from tests.faults.campaign import group_stand_in, ray_stand_in, timing

_PRELOADED = (
    "api.app", "api.server", "httptools", "uvicorn.lifespan.on", "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto", "psycopg", "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite", "service.db.migrate",
    "service.db.migrations.versions.0001_initial", "service.workers.trial",
)  # fmt: skip


def prepare() -> None:
    """Put Ray's stand-in, the simulated trainer and the shorter waiting times in place; import everything.

    Raises:
        AttributeError: the product has no such name any more.
    """
    ray_stand_in.install()
    group_stand_in.install()
    from tests.faults.campaign import trainer  # Imports torch, which takes seconds.

    _replace("service.driving.driver", "look_at_cluster", ray_stand_in.look_at_cluster)
    _replace("service.driving.driver", "look_at_placements", ray_stand_in.look_at_placements)
    _replace("service.recording.relay", "drain_notices", dict)
    _replace("service.driving.driver", "node_answers", lambda id: True)
    _replace("service.driving.host", "fork", ray_stand_in.fork_driver)
    _replace("service.scheduling.driver_settings", "take", ray_stand_in.take)
    _replace("service.workers.worker_group", "look_at_cluster", ray_stand_in.look_at_cluster)
    _replace("service.workers.process_group", "process_group", group_stand_in.process_group)
    _replace("trainers.entrypoint", "train", trainer.train)
    _replace("trainers.entrypoint", "make_ready", trainer.make_ready)
    _replace("service.scheduling.scheduler", "DashboardRayJobs", ray_stand_in.LocalRayJobs)
    # Looks at all processes of the machine, which are the campaign's own.
    _replace("service.workers.worker_attempt", "watcher", lambda *arguments: None)
    for name in _PRELOADED:
        importlib.import_module(name)
    timing.shorten()
    gc.collect()
    gc.freeze()


def _replace(module: str, name: str, stand_in: Any) -> None:
    found = importlib.import_module(module)
    getattr(found, name)
    setattr(found, name, stand_in)
