"""What submissions are judged by: clusters and projects, read from the store every second or two."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from api.access import Caller, refuse_submission
from api.problems import ProblemError
from service.config.document import Problem, SpecError
from service.domain.access import DEFAULT_POOL, UserKind
from service.domain.shares import month_of
from service.scheduling.cluster import ClusterSnapshot, require_pool
from service.scheduling.queue import Queue
from service.specs.experiment import ExperimentSpec
from service.specs.project_limits import (
    NO_LIMITS,
    ProjectLimits,
    queue_cap_problem,
    refused_priority,
    spent_budget,
)
from service.store import Store

_CLUSTER_MAX_AGE_S = 2.0
_PROJECTS_MAX_AGE_S = 1.0


class ClusterView:
    """Keeps submissions from reading the same snapshots hundreds of times a second."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._snapshots: Mapping[str, ClusterSnapshot] = {}
        self._read_s = float("-inf")

    def read(self, pool: str, now_s: float) -> ClusterSnapshot | None:
        """Returns the snapshot of a pool's cluster; None when no scheduler of `default` ever wrote one.

        Raises:
            SpecError: no scheduler was ever started for the pool.
            StoreUnavailable: when it must be read and the database is unavailable.
        """
        if abs(now_s - self._read_s) > _CLUSTER_MAX_AGE_S:
            with self._lock:
                if abs(now_s - self._read_s) > _CLUSTER_MAX_AGE_S:
                    self._look(now_s)
        if pool not in self._snapshots and pool != DEFAULT_POOL:
            with self._lock:
                self._look(now_s)  # It may be new.
        snapshots = self._snapshots
        require_pool(pool, snapshots)
        return snapshots.get(pool)

    def _look(self, now_s: float) -> None:
        self._snapshots = self._queue.clusters()
        self._read_s = now_s


class ProjectView:
    """Keeps submissions from reading the same few rows hundreds of times a second."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._limits: Mapping[str, ProjectLimits | None] = {}
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
        limits = self._read()
        if project not in limits or not caller.principal.sees(project):
            message = f"'{project}': no such project; `stillhouse project list` lists yours"
            raise SpecError([Problem("unknown-project", "project", message)])
        refuse_submission(caller, project, self._store)
        if limits[project] is None:
            message = f"'{project}' is archived; name another project, or have a maintainer restore it"
            raise SpecError([Problem("archived-project", "project", message)])

    def refuse_priority(self, caller: Caller, project: str, priority: int) -> None:
        """Checks whether someone may use a priority in a project.

        Raises:
            ProblemError: `forbidden`: their role may not.
        """
        principal = caller.principal
        if principal.administrator or principal.kind is UserKind.local:
            return
        role = principal.roles.get(project)
        if reason := refused_priority(self.limits(project), project, role, priority):
            raise ProblemError("forbidden", reason)

    def refuse_spent(self, project: str) -> None:
        """Checks whether a project has budget left.

        Raises:
            SpecError: one of its budgets is used up.
        """
        limits = self.limits(project)
        if limits.budgets.limited():
            spent, month = self._store.spent(project), month_of(self._store.clock()).name
            if reason := spent_budget(limits, project, spent, month):
                raise SpecError([Problem("budget-spent", "project", reason)])

    def refuse_spec(self, caller: Caller, spec: ExperimentSpec) -> None:
        """Checks what a submission of a spec is checked for: project, priority, and room in the queue.

        Raises:
            SpecError, ProblemError: as `refuse` and `refuse_priority`, and for too many queued runs.
        """
        self.refuse(caller, spec.project)
        self.refuse_priority(caller, spec.project, spec.queue.priority)
        self.refuse_spent(spec.project)
        most = self.limits(spec.project).queued_runs_per_user
        if most is not None:
            waiting = self._store.queued_runs_of(spec.project, caller.owner)
            problem = queue_cap_problem(spec.project, caller.owner, waiting, spec.run_count(), most)
            if problem is not None:
                raise SpecError([problem])

    def limits(self, project: str) -> ProjectLimits:
        """Returns the limits of a project; none for one that is missing or archived."""
        return self._read().get(project) or NO_LIMITS

    def forget(self) -> None:
        """Reads them again: projects have changed."""
        self._read_s = float("-inf")

    def _read(self) -> Mapping[str, ProjectLimits | None]:
        if time.monotonic() - self._read_s > _PROJECTS_MAX_AGE_S:
            with self._lock:
                if time.monotonic() - self._read_s > _PROJECTS_MAX_AGE_S:
                    self._limits, self._read_s = self._store.limits_of_projects(), time.monotonic()
        return self._limits
