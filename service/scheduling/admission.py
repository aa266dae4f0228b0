"""From the bytes of a submission to what the store takes, or every reason against it.

The API, `stillhouse validate` and `stillhouse preview` run the same checks.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from service.config.document import Problem, SpecError, first_problems, parse, refusal
from service.config.hardware import Hardware
from service.config.settings import Settings
from service.domain.grid import varied_fields
from service.scheduling.cluster import ClusterSnapshot, unsatisfiable
from service.specs.data import data_problems, room_problems
from service.specs.experiment import ExperimentSpec, RunPlan, validate
from service.specs.model_fit import layer_problems, model_problems
from service.specs.models import FindRun, reference_problems
from service.specs.paths import Roots, path_problems
from service.specs.reuse import FindEqual, Reuse, reusable

SNAPSHOT_AGE_S = 60.0  # A view of the cluster older than this refuses nothing
CHECK_LIMIT_S = 20.0
"""CPU time that paths, data and grid of one spec may take to check, in s; 10,000 runs take about 2 s."""


def read_spec(text: bytes, catalogue: Mapping[str, Hardware]) -> ExperimentSpec:
    """Parses and validates a spec; raises `SpecError` with the first problems found."""
    return validate(parse(text), catalogue)


def admit(
    spec: ExperimentSpec,
    settings: Settings,
    catalogue: Mapping[str, Hardware],
    snapshot: ClusterSnapshot | None,
    *,
    now_s: float,
    find_run: FindRun | None = None,
    find_equal: FindEqual | None = None,
    roots: Roots | None = None,
    may_read: bool = True,
) -> tuple[list[RunPlan], Reuse]:
    """Checks a spec completely and returns its runs, and which of them are reused: none without `find_equal`.

    `roots` defaults to the folders of the settings. Without `find_run`, runs that `run:12` names are not
    judged, nor is capacity without a fresh snapshot.

    Raises:
        SpecError: with the first problems of the first kind that has any.
        UnreadData: data would have to be read, and `may_read` is False.
    """
    plans = checked_plans(spec, roots or settings.roots, catalogue, find_run, may_read=may_read)
    recent = None if spec.queue.wait_for_capacity else fresh(snapshot, now_s)
    if recent is not None and (problems := first_problems(_capacity_problems(plans, recent, catalogue))):
        raise SpecError(problems)
    if spec.reuse and find_equal is not None:
        return plans, reusable(plans, settings, catalogue, find_equal)
    return plans, Reuse()


def checked_plans(
    spec: ExperimentSpec,
    roots: Roots,
    catalogue: Mapping[str, Hardware],
    find_run: FindRun | None,
    *,
    may_read: bool = True,
) -> list[RunPlan]:
    """Returns the runs of a spec, with every check that depends neither on the cluster nor on earlier runs.

    Raises:
        SpecError, UnreadData: as `admit`.
    """
    check_time = _time_limit()
    roots = functools.cache(roots)  # Resolving them takes longer than most other checks.
    if problems := path_problems(spec, roots, before_each=check_time):
        raise SpecError(problems)
    every = list(spec.runs(catalogue, before_each=check_time))
    plans = [plan for plan in every if plan.refusal is None]
    tasks = (plan.spec.task for plan in plans)
    if problems := data_problems(tasks, roots, before_each=check_time, may_read=may_read):
        raise SpecError(problems)
    if problems := room_problems((plan.spec for plan in plans), roots, before_each=check_time):
        raise SpecError(problems)
    if problems := model_problems([plan.spec for plan in plans], roots):
        raise SpecError(problems)
    if problems := layer_problems([plan.spec.model for plan in plans], roots):
        raise SpecError(problems)
    if find_run is not None and (problems := reference_problems(plans, find_run)):
        raise SpecError(problems)
    return every


def _time_limit() -> Callable[[], None]:
    """Returns a check that raises once this thread has worked for `CHECK_LIMIT_S` since now."""
    began_s, started_s = time.monotonic(), time.thread_time()

    def check() -> None:
        # The time of a thread is a call of the system; in less time than the limit it need not be asked.
        if time.monotonic() - began_s > CHECK_LIMIT_S and time.thread_time() - started_s > CHECK_LIMIT_S:
            raise refusal(
                "check-too-long",
                f"checking paths, data and grid took more than {CHECK_LIMIT_S:g} s; list fewer values in "
                "search.axes, or submit it as several experiments",
            )

    return check


def fresh(snapshot: ClusterSnapshot | None, now_s: float) -> ClusterSnapshot | None:
    """Returns the snapshot if it can be relied on: the cluster answered, not long ago."""
    if snapshot is None or not snapshot.reachable or now_s - snapshot.at_s > SNAPSHOT_AGE_S:
        return None
    return snapshot


def _capacity_problems(
    plans: Sequence[RunPlan], snapshot: ClusterSnapshot, catalogue: Mapping[str, Hardware]
) -> Iterator[Problem]:
    """Yields one problem per kind of demand that the whole cluster could not meet.

    Where hardware is an axis and the cluster has some of it, the cells of the rest wait for nodes.
    """
    demands = {
        (plan.spec.hardware, plan.spec.worker_numbers[-1], plan.spec.resources): plan
        for plan in plans
        if plan.refusal is None
    }
    reasons = [(plan, unsatisfiable(plan.spec, snapshot, catalogue)) for plan in demands.values()]
    some = any(reason is None for _, reason in reasons)
    for plan, reason in reasons:
        varies = "hardware" in varied_fields(plan.point)
        if reason is not None and not (some and varies):
            path = "hardware" if varies else "resources"
            yield Problem(
                "unsatisfiable-resources",
                path,
                f"{reason}; reduce the request, or set queue.wait_for_capacity: true to wait for nodes",
            )
