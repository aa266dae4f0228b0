"""The projects that may be submitted to, read from the store at most once a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from api.access import Caller, refuse_submission
from service.config.document import Problem, SpecError
from service.store import Store

_MAX_AGE_S = 1.0


class ProjectView:
    """Keeps submissions from reading the same few rows hundreds of times a second."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._archived: Mapping[str, bool] = {}
        self._read_s = float("-inf")

    def refuse(self, caller: Caller, project: str) -> None:
        """Checks whether someone may submit to a project.

        Raises:
            SpecError: there is none of this name that they see, or it is archived.
            ProblemError: `forbidden`: they see it, and may not.
            StoreUnavailable: it must be read and the database is unavailable.
        """
        if caller.principal.restricted_to not in (None, project):
            refuse_submission(caller, project, self._store)
        archived = self._read().get(project)
        if archived is None or not caller.principal.sees(project):
            message = f"'{project}': no such project; `stillhouse project list` lists yours"
            raise SpecError([Problem("unknown-project", "project", message)])
        refuse_submission(caller, project, self._store)
        if archived:
            message = f"'{project}' is archived; name another project, or have a maintainer restore it"
            raise SpecError([Problem("archived-project", "project", message)])

    def forget(self) -> None:
        """Reads them again: projects have changed."""
        self._read_s = float("-inf")

    def _read(self) -> Mapping[str, bool]:
        if time.monotonic() - self._read_s > _MAX_AGE_S:
            with self._lock:
                if time.monotonic() - self._read_s > _MAX_AGE_S:
                    self._archived, self._read_s = self._store.archived_projects(), time.monotonic()
        return self._archived
