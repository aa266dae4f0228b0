"""The kinds of events: the dotted words that are stored, sent to clients and acted on."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from service.domain.states import ExperimentState, RunState


class EventKind(StrEnum):
    experiment_submitted = "experiment.submitted"
    experiment_claimed = "experiment.claimed"  # A scheduler took it from the queue
    experiment_adopted = "experiment.adopted"  # A scheduler took over a lease that its driver did not renew
    experiment_started = "experiment.started"  # The driver of an attempt is running
    experiment_released = "experiment.released"  # An attempt was lost; the experiment is queued for another
    experiment_yielded = "experiment.yielded"  # It may hold no devices at present; it is queued until it may
    experiment_suggested = "experiment.suggested"  # The search chose the point of some runs, which `data` has
    experiment_note = "experiment.note"
    experiment_spool_damaged = "experiment.spool_damaged"
    """Points that waited on a node's disk for the database could not be read."""
    experiment_held = "experiment.held"
    """A budget with `when_reached: hold` was reached. A pause follows; a resume grants the budget again."""
    experiment_priority = "experiment.priority"
    experiment_cancel_requested = "experiment.cancel_requested"
    experiment_pause_requested = "experiment.pause_requested"
    experiment_resumed = "experiment.resumed"
    experiment_retried = "experiment.retried"
    experiment_paused = "experiment.paused"
    experiment_succeeded = "experiment.succeeded"
    experiment_incomplete = "experiment.incomplete"
    experiment_failed = "experiment.failed"
    experiment_cancelled = "experiment.cancelled"
    experiment_deleted = "experiment.deleted"  # No one sees it any more, unless it is restored
    experiment_restored = "experiment.restored"
    experiment_tagged = "experiment.tagged"  # Its tags changed; `data` has them
    experiment_annotated = "experiment.annotated"  # Its notes changed
    experiment_archived = "experiment.archived"
    experiment_unarchived = "experiment.unarchived"

    run_waiting = "run.waiting"  # Its turn has come and the cluster has no room for it
    run_starting = "run.starting"  # An attempt was opened
    run_started = "run.started"  # The attempt's workers train
    run_rows_set_aside = "run.rows_set_aside"
    """The database refused rows of an attempt; they are kept in a file on its node."""
    run_lost = "run.lost"  # The attempt went with its driver
    run_retrying = "run.retrying"  # The attempt failed, and there will be another
    run_preempted = "run.preempted"
    """Its devices went to others; the run is queued again, to continue from its checkpoint."""
    run_resumed = "run.resumed"  # Stopped for a request that was withdrawn meanwhile, and queued again
    run_retried = "run.retried"  # Queued again on request
    run_kept = "run.kept"  # Asked to be measured again, and left as it is
    run_reused = "run.reused"
    run_cancel_requested = "run.cancel_requested"
    run_paused = "run.paused"
    run_succeeded = "run.succeeded"
    run_failed = "run.failed"
    run_cancelled = "run.cancelled"
    run_stopped = "run.stopped"

    @classmethod
    def of_experiment(cls, ended: ExperimentState) -> Self:
        return cls(f"experiment.{ended}")

    @classmethod
    def of_run(cls, ended: RunState) -> Self:
        return cls(f"run.{ended}")


class Topic(StrEnum):
    """What a subscription asks for."""

    end = "end"  # An experiment ended, however, or a part of a study was refused
    failure = "failure"  # An experiment failed, or some of its runs did, or a part of a study was refused
    hold = "hold"  # A budget put an experiment, or a project's queue, on hold
    budget = "budget"  # A project has used 80% or all of a month's budget
    preemption = "preemption"  # A run gave its devices back to others at a checkpoint, and is queued again
