"""The states of experiments and runs, who moves them on, and what happens after a crash.

Pure. The database enforces these transitions with one guarded UPDATE each (`service.scheduling.queue`).
Requests to cancel or pause are columns with a time, not states.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import TypeVar

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
