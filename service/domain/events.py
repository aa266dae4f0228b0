"""The kinds of events: the dotted words that are stored, sent to clients and acted on."""

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
    experiment_renamed = "experiment.renamed"
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
    """Its devices went to others, or their node drains; the run is queued again, to continue from its
    checkpoint. `data` has the steps that are lost."""
    run_resumed = "run.resumed"  # Stopped for a request that was withdrawn meanwhile, and queued again
    run_retried = "run.retried"  # Queued again on request
    run_annotated = "run.annotated"  # People changed its name, star, tags or notes
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

    described: str  # What happened, for people who choose

    def __new__(cls, value: str, described: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_, member.described = value, described
        return member

    end = "end", "an experiment ended, however, or a part of a study was refused"
    failure = "failure", "an experiment failed, or some of its runs did, or a part of a study was refused"
    undecided = "undecided", "an experiment ended, and its runs do not decide which configuration is best"
    hold = "hold", "a budget put an experiment, or a project's queue, on hold"
    budget = "budget", "a project has used 80%, or all, of a month's budget"
    preemption = "preemption", "a run gave its devices back at a checkpoint, and is queued again"
