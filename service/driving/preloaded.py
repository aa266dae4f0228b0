"""Imports what a driver needs, in the process that drivers are forked from; connects to nothing."""

# What Ray imports when it connects, and Tune when it runs, and SQLAlchemy.
import ray.autoscaler.v2.utils
import ray.train.trainer
import ray.tune.logger.aim  # noqa: F401
import sqlalchemy.dialects.postgresql.psycopg  # noqa: F401

import service.driving.driver
import service.driving.ray_tune  # noqa: F401
from service.config.process import freeze_loaded
from service.db import migrate

migrate.newest_revision()  # Loads alembic and the migrations.
freeze_loaded()  # Else a driver's garbage collection would copy all of it.
