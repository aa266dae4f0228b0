"""How settings reach the drivers of a job: Ray keeps them until the job takes them, once, by a token.

The token is in the job's command line, and opens nothing afterwards. Ray's job list and logs, and listings of
processes, show no more. A driver gets no token of the service, no password of another one, and the database
URL of its own role where there is one (`service.db.roles`).
"""

import json
import os
from collections.abc import Mapping

from service.config.hardware import Hardware
from service.config.settings import Settings
from service.domain.serialization import adapter
from trainers.config import Site

_NOT_FOR_DRIVERS = frozenset(
    {
        *(name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)),
        "driver_database_url",
        "smtp_host",
        "smtp_user",
        "webhook_hosts",
    }
)  # Settings that stay with the API and the schedulers: every secret, and what only they use


class DriverSettings(Settings):
    """With what files of the scheduler's `data_dir` declare, which the driver's node may not see."""

    hardware: dict[str, Hardware]
    sites_by_pool: dict[str, Site]

    def catalogue(self) -> Mapping[str, Hardware]:
        return self.hardware

    def sites(self) -> Mapping[str, Site]:
        return self.sites_by_pool


def document(settings: Settings) -> bytes:
    """Returns what drivers get, all paths resolved."""
    own = settings.model_dump(mode="json", exclude=set(_NOT_FOR_DRIVERS)) | {
        "data_dir": str(settings.data_dir.resolve()),
        "cache_dir": str(settings.resolved_cache_dir()),
        "spool_dir": None if settings.spool_dir is None else str(settings.spool_dir.resolve()),
        "database_url": settings.driver_database_url or settings.resolved_database_url(),
        "data_roots": os.pathsep.join(map(str, settings.roots("data"))),
        "model_roots": os.pathsep.join(map(str, settings.roots("model"))),
    }
    declared = {"hardware": settings.catalogue(), "sites_by_pool": settings.sites()}
    return json.dumps(own | adapter(dict).dump_python(declared, mode="json")).encode()


def read(content: bytes) -> Settings:
    """Returns the settings of a document; the reader's environment does not change them."""
    return DriverSettings.model_validate(json.loads(content))


def take(token: str) -> Settings:
    """Returns the settings of this process's job; exits if they are not there, or no longer."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    key = f"gcs://{token}".encode()
    ray = GcsClient(address=os.environ["RAY_ADDRESS"])
    content = ray.internal_kv_get(key, None)
    if content is None or not ray.internal_kv_del(key, False, None):
        raise SystemExit(
            "the settings of this job have expired or were taken before; wait for the next attempt, "
            "whose job gets its own"
        )
    return read(content)
