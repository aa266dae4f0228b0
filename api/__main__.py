"""`python -m api`: serves the API with settings from the environment, as `stillhouse api` does.

With `--end-with-parent` it stops when its standard input closes.
"""

import sys

from api.server import UnsafeAddress, serve
from service.config import logs
from service.config.settings import Settings
from service.db.errors import StoreError
from service.local.local_service import watch_parent


def main() -> int:
    """Runs until stopped; 1 when the settings or the database do not allow it."""
    try:
        settings = Settings()
        if "--end-with-parent" in sys.argv[1:]:
            watch_parent()
        logs.set_up("api", settings.log_format)
        serve(settings)
    except (UnsafeAddress, StoreError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
