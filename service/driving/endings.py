"""How runs and the experiment end: an attempt's ending becomes the run's next state."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from service.domain.records import Run
from service.domain.states import (
    RUN_STATES_WITH_RESULT,
    ExperimentState,
    FailureCounts,
    RunState,
    decide_retry,
)
from service.driving.sweep_context import LiveTurn, SweepContext
from service.recording.mailbox import Ending
from service.recording.outages import RETRY_S, wait_out
from service.scheduling.cluster import ClusterNode
from service.store import Conflict, StaleAttempt
from trainers.errors import FAILURES_OF_MACHINES, FailureClass
from trainers.reporting import StopReason

logger = logging.getLogger(__name__)

FAILURES_OF_NODES = FAILURES_OF_MACHINES | {FailureClass.preempted}
_START_RECORDED_LOOKS = 300  # Tries, every `RETRY_S`, to end a run whose start is not recorded yet: a minute
_STOPPED_AS: Mapping[StopReason | None, RunState] = {
    StopReason.cancel: RunState.cancelled,
    StopReason.pause: RunState.paused,
    StopReason.early_stop: RunState.stopped,
}


class Endings:
    def __init__(self, context: SweepContext) -> None:
        self._store, self._max_restarts = context.store, context.spec.max_restarts

    def write(self, live: LiveTurn, ending: Ending, for_whom: str | None = None) -> RunState:
        """Writes an attempt's ending and returns the run's new state; waits for an unavailable database.

        The attempt may have ended before: an earlier try's answer was lost, or the run ended with its
        experiment. `for_whom` gets the devices of a preempted run, in words.
        """
        for _ in range(_START_RECORDED_LOOKS):
            try:
                return wait_out(lambda: self._write(live, ending, for_whom), "a run's end")
            except _StartNotRecorded:
                # After an outage: the recorder has not stored its spool yet.
                time.sleep(RETRY_S)
        lost = Ending("failed", failure=(FailureClass.lost, "its start was never reported"))
        return wait_out(lambda: self._write(live, lost, None), "a run's end")

    def _write(self, live: LiveTurn, ending: Ending, for_whom: str | None) -> RunState:
        assert live.assignment is not None
        run_id, attempt = live.assignment.run_id, live.assignment.attempt
        finish = functools.partial(self._store.attempts.finish_run, run_id, attempt)
        try:
            if ending.failure is not None:
                delay_s = self._retry_delay_s(live.run, ending.failure[0])
                return finish(
                    RunState.failed,
                    summary=ending.summary,
                    failure=ending.failure,
                    retry_delay_s=delay_s,
                )
            if ending.stop_reason is StopReason.preempted:
                failure = FailureClass.preempted, for_whom or "the worker was preempted"
                return finish(RunState.failed, summary=ending.summary, failure=failure, retry_delay_s=0.0)
            stopped = ending.kind == "stopped"
            state = _STOPPED_AS.get(ending.stop_reason, RunState.stopped) if stopped else RunState.succeeded
            return finish(state, summary=ending.summary)
        except (Conflict, StaleAttempt) as error:
            run = self._store.runs.get(run_id)
            if run.attempt != attempt:
                raise
            if run.state is RunState.starting:
                raise _StartNotRecorded from error
            logger.info("run %d had already ended: %s", run_id, error)
            return run.state

    def _retry_delay_s(self, before: Run, failure: FailureClass) -> float | None:
        """Returns when to retry a run that was `before` when its turn came; None = it is not retried."""
        run = self._store.runs.get(before.id)
        machine = failure in FAILURES_OF_MACHINES
        own = not machine and failure is not FailureClass.preempted
        decision = decide_retry(
            failure,
            FailureCounts(own=run.own_failures + own, infrastructure=run.infrastructure_failures + machine),
            max_restarts=self._max_restarts,
            progressed=(run.checkpoint_step or 0) > (before.checkpoint_step or 0),
        )
        return decision.delay_s if decision.retry else None


def without_node(ending: Ending, node: ClusterNode) -> Ending:
    """Returns the ending of an attempt whose node is gone or about to go, where that was the cause.

    A run that stopped at a step boundary for a node that is lost meanwhile has its checkpoint all the same.
    """
    kind = FailureClass.preempted if node.draining else FailureClass.infrastructure
    if ending.stop_reason is StopReason.preempted:
        return replace(ending, kind="failed", failure=(kind, node.departure))
    if ending.failure is not None and ending.failure[0] in FAILURES_OF_NODES:
        why = f" ({node.message})" if node.message else ""
        return replace(ending, failure=(kind, f"{node.departure}{why}: {ending.failure[1]}"))
    return ending


class _StartNotRecorded(Exception):
    """The run has ended, but its start is not in the database yet."""


def experiment_outcome(
    runs: Sequence[Run],
    budget_reached: str | None,
    unusable: str | None = None,
    refused_cells: Container[str] = (),
) -> tuple[ExperimentState, tuple[FailureClass, str] | None]:
    """Returns how an experiment ends once its runs have ended, or do not start for the given reasons.

    That a cell cannot be trained, or does not fit in memory, is a result of the grid.
    """
    ended = [run for run in runs if run.state is not RunState.queued]
    if any(run.state in RUN_STATES_WITH_RESULT for run in ended):
        lacking = any(
            run.state is RunState.failed
            and run.failure_class is not FailureClass.out_of_memory
            and run.cell not in refused_cells
            for run in ended
        )
        return ExperimentState.incomplete if lacking else ExperimentState.succeeded, None
    if ended and all(run.state is RunState.cancelled for run in ended):
        return ExperimentState.cancelled, None
    if unusable is not None:
        return ExperimentState.failed, (FailureClass.bad_data, unusable)
    if budget_reached is not None:
        return ExperimentState.failed, (FailureClass.bad_spec, budget_reached)
    failed = [run for run in ended if run.state is RunState.failed]
    last = failed[-1] if failed else None
    return ExperimentState.failed, (
        (last.failure_class if last else None) or FailureClass.lost,
        (last.failure_message if last else None) or "no run has a result",
    )
