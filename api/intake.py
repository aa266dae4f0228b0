"""Submissions come in: many requests, one worker, one transaction for all that wait.

A thread per request would spend most of its time handing the interpreter from thread to thread.
Here a single worker thread checks and stores everything that arrived while it was busy; a grid
whose expansion takes long is checked apart, and so is a spec whose data have to be read, so that no
one waits behind it. A submission that was answered before is answered the same, unchecked: what its
files are like today does not matter.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from api.access import Caller
from api.project_view import ClusterView, ProjectView
from service.config.document import SpecError
from service.config.hardware import Hardware
from service.config.settings import Settings
from service.db.errors import ReplayOfDeleted
from service.domain.records import Experiment
from service.planner.forecasting import budget_problems
from service.scheduling.admission import admit_spec, read_spec
from service.specs.data import UnreadData
from service.specs.experiment import ExperimentSpec
from service.specs.paths import Roots
from service.store import Keyed, NewExperiment, Store, StoreError, body_sha256

HEAVY_AT_A_TIME = 2
"""Large documents that are checked at a time: each takes a share of the interpreter from every read."""
LOOKS_AT_A_TIME = 2

Result = TypeVar("Result")


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


LARGEST_BATCH = 64
"""Submissions that one round of the worker takes: bounds how long the first of them waits."""
LIGHT_BYTES = 16 * 1024
LIGHT_RUNS = 20
"""A longer text or a larger grid is checked apart from the others, as is what may reuse runs or names data
that changed since it was last looked at."""


@dataclass(slots=True)
class _Request:
    text: bytes
    caller: Caller
    idempotency_key: str | None
    answer: asyncio.Future[tuple[Experiment, bool]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class _TooHeavy(Exception):
    """The spec is checked in a thread of its own."""


class Intake:
    """Takes submissions for one application; used from its event loop only."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        catalogue: Mapping[str, Hardware],
        cluster: ClusterView,
        checks: Checks,
        projects: ProjectView,
    ) -> None:
        self._store = store
        self._settings = settings
        self._catalogue = catalogue
        self._cluster = cluster
        self._checks = checks
        self._projects = projects
        self._waiting: list[_Request] = []
        self._worker: asyncio.Task[None] | None = None

    async def submit(
        self, text: bytes, caller: Caller, idempotency_key: str | None
    ) -> tuple[Experiment, bool]:
        """Checks and stores a spec; returns after the commit, with whether it was created now (or replayed).

        Raises:
            SpecError: with every problem found.
            ProblemError: `forbidden`: the caller may not submit to the project.
            StoreError: as `Store.submit`.
        """
        request = _Request(text, caller, idempotency_key)
        try:
            if len(text) > LIGHT_BYTES:
                raise _TooHeavy
            self._waiting.append(request)
            if self._worker is None:
                self._worker = asyncio.create_task(self._work(), name="intake")
            return await request.answer
        except _TooHeavy:
            return await self._checks.heavy(functools.partial(self._submit_alone, request))
        except UnreadData:
            return await self._checks.look(functools.partial(self._submit_alone, request))

    async def _work(self) -> None:
        """Rounds until no one waits; never raises: every request gets its own answer."""
        while self._waiting:
            batch, self._waiting = self._waiting[:LARGEST_BATCH], self._waiting[LARGEST_BATCH:]
            try:
                answers = await self._checks.light(functools.partial(self._submit_batch, batch))
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
        roots = functools.cache(self._settings.roots)
        for position, request in enumerate(batch):
            if position in answers:
                continue
            try:
                admitted.append((position, self._admit(request, roots, light=True)))
            except Exception as error:  # Whatever is wrong with one, the others are taken.
                answers[position] = error
        if admitted:
            stored = self._store.submit_many([new for _, new in admitted])
            answers.update((position, answer) for (position, _), answer in zip(admitted, stored, strict=True))
        return [answers[position] for position in range(len(batch))]

    def _replays(self, batch: Sequence[_Request]) -> dict[int, tuple[Experiment, bool] | BaseException]:
        keyed = {
            position: Keyed(request.caller.owner, request.idempotency_key, body_sha256(request.text))
            for position, request in enumerate(batch)
            if request.idempotency_key is not None
        }
        found = zip(keyed, self._store.replays(list(keyed.values())), strict=True)
        return {
            position: _replayed(earlier, batch[position])
            for position, earlier in found
            if earlier is not None
        }

    def _submit_alone(self, request: _Request) -> tuple[Experiment, bool]:
        answer = self._replays([request]).get(0)
        if isinstance(answer, BaseException):
            raise answer
        if answer is not None:
            return answer
        new = self._admit(request, self._settings.roots, light=False)
        return self._store.submit(new)

    def _admit(self, request: _Request, roots: Roots, *, light: bool) -> NewExperiment:
        now_s = time.time()
        spec = read_spec(request.text, self._catalogue)
        self._projects.refuse(request.caller, spec)
        if light and not _is_light(spec):
            raise _TooHeavy
        if problems := budget_problems(spec, self._store, self._catalogue):
            raise SpecError(problems)
        snapshot = self._cluster.read(spec.pool)
        visible = request.caller.visible
        admission = admit_spec(
            request.text,
            spec,
            self._settings,
            self._catalogue,
            snapshot,
            now_s=now_s,
            find_run=functools.partial(self._store.find_run, visible=visible),
            find_equal=functools.partial(self._store.equal_runs, visible=visible),
            roots=roots,
            may_read=not light,
        )
        return NewExperiment(
            spec,
            admission.plans,
            admission.text,
            request.caller.owner,
            request.idempotency_key,
            admission.reuse,
            request.caller.actor,
            self._projects.limits(spec.project).queued_runs_per_user,
        )


def _replayed(earlier: Experiment | StoreError, request: _Request) -> tuple[Experiment, bool] | StoreError:
    """Returns the answer to a key that was used before: of an experiment out of sight, as of one deleted."""
    if isinstance(earlier, StoreError):
        return earlier
    if not request.caller.visible.includes(earlier.project):
        return ReplayOfDeleted(str(request.idempotency_key), earlier.id)
    return earlier, False


def _is_light(spec: ExperimentSpec) -> bool:
    """Returns whether it has few grid points, one dataset whose rows need no measuring, and no reuse."""
    several = any(name.startswith("task.") for name in spec.search.axes)
    measured = spec.batch.micro_tokens is not None or "batch.micro_tokens" in spec.search.axes
    if several or measured or spec.reuse or spec.run_count() > LIGHT_RUNS:
        return False
    probes = spec.search.probes() if spec.search.info.suggests else ()
    return sum(1 for _ in itertools.islice(probes, LIGHT_RUNS + 1)) <= LIGHT_RUNS
