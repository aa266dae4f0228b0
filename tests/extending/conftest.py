"""An application over an empty store and runs on a tiny corpus, for extensions from outside the packages."""

from __future__ import annotations

from tests.api.conftest import app, client, driver, lasting_process, migrated, settings, store
from tests.trainers.conftest import config_in, configure, recorder, shared

__all__ = [
    "app",
    "client",
    "config_in",
    "configure",
    "driver",
    "lasting_process",
    "migrated",
    "recorder",
    "settings",
    "shared",
    "store",
]
