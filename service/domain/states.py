"""The states of experiments and runs, who moves them on, and what follows a failed attempt.

Pure. The database enforces these transitions with one guarded UPDATE each (`service.scheduling.queue`).
Requests to cancel or pause are columns with a time, not states.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar

from trainers.errors import FAILURES_OF_MACHINES, FailureClass

State = TypeVar("State", bound=StrEnum)


class ExperimentState(StrEnum):
    """Where an experiment is in its life."""

    queued = "queued"  # Waits for a scheduler to claim it. After a crash of any process it still waits.
    starting = "starting"
    """Claimed under a lease; a Ray Job is being submitted. When the lease runs out, any
    scheduler looks the job up by its submission id and adopts it, or submits it."""
    running = "running"
    """The driver in the Ray Job renews the lease. When the lease runs out and Ray says that the
    job is gone, a scheduler starts a new attempt; while Ray is unreachable nothing changes."""
    paused = "paused"  # Held by its owner; its runs keep their checkpoints. Only `resume` moves it on.
    succeeded = "succeeded"
    """Terminal: every run has ended, at least one with a result. Cells that cannot be trained, such as
    those that do not fit in memory, are results of the grid."""
    incomplete = "incomplete"
    """Terminal: as succeeded, but some runs failed otherwise. `retry` queues those without a result again."""
    failed = "failed"
    """Terminal: no run has a result, or the driver could not be started. `retry` queues it again."""
    cancelled = "cancelled"  # Terminal: ended on request. `retry` queues it again.


class RunState(StrEnum):
    """Where a run is in its life."""

    queued = "queued"  # Waits for its turn in the sweep, or for the delay before a retry
    starting = "starting"
    """The driver has opened an attempt; a worker is being placed. After a crash of the driver the
    next driver opens a new attempt, and writes of this one change no row."""
    running = "running"
    """A worker trains and reports under the attempt. After a crash as for `starting`: the next
    attempt resumes from the last verified checkpoint."""
    paused = "paused"
    """Stopped at a step boundary with a checkpoint. Continues when its experiment is resumed, and ends when
    its experiment does."""
    succeeded = "succeeded"
    """Terminal: the whole length was trained and evaluated, or the figures of such a run are reused.
    Only `retry --disturbed` queues it again, to be measured from the beginning."""
    failed = "failed"  # Terminal: the failure class says why. `retry` queues it again.
    cancelled = "cancelled"  # Terminal: ended on request
    stopped = "stopped"  # Terminal: ended early by the search or a budget; a result, marked incomplete


EXPERIMENT_STATES_WITH_RESULT = frozenset({ExperimentState.succeeded, ExperimentState.incomplete})
TERMINAL_EXPERIMENT_STATES = EXPERIMENT_STATES_WITH_RESULT | {
    ExperimentState.failed,
    ExperimentState.cancelled,
}
RUN_STATES_WITH_RESULT = frozenset({RunState.succeeded, RunState.stopped})
TERMINAL_RUN_STATES = RUN_STATES_WITH_RESULT | {RunState.failed, RunState.cancelled}
UNFINISHED_RUN_STATES = frozenset(RunState) - TERMINAL_RUN_STATES


def _transitions(kind: type[State], **targets: str) -> Mapping[State, frozenset[State]]:
    return MappingProxyType({kind(state): frozenset(map(kind, to.split())) for state, to in targets.items()})


EXPERIMENT_TRANSITIONS = _transitions(
    ExperimentState,
    queued="starting paused cancelled",
    starting="running queued paused failed cancelled",
    running="queued paused succeeded incomplete failed cancelled",
    paused="queued cancelled",
    succeeded="queued",
    incomplete="queued",
    failed="queued",
    cancelled="queued",
)
RUN_TRANSITIONS = _transitions(
    RunState,
    queued="starting paused cancelled stopped failed",
    starting="running queued paused failed cancelled stopped",
    running="queued paused succeeded failed cancelled stopped",
    paused="queued cancelled stopped failed",
    succeeded="queued",
    failed="queued",
    cancelled="queued",
    stopped="queued",
)

INFRASTRUCTURE_LIMIT = 20  # Attempts that a run may lose to machines before it fails; bounds a crash loop

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 300.0

_COUNTED = frozenset({FailureClass.bug, FailureClass.not_finite})


@dataclass(frozen=True, slots=True)
class FailureCounts:
    """Failures so far, the present one included."""

    own: int  # Failures of the run itself
    infrastructure: int  # Failures of machines, processes or networks under it


@dataclass(frozen=True, slots=True)
class RetryDecision:
    retry: bool
    delay_s: float
    reason: str


def decide_retry(
    failure: FailureClass, counts: FailureCounts, *, max_restarts: int, progressed: bool
) -> RetryDecision:
    """`progressed`: the attempt got further than the one before, so a machine failure delays it least."""
    if failure is FailureClass.preempted:
        return RetryDecision(True, 0.0, "preempted: the run resumes when resources are back")
    if failure in FAILURES_OF_MACHINES:
        if counts.infrastructure > INFRASTRUCTURE_LIMIT:
            return RetryDecision(
                False,
                0.0,
                f"lost {counts.infrastructure} times to machine failures; the limit is "
                f"{INFRASTRUCTURE_LIMIT}",
            )
        delay = FIRST_DELAY_S if progressed else backoff_s(counts.infrastructure)
        return RetryDecision(True, delay, f"{failure}: retrying, not counted against max_restarts")
    if failure in _COUNTED:
        if counts.own <= max_restarts:
            return RetryDecision(
                True, backoff_s(counts.own), f"{failure}: restart {counts.own} of {max_restarts}"
            )
        return RetryDecision(False, 0.0, f"{failure}: all {max_restarts} of max_restarts are used")
    return RetryDecision(False, 0.0, f"{failure}: not retried, would fail the same way again")


def backoff_s(failures: int) -> float:
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 1, 30))
