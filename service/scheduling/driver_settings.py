"""How settings reach the driver of an experiment: a file that only this user can read.

Not the job's environment: Ray's dashboard shows that to everyone, and a database URL may hold a password. The
folder must be shared by the nodes of a cluster, as the checkpoints in it are. A driver gets no token, no
password of another service, and the database URL of its own role where there is one (`service.db.roles`).
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from pathlib import Path

from service.config.settings import Settings
from service.domain.access import DEFAULT_POOL

_NOT_FOR_DRIVERS = frozenset(
    {
        *(name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)),
        "driver_database_url",
        "smtp_host",
        "smtp_user",
        "webhook_hosts",
    }
)  # Settings that stay with the API and the schedulers: every secret, and what only they use


def write(settings: Settings) -> Path:
    """Writes the settings, all paths resolved, and returns where they are."""
    folder = settings.data_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    document = settings.model_dump(mode="json", exclude=set(_NOT_FOR_DRIVERS)) | {
        "data_dir": str(folder),
        "cache_dir": str(settings.resolved_cache_dir()),
        "spool_dir": None if settings.spool_dir is None else str(settings.spool_dir.resolve()),
        "database_url": settings.driver_database_url or settings.resolved_database_url(),
        "data_roots": os.pathsep.join(map(str, settings.roots("data"))),
        "model_roots": os.pathsep.join(map(str, settings.roots("model"))),
    }
    # Clusters of other pools are reached in other ways, and their schedulers may share this folder.
    of_pool = "" if settings.pool == DEFAULT_POOL else f"-{settings.pool}"
    path = folder / f"driver-settings{of_pool}.json"
    text = json.dumps(document, indent=1)
    if path.exists() and path.read_text() == text:
        return path
    partial = path.with_suffix(f".{uuid.uuid4().hex[:8]}.partial")
    partial.touch(mode=0o600)
    partial.write_text(text)
    partial.replace(path)
    return path


def read(path: Path) -> Settings:
    """Returns the settings as written; the reader's environment does not change them."""
    try:
        return Settings.model_validate(json.loads(path.read_text()))
    except FileNotFoundError:
        raise SystemExit(
            f"{path}, which the scheduler writes, is not on node {socket.gethostname()}: STILLHOUSE_DATA_DIR "
            "must be a folder that the scheduler and all nodes share (docs/operations.md)"
        ) from None
