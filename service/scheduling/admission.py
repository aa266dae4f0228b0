"""From the bytes of a submission to what the store takes, or every reason against it.

The same checks whoever asks: the API, `stillhouse validate` and `stillhouse preview`. Reads the
file system (paths), asks for the runs that a spec names where a service is at hand, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from service.config.document import Problem, SpecError, parse
from service.config.hardware import Hardware
from service.config.settings import Settings
from service.scheduling.cluster import ClusterSnapshot, unsatisfiable
from service.spec.encoder_size import layer_problems
from service.spec.experiment import ExperimentSpec, RunPlan, validate
from service.spec.models import FindRun, reference_problems
from service.spec.paths import path_problems
from service.spec.reuse import FindEqual, Reuse, reusable

SNAPSHOT_AGE_S = 60.0
"""A view of the cluster older than this refuses nothing."""
_LISTED = 20


@dataclass(frozen=True, slots=True)
class Admission:
    """A spec that may be submitted, with its runs."""

    text: str
    """The spec as the user wrote it."""
    spec: ExperimentSpec
    plans: Sequence[RunPlan]
    reuse: Reuse


def read_spec(text: bytes, catalogue: Mapping[str, Hardware]) -> ExperimentSpec:
    """Parse and validate.

    Raises:
        SpecError: with every problem found.
    """
    return validate(parse(text), catalogue)


def admit(
    text: bytes,
    settings: Settings,
    catalogue: Mapping[str, Hardware],
    snapshot: ClusterSnapshot | None,
    *,
    now_s: float,
    find_run: FindRun | None = None,
) -> Admission:
    """Check a submission completely: fields, grid, paths and, with a fresh snapshot, capacity.

    Args:
        text: the spec, YAML or JSON.
        settings: where paths may lie.
        catalogue: known hardware.
        snapshot: the cluster as the scheduler last saw it; None = not known.
        now_s: Unix time, to judge the snapshot's age.
        find_run: looks up the runs that `run:12` names; None = they are not judged.

    Raises:
        SpecError: with every problem of the first kind that has any.
    """
    spec = read_spec(text, catalogue)
    return admit_spec(text, spec, settings, catalogue, snapshot, now_s=now_s, find_run=find_run)


def admit_spec(
    text: bytes,
    spec: ExperimentSpec,
    settings: Settings,
    catalogue: Mapping[str, Hardware],
    snapshot: ClusterSnapshot | None,
    *,
    now_s: float,
    find_run: FindRun | None = None,
    find_equal: FindEqual | None = None,
) -> Admission:
    """What `admit` does after the spec itself is known to be valid.

    Args:
        find_equal: looks up runs that may be reused; None = none is.

    Raises:
        SpecError: with every problem of the first kind that has any.
    """
    if problems := path_problems(spec, settings):
        raise SpecError(problems)
    plans = list(spec.runs(catalogue))
    if problems := layer_problems([plan.spec.model for plan in plans], settings):
        raise SpecError(problems)
    if find_run is not None and (problems := reference_problems(plans, find_run)):
        raise SpecError(problems)
    if fresh(snapshot, now_s) is not None and not spec.queue.wait_for_capacity:
        assert snapshot is not None
        if problems := list(_capacity_problems(plans, snapshot, catalogue)):
            raise SpecError(problems)
    reuse = Reuse()
    if spec.reuse and find_equal is not None:
        reuse = reusable(plans, settings, catalogue, find_equal)
    return Admission(text.decode(), spec, plans, reuse)


def fresh(snapshot: ClusterSnapshot | None, now_s: float) -> ClusterSnapshot | None:
    """The snapshot when it can be relied on: the cluster answered, not long ago."""
    if snapshot is None or not snapshot.reachable or now_s - snapshot.at_s > SNAPSHOT_AGE_S:
        return None
    return snapshot


def _capacity_problems(
    plans: Sequence[RunPlan], snapshot: ClusterSnapshot, catalogue: Mapping[str, Hardware]
) -> Iterator[Problem]:
    """One problem per kind of demand that the whole cluster could not meet.

    Where hardware is an axis and the cluster has some of it, the cells of the rest wait for nodes.
    """
    demands = {
        (plan.spec.hardware, plan.spec.worker_numbers[-1], plan.spec.resources): plan for plan in plans
    }
    reasons = [(plan, unsatisfiable(plan.spec, snapshot, catalogue)) for plan in demands.values()]
    some = any(reason is None for _, reason in reasons)
    listed = 0
    for plan, reason in reasons:
        if reason is not None and listed < _LISTED and not (some and "hardware" in plan.point):
            listed += 1
            path = "hardware" if "hardware" in plan.point else "resources"
            yield Problem(
                "unsatisfiable-resources",
                path,
                f"{reason}; reduce the request, or set queue.wait_for_capacity: true to wait for nodes",
            )
