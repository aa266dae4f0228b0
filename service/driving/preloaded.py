"""Imports what a driver needs, in the process that drivers are forked from; connects to nothing."""

# What Ray imports when it connects, and Tune when it runs, and SQLAlchemy. A module that a driver imports by
# itself costs it several times its size, in pages of others that it touches.
# ruff: noqa: F401
import ctypes
import sys

import pyarrow.json
import pydantic.v1.fields
import ray._private.arrow_serialization
import ray._private.runtime_env.uv_runtime_env_hook
import ray.air.integrations.comet
import ray.air.integrations.mlflow
import ray.air.integrations.wandb
import ray.autoscaler.v2.utils
import ray.train.trainer
import ray.tune.logger.aim
import sqlalchemy.dialects.postgresql.psycopg
import starlette.concurrency
import starlette.datastructures

import service.driving.driver
import service.driving.ray_tune
from service.config.process import freeze_loaded

# Most pages that drivers write are equal; the kernel may keep them once (docs/operations.md).
_PR_SET_MEMORY_MERGE = 67  # Of prctl, since Linux 6.4
ctypes.CDLL(None).prctl(_PR_SET_MEMORY_MERGE, 1, 0, 0, 0)
# Ray goes through the names of all modules for each actor that a driver starts, and counts references in
# them: next to each other, they are on 70 pages that a driver copies, and not on 1,200.
for name in list(sys.modules):
    sys.modules[name.encode().decode()] = sys.modules.pop(name)
freeze_loaded()  # Else a driver's garbage collection would copy all of it.
