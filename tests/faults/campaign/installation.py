"""One installation: a database, a node, an API and two schedulers, from its start to its end."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from service.config.settings import Settings
from tests.faults.campaign import messages
from tests.faults.campaign.databases import CampaignDatabase
from tests.faults.campaign.node import Listed, Node
from tests.faults.campaign.timing import LEASE_S

SCHEDULERS = 2
ACTIVE = 5
"""Experiments that run at a time: more would only wait for the machine."""
_LINGER_S = 1.5 * LEASE_S
_ANSWER_S = 30.0


class Installation:
    """A context: at its end, none of its processes lives.

    Args:
        folder: new; for all its files.
        database: gets fresh tables.
        seed: of what its node does by chance.

    Attributes:
        cpu_s: processor time that all its processes have used; known at its end.
    """

    def __init__(self, folder: Path, database: CampaignDatabase, seed: int) -> None:
        self.folder, self.database = folder, database
        (folder / "logs").mkdir(parents=True)
        self.settings = Settings(
            data_dir=folder,
            database_url=database.fresh(folder),
            lease_s=LEASE_S,
            max_concurrent_experiments=ACTIVE,
            keep_deleted_days=0.0,  # What is deleted goes at once, so that removals meet the faults.
            offline=True,
        )
        self._node = Node(folder, seed, _LINGER_S)
        self.cpu_s = 0.0

    def __enter__(self) -> Self:
        listener = messages.listen(self._node.path)
        self._pid = os.fork()
        if not self._pid:
            code = 1
            try:
                self._node.serve(listener)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        listener.close()
        for _ in range(SCHEDULERS):
            self._ask("service", role="scheduler", settings=self.settings)
        port = self._ask("service", role="api", settings=self.settings)
        self.url = f"http://127.0.0.1:{port}"
        return self

    def processes(self) -> list[Listed]:
        """Returns its living processes."""
        listed: list[Listed] = self._ask("processes")
        return listed

    def acknowledged(self) -> list[str]:
        """Returns what its workers were told, by lines."""
        journal = self.folder / "acknowledged"
        return journal.read_text().splitlines() if journal.exists() else []

    def _ask(self, operation: str, **arguments: Any) -> Any:
        return messages.ask(self._node.path, (operation, arguments), timeout_s=_ANSWER_S)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(OSError, EOFError):
            self._ask("end")
        _, _, used = os.wait4(self._pid, 0)  # Of the node, and of all that it has forked.
        self.cpu_s = used.ru_utime + used.ru_stime
