"""What submissions are judged by: clusters and projects, read from the store every second or two."""

from __future__ import annotations

import time
from collections.abc import Callable

from cachetools.func import ttl_cache

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

    def __init__(self, queue: Queue, timer: Callable[[], float] = time.monotonic) -> None:
        self._clusters = ttl_cache(1, _CLUSTER_MAX_AGE_S, timer)(queue.clusters)

    def read(self, pool: str) -> ClusterSnapshot | None:
        """Returns the snapshot of a pool's cluster; None when no scheduler of `default` ever wrote one.

        Raises:
            SpecError: no scheduler was ever started for the pool.
        """
        snapshots = self._clusters()
        if pool not in snapshots and pool != DEFAULT_POOL:
            self._clusters.cache_clear()  # It may be new.
            snapshots = self._clusters()
        require_pool(pool, snapshots)
        return snapshots.get(pool)


class ProjectView:
    """Keeps submissions from reading the same few rows hundreds of times a second."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._limits = ttl_cache(1, _PROJECTS_MAX_AGE_S)(store.limits_of_projects)

    def refuse(self, caller: Caller, spec: ExperimentSpec) -> None:
        """Checks whether someone may submit a spec: to its project, with its priority, within its budget.

        Raises:
            SpecError: there is no such project that they see, it is archived, or its budget is spent.
            ProblemError: `forbidden`: they see it, and may not submit to it, or not with this priority.
        """
        project = spec.project
        if caller.principal.restricted_to not in (None, project):
            refuse_submission(caller, project, self._store)
        projects = self._limits()
        if project not in projects or not caller.principal.sees(project):
            message = f"'{project}': no such project; `stillhouse project list` lists yours"
            raise SpecError([Problem("unknown-project", "project", message)])
        refuse_submission(caller, project, self._store)
        if projects[project] is None:
            message = f"'{project}' is archived; name another project, or have a maintainer restore it"
            raise SpecError([Problem("archived-project", "project", message)])
        self.refuse_priority(caller, project, spec.queue.priority)
        limits = self.limits(project)
        if limits.budgets.limited():
            spent, month = self._store.spent(project), month_of(self._store.clock()).name
            if reason := spent_budget(limits, project, spent, month):
                raise SpecError([Problem("budget-spent", "project", reason)])

    def refuse_priority(self, caller: Caller, project: str, priority: int) -> None:
        """Raises `forbidden` where someone's role may not use a priority in a project."""
        principal = caller.principal
        if principal.administrator or principal.kind is UserKind.local:
            return
        role = principal.roles.get(project)
        if reason := refused_priority(self.limits(project), project, role, priority):
            raise ProblemError("forbidden", reason)

    def refuse_queued(self, caller: Caller, spec: ExperimentSpec) -> None:
        """Raises SpecError where the user would have too many queued runs in the project."""
        most = self.limits(spec.project).queued_runs_per_user
        if most is not None:
            waiting = self._store.queued_runs_of(spec.project, caller.owner)
            problem = queue_cap_problem(spec.project, caller.owner, waiting, spec.run_count(), most)
            if problem is not None:
                raise SpecError([problem])

    def limits(self, project: str) -> ProjectLimits:
        """Returns the limits of a project; none for one that is missing or archived."""
        return self._limits().get(project) or NO_LIMITS

    def forget(self) -> None:
        self._limits.cache_clear()
