"""Submissions come in: many requests, one worker, one transaction for all that wait.

A thread per request would spend most of its time handing the interpreter from thread to thread.
Here a single worker thread checks and stores everything that arrived while it was busy; a grid
whose expansion takes long is checked apart, and so is a spec whose data have to be read, so that no
one waits behind it. A submission that was answered before is answered the same, unchecked: what its
files are like today does not matter.
"""

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cachetools.func import ttl_cache

from api.access import Caller, refuse_submission
from api.problems import ProblemError
from service.config.document import Problem, SpecError, parse
from service.config.hardware import Hardware
from service.config.settings import Settings
from service.db.errors import NotFound, ReplayOfDeleted
from service.domain.access import DEFAULT_POOL, UserKind
from service.domain.records import Experiment
from service.domain.shares import month_of
from service.domain.studies import StudyDetail
from service.planner.forecasting import budget_problems
from service.scheduling.admission import admit, read_spec
from service.scheduling.cluster import ClusterSnapshot, require_pool
from service.scheduling.queue import Queue
from service.specs.data import UnreadData
from service.specs.experiment import ExperimentSpec
from service.specs.models import FindRun
from service.specs.paths import Roots
from service.specs.project_limits import (
    NO_LIMITS,
    ProjectLimits,
    queue_cap_problem,
    refused_priority,
    spent_budget,
)
from service.specs.reuse import FindEqual
from service.specs.study import in_part, parse_study, part_text
from service.store import Keyed, NewExperiment, NewPart, NewStudy, Store, StoreError, body_sha256

_CLUSTER_MAX_AGE_S = 2.0
_PROJECTS_MAX_AGE_S = 1.0
HEAVY_AT_A_TIME = 2  # Large documents checked at a time: each takes a share of the interpreter from reads
LOOKS_AT_A_TIME = 2
LARGEST_BATCH = 64  # Submissions that one round of the worker takes: bounds how long the first of them waits
LIGHT_BYTES = 16 * 1024
LIGHT_RUNS = 20
"""A longer text or a larger grid is checked apart from the others, as is what may reuse runs or names data
that changed since it was last looked at."""

Result = TypeVar("Result")


class ClusterView:
    """Keeps submissions from reading the same snapshots hundreds of times a second."""

    def __init__(self, queue: Queue, timer: Callable[[], float] = time.monotonic) -> None:
        self._clusters = ttl_cache(1, _CLUSTER_MAX_AGE_S, timer)(queue.clusters)

    def read(self, pool: str) -> ClusterSnapshot | None:
        """Returns the snapshot of a pool's cluster; None when no scheduler of `default` ever wrote one."""
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
        self._limits = ttl_cache(1, _PROJECTS_MAX_AGE_S)(store.projects.all_limits)

    def refuse(self, caller: Caller, spec: ExperimentSpec) -> None:
        """Checks whether someone may submit a spec: to its project, with its priority, within its budget."""
        project = spec.project
        if caller.principal.restricted_to not in (None, project):
            refuse_submission(caller, project, self._store)
        projects = self._limits()
        if project not in projects or not caller.principal.sees(project):
            message = f"'{project}': no such project; `stillhouse project list` lists yours"
            raise SpecError([Problem("unknown-project", "project", message)])
        refuse_submission(caller, project, self._store)
        limits = projects[project]
        if limits is None:
            message = f"'{project}' is archived; name another project, or have a maintainer restore it"
            raise SpecError([Problem("archived-project", "project", message)])
        self.refuse_priority(caller, project, spec.queue.priority)
        if limits.budgets.limited():
            spent, month = self._store.projects.spent(project), month_of(self._store.clock()).name
            if reason := spent_budget(limits, project, spent, month):
                raise SpecError([Problem("budget-spent", "project", reason)])

    def refuse_priority(self, caller: Caller, project: str, priority: int) -> None:
        principal = caller.principal
        if principal.administrator or principal.kind is UserKind.local:
            return
        role = principal.roles.get(project)
        if reason := refused_priority(self.limits(project), project, role, priority):
            raise ProblemError("forbidden", reason)

    def refuse_queued(self, caller: Caller, spec: ExperimentSpec) -> None:
        if (most := self.limits(spec.project).queued_runs_per_user) is None:
            return
        waiting = self._store.projects.queued_runs_of(spec.project, caller.owner)
        if problem := queue_cap_problem(spec.project, caller.owner, waiting, spec.run_count(), most):
            raise SpecError([problem])

    def limits(self, project: str) -> ProjectLimits:
        """Returns the limits of a project; none for one that is missing or archived."""
        return self._limits().get(project) or NO_LIMITS

    def forget(self) -> None:
        self._limits.cache_clear()


class Checks:
    """The checks of one application; used from its event loop only."""

    def __init__(self) -> None:
        self._light = ThreadPoolExecutor(1, thread_name_prefix="light-checks")
        self._looks = ThreadPoolExecutor(LOOKS_AT_A_TIME, thread_name_prefix="looks")
        self._heavy = ThreadPoolExecutor(HEAVY_AT_A_TIME, thread_name_prefix="checks")

    async def light(self, check: Callable[[], Result]) -> Result:
        """Runs what takes milliseconds; never waits for what takes longer."""
        return await asyncio.get_running_loop().run_in_executor(self._light, check)

    async def look(self, check: Callable[[], Result]) -> Result:
        """Runs a small check that reads data; waits for disks, and never for large documents."""
        return await asyncio.get_running_loop().run_in_executor(self._looks, check)

    async def heavy(self, check: Callable[[], Result]) -> Result:
        """Runs what may take seconds; waits until one of few threads is free."""
        return await asyncio.get_running_loop().run_in_executor(self._heavy, check)

    def close(self) -> None:
        for pool in (self._light, self._looks, self._heavy):
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class _Request:
    text: bytes
    caller: Caller
    idempotency_key: str | None
    answer: asyncio.Future[tuple[Experiment, bool]]


class _TooHeavy(Exception):
    """The spec is checked in a thread of its own."""


class Intake:
    """Takes submissions for one application, and checks specs; used from its event loop only."""

    def __init__(
        self, store: Store, settings: Settings, catalogue: Mapping[str, Hardware], queue: Queue
    ) -> None:
        self.store = store
        self.settings = settings
        self.catalogue = catalogue
        self.cluster = ClusterView(queue)
        self.checks = Checks()
        self.projects = ProjectView(store)
        self._waiting: list[_Request] = []
        self._worker: asyncio.Task[None] | None = None

    async def submit(
        self, text: bytes, caller: Caller, idempotency_key: str | None
    ) -> tuple[Experiment, bool]:
        """Checks and stores a spec; returns after the commit, with whether it is new (or replayed)."""
        request = _Request(text, caller, idempotency_key, asyncio.get_running_loop().create_future())
        try:
            if len(text) > LIGHT_BYTES:
                raise _TooHeavy
            self._waiting.append(request)
            if self._worker is None:
                self._worker = asyncio.create_task(self._work(), name="intake")
            return await request.answer
        except _TooHeavy:
            return await self.checks.heavy(functools.partial(self._submit_alone, request))
        except UnreadData:
            return await self.checks.look(functools.partial(self._submit_alone, request))

    async def _work(self) -> None:
        """Rounds until no one waits; never raises: every request gets its own answer."""
        while self._waiting:
            batch, self._waiting = self._waiting[:LARGEST_BATCH], self._waiting[LARGEST_BATCH:]
            try:
                answers = await self.checks.light(functools.partial(self._submit_batch, batch))
            except Exception as error:
                answers = [error] * len(batch)
            for request, answer in zip(batch, answers, strict=True):
                if request.answer.done():
                    continue  # The client went away; what was stored stays, its key replays it.
                if isinstance(answer, BaseException):
                    request.answer.set_exception(answer)
                else:
                    request.answer.set_result(answer)
        self._worker = None

    def _submit_batch(self, batch: list[_Request]) -> list[tuple[Experiment, bool] | BaseException]:
        answers = self._replays(batch)
        admitted: list[tuple[int, NewExperiment]] = []
        roots = functools.cache(self.settings.roots)
        for position, request in enumerate(batch):
            if position in answers:
                continue
            try:
                admitted.append((position, self._admit(request, roots, light=True)))
            except Exception as error:  # Whatever is wrong with one, the others are taken.
                answers[position] = error
        if admitted:
            stored = self.store.submissions.submit_many([new for _, new in admitted])
            answers.update((position, answer) for (position, _), answer in zip(admitted, stored, strict=True))
        return [answers[position] for position in range(len(batch))]

    def _replays(self, batch: Sequence[_Request]) -> dict[int, tuple[Experiment, bool] | BaseException]:
        keyed = {
            position: Keyed(request.caller.owner, request.idempotency_key, body_sha256(request.text))
            for position, request in enumerate(batch)
            if request.idempotency_key is not None
        }
        found = zip(keyed, self.store.submissions.replays(list(keyed.values())), strict=True)
        return {at: _replayed(earlier, batch[at]) for at, earlier in found if earlier is not None}

    def _submit_alone(self, request: _Request) -> tuple[Experiment, bool]:
        answer = self._replays([request]).get(0)
        if isinstance(answer, BaseException):
            raise answer
        if answer is not None:
            return answer
        new = self._admit(request, self.settings.roots, light=False)
        return self.store.submissions.submit(new)

    def _admit(self, request: _Request, roots: Roots, *, light: bool) -> NewExperiment:
        spec = read_spec(request.text, self.catalogue)
        return self._admitted(
            spec, request.text.decode(), request.caller, request.idempotency_key, roots, light=light
        )

    def _admitted(
        self,
        spec: ExperimentSpec,
        text: str,
        caller: Caller,
        idempotency_key: str | None,
        roots: Roots,
        *,
        light: bool = False,
        find_runs: bool = True,
    ) -> NewExperiment:
        """`find_runs` False: the numbers of runs in the spec stand for others."""
        self.projects.refuse(caller, spec)
        if light and not (_is_light(spec) and _at_hand(roots)):
            raise _TooHeavy
        if problems := budget_problems(spec, self.store, self.catalogue):
            raise SpecError(problems)
        plans, reuse = admit(
            spec,
            self.settings,
            self.catalogue,
            self.cluster.read(spec.pool),
            now_s=time.time(),
            find_run=self.find_run(caller) if find_runs else None,
            find_equal=self.find_equal(caller),
            roots=roots,
            may_read=not light,
        )
        return NewExperiment(
            spec,
            plans,
            text,
            caller.owner,
            idempotency_key,
            reuse,
            caller.actor,
            self.projects.limits(spec.project).queued_runs_per_user,
        )

    def read(self, text: bytes, caller: Caller) -> ExperimentSpec:
        """Returns a spec that someone may submit; raises as a submission of it would."""
        spec = read_spec(text, self.catalogue)
        self.projects.refuse(caller, spec)
        self.projects.refuse_queued(caller, spec)
        return spec

    def find_run(self, caller: Caller) -> FindRun:
        return functools.partial(self.store.runs.find, visible=caller.visible)

    def find_equal(self, caller: Caller) -> FindEqual:
        return functools.partial(self.store.runs.equal, visible=caller.visible)

    async def submit_study(
        self, text: bytes, caller: Caller, idempotency_key: str | None
    ) -> tuple[StudyDetail, bool]:
        """Checks a study whole and stores it; returns after the commit, with whether it is new."""
        return await self.checks.heavy(functools.partial(self._submit_study, text, caller, idempotency_key))

    def _submit_study(
        self, text: bytes, caller: Caller, idempotency_key: str | None
    ) -> tuple[StudyDetail, bool]:
        if idempotency_key is not None:
            earlier = self.store.studies.replay(Keyed(caller.owner, idempotency_key, body_sha256(text)))
            if earlier is not None:
                if not caller.visible.includes(earlier.project):
                    raise NotFound("study", earlier.id)
                return earlier, False
        study = parse_study(parse(text), self.catalogue)
        parts: list[NewPart] = []
        problems: list[Problem] = []
        for name, part in study.parts.items():
            document, spec = study.outlines[name]
            written = part_text(study.name, name, document)
            try:
                new = self._admitted(
                    spec, written, caller, None, self.settings.roots, find_runs=not part.needs
                )
            except SpecError as error:
                problems += in_part(name, error)
            else:
                parts.append(NewPart(name, part.needs, part.tuned, None if part.needs else new))
        if problems:
            raise SpecError(problems)
        return self.store.studies.submit(
            NewStudy(
                study.name, study.project, caller.owner, text.decode(), parts, idempotency_key, caller.actor
            )
        )


def _replayed(earlier: Experiment | StoreError, request: _Request) -> tuple[Experiment, bool] | StoreError:
    """Returns the answer to a key that was used before: of an experiment out of sight, as of one deleted."""
    if isinstance(earlier, StoreError):
        return earlier
    if not request.caller.visible.includes(earlier.project):
        return ReplayOfDeleted(str(request.idempotency_key), earlier.id)
    return earlier, False


def _at_hand(roots: Roots) -> bool:
    return all(isinstance(root, Path) for kind in ("data", "model") for root in roots(kind))


def _is_light(spec: ExperimentSpec) -> bool:
    several = any(name.startswith("task.") for name in spec.search.fields)
    measured = spec.batch.micro_tokens is not None or "batch.micro_tokens" in spec.search.fields
    if several or measured or spec.reuse or spec.run_count() > LIGHT_RUNS:
        return False
    probes = spec.search.probes() if spec.search.info.suggests else ()
    return sum(1 for _ in itertools.islice(probes, LIGHT_RUNS + 1)) <= LIGHT_RUNS
