"""What people ask of experiments and runs.

What waits is moved at once; what a driver holds gets a column with the time of the request, and
the driver carries it out. Cancel beats retry; a finished result beats cancel.
"""

import re
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, func, select, update

from service.db import schema, statements
from service.db.errors import BadValue, Conflict, NotFound
from service.db.schema import NEIGHBOUR_COLUMNS
from service.domain.access import LOCAL_ACTOR, Actor
from service.domain.events import EventKind
from service.domain.grid import REFERENCE_CELL
from service.domain.neighbours import disturbances
from service.domain.people import LONGEST_NOTES, MOST_TAGS, TAG_PATTERN
from service.domain.records import SUMMARY_FIELDS, Experiment, Run, tags_text
from service.domain.states import (
    RUN_STATES_WITH_RESULT,
    TERMINAL_EXPERIMENT_STATES,
    TERMINAL_RUN_STATES,
    ExperimentState,
    RunState,
)
from service.specs.project_limits import ProjectLimits, queue_cap_problem
from service.store.attempts import leave_runs
from service.store.audit import note_change
from service.store.base import (
    NewEvent,
    StorePart,
    announce,
    lock_experiment,
    lock_run,
    read_experiment,
    read_run,
    records,
    storable,
    transaction,
)
from service.store.people import read_project
from service.store.projects import count_queued_in_turn

_a, _r = schema.attempts.c, schema.runs.c

_WAITING = frozenset({ExperimentState.queued, ExperimentState.paused})
_WAITING_RUN = frozenset({RunState.queued, RunState.paused})
_UNENDED: dict[str, Any] = {
    "ended_s": None,
    "cancel_requested_s": None,
    "failure_class": None,
    "failure_message": None,
    "not_before_s": 0.0,
}
"""An experiment or run that is queued again may start at once, whatever it ended with."""
_AFRESH = {"own_failures": 0, "infrastructure_failures": 0, **dict.fromkeys(SUMMARY_FIELDS)}
"""A retried run starts with no failures counted and no figures of the try before."""
_FROM_THE_BEGINNING = {
    **_UNENDED,
    **_AFRESH,
    **dict.fromkeys(NEIGHBOUR_COLUMNS),
    **dict.fromkeys(("started_s", "checkpoint", "checkpoint_step", "total_steps", "reused_from", "phase")),
    "step": 0,
}
"""A run that is measured again has nothing of the measurement before."""
_TAG = re.compile(TAG_PATTERN)


class Requesting(StorePart):
    @transaction
    def cancel(self, connection: Connection, experiment_id: int, *, actor: Actor = LOCAL_ACTOR) -> Experiment:
        """Cancels at once what waits; asks the driver to cancel what runs; leaves what has ended."""
        return cancel_experiment(connection, experiment_id, self.clock(), actor)

    @transaction
    def pause(self, connection: Connection, experiment_id: int, *, actor: Actor = LOCAL_ACTOR) -> Experiment:
        """Pauses at once what waits in the queue; asks the driver to pause what runs."""
        now = self.clock()
        row = lock_experiment(connection, experiment_id)
        if row.state in TERMINAL_EXPERIMENT_STATES:
            raise Conflict(
                f"experiment {experiment_id} is {row.state}; only a queued or running experiment can "
                "be paused"
            )
        if row.state is ExperimentState.queued:
            connection.execute(
                statements.move_experiment(experiment_id, ExperimentState.paused, pause_requested_s=now)
            )
            leave_runs(connection, experiment_id, RunState.paused, now)
            new = NewEvent(EventKind.experiment_paused, "paused")
        elif row.state is not ExperimentState.paused and row.pause_requested_s is None:
            connection.execute(statements.set_experiment(experiment_id, pause_requested_s=now))
            new = NewEvent(EventKind.experiment_pause_requested, "pause requested")
        else:
            return read_experiment(connection, experiment_id)
        return _carried_out(connection, experiment_id, [new], now, actor, _standing(row))

    @transaction
    def resume(self, connection: Connection, experiment_id: int, *, actor: Actor = LOCAL_ACTOR) -> Experiment:
        """Queues a paused experiment again, or withdraws a pause that the driver has not carried out.

        Runs that have stopped for the pause already are queued again.
        """
        now = self.clock()
        row = lock_experiment(connection, experiment_id)
        if row.state in TERMINAL_EXPERIMENT_STATES:
            raise Conflict(f"experiment {experiment_id} is {row.state}; use retry to queue it again")
        if row.cancel_requested_s is not None:
            raise Conflict(f"experiment {experiment_id} is being cancelled; use retry when it has ended")
        if row.state is ExperimentState.paused:
            self._queue_again(connection, experiment_id, {RunState.paused}, now)
            message = "queued again"
        elif row.pause_requested_s is not None:
            connection.execute(statements.set_experiment(experiment_id, pause_requested_s=None))
            queued = self._queue_runs(connection, experiment_id, {RunState.paused})
            message = "pause request withdrawn"
            if queued:
                message += f"; {queued} paused run{'s' * (queued != 1)} queued again"
        else:
            return read_experiment(connection, experiment_id)
        new = NewEvent(EventKind.experiment_resumed, message)
        return _carried_out(connection, experiment_id, [new], now, actor, _standing(row))

    @transaction
    def retry(
        self,
        connection: Connection,
        experiment_id: int,
        *,
        only: Set[RunState] = TERMINAL_RUN_STATES,
        actor: Actor = LOCAL_ACTOR,
    ) -> Experiment:
        """Queues an ended experiment again with its failed, cancelled and stopped runs, if in `only`."""
        now = self.clock()
        row = _lock_ended(connection, experiment_id)
        unfinished = (TERMINAL_RUN_STATES & only) - {RunState.succeeded}
        queued = self._queue_again(connection, experiment_id, unfinished, now)
        if not queued:
            states = " or ".join(sorted(unfinished))
            raise Conflict(f"experiment {experiment_id}: no run is {states}; there is nothing to retry")
        new = NewEvent(EventKind.experiment_retried, f"{queued} run{'s' * (queued != 1)} queued again")
        return _carried_out(connection, experiment_id, [new], now, actor, _standing(row))

    @transaction
    def retry_disturbed(
        self, connection: Connection, experiment_id: int, *, actor: Actor = LOCAL_ACTOR
    ) -> Experiment:
        """Queues an ended experiment again with those of its results that neighbours disturbed.

        They are measured from the beginning. Their figures stay with the attempts that they came from.
        """
        now = self.clock()
        row = _lock_ended(connection, experiment_id)
        with_result = select(*statements.RUN_COLUMNS).where(
            _r.experiment_id == experiment_id,
            _r.state.in_(sorted(RUN_STATES_WITH_RESULT)),
            _r.cell != REFERENCE_CELL,
        )
        runs = {run.id: run for run in records(connection, Run, with_result)}
        causes = disturbances(runs.values())
        if not causes:
            raise Conflict(
                f"experiment {experiment_id}: no result was disturbed; there is nothing to remeasure"
            )
        reused_among = (
            select(_r.reused_from, func.min(_r.id).label("user"))
            .where(_r.reused_from.in_(sorted(causes)), statements.VISIBLE_RUN)
            .group_by(_r.reused_from)
        )
        reusers: dict[int, int] = {row.reused_from: row.user for row in connection.execute(reused_among)}
        again = sorted(causes.keys() - reusers.keys())
        if not again:
            first = min(reusers)
            raise Conflict(
                f"experiment {experiment_id}: its disturbed results are reused elsewhere (run {first} as "
                f"run {reusers[first]}) and keep their figures; submit the runs again without reuse"
            )
        self._queue_again(connection, experiment_id, frozenset(), now)
        connection.execute(keep_summaries(again))
        summaries = schema.run_summaries
        connection.execute(sa.delete(summaries).where(summaries.c.run_id.in_(again)))
        new = []
        for id, user in sorted(reusers.items()):
            why = f"not remeasured: run {user} reuses its figures"
            new.append(NewEvent(EventKind.run_kept, why, id, runs[id].attempt))
        for id in again:
            attempt = runs[id].attempt
            connection.execute(
                statements.move_run(
                    id,
                    RunState.queued,
                    attempt=attempt,
                    sources=RUN_STATES_WITH_RESULT,
                    **_FROM_THE_BEGINNING,
                    first_attempt=attempt + 1,
                )
            )
            by = ", ".join(kind.words for kind in causes[id])
            why = f"queued again, from the beginning: disturbed by {by}"
            new.append(NewEvent(EventKind.run_retried, why, id, attempt))
        count = len(again)
        _check_queue_cap(connection, experiment_id, count)
        message = f"{count} disturbed run{'s' * (count != 1)} queued again"
        new.append(NewEvent(EventKind.experiment_retried, message))
        return _carried_out(connection, experiment_id, new, now, actor, _standing(row))

    def _queue_again(
        self, connection: Connection, experiment_id: int, runs: Set[RunState], now: float
    ) -> int:
        connection.execute(
            statements.move_experiment(
                experiment_id,
                ExperimentState.queued,
                **_UNENDED,
                queued_s=now,
                pause_requested_s=None,
                lease_owner=None,
                lease_until_s=None,
            )
        )
        return self._queue_runs(connection, experiment_id, runs)

    def _queue_runs(self, connection: Connection, experiment_id: int, runs: Set[RunState]) -> int:
        queued = connection.execute(
            statements.move_runs(
                experiment_id,
                RunState.queued,
                sources=runs,
                **_UNENDED,
                **({} if RunState.paused in runs else _AFRESH),
            )
        ).rowcount
        _check_queue_cap(connection, experiment_id, queued)
        return queued

    @transaction
    def set_priority(
        self, connection: Connection, experiment_id: int, priority: int, *, actor: Actor = LOCAL_ACTOR
    ) -> Experiment:
        now = self.clock()
        row = lock_experiment(connection, experiment_id)
        if row.state in TERMINAL_EXPERIMENT_STATES:
            raise Conflict(
                f"experiment {experiment_id} is {row.state}; its priority no longer has any effect"
            )
        before = {"priority": read_experiment(connection, experiment_id).priority}
        connection.execute(statements.set_experiment(experiment_id, priority=priority))
        new = NewEvent(
            EventKind.experiment_priority, f"priority set to {priority}", data={"priority": priority}
        )
        return _carried_out(connection, experiment_id, [new], now, actor, before)

    @transaction
    def cancel_runs(
        self, connection: Connection, experiment_id: int, ids: Collection[int], *, actor: Actor = LOCAL_ACTOR
    ) -> list[Run]:
        """Cancels runs of an experiment, all or none; leaves those that have ended."""
        return [self._cancel_run(connection, id, actor) for id in _of(connection, experiment_id, ids)]

    @transaction
    def cancel_run(self, connection: Connection, run_id: int, *, actor: Actor = LOCAL_ACTOR) -> Run:
        """Cancels a waiting run at once; asks the driver to cancel one that runs; leaves an ended one."""
        return self._cancel_run(connection, run_id, actor)

    def _cancel_run(self, connection: Connection, run_id: int, actor: Actor) -> Run:
        now = self.clock()
        _, run = lock_run(connection, run_id)
        if run.state in _WAITING_RUN:
            connection.execute(
                statements.move_run(
                    run_id,
                    RunState.cancelled,
                    sources=_WAITING_RUN,
                    cancel_requested_s=now,
                    ended_s=now,
                    waits_for=None,
                )
            )
            new = NewEvent(EventKind.run_cancelled, "cancelled", run_id, run.attempt)
        elif run.state not in TERMINAL_RUN_STATES and run.cancel_requested_s is None:
            connection.execute(statements.set_run(run_id, cancel_requested_s=now))
            new = NewEvent(EventKind.run_cancel_requested, "cancellation requested", run_id, run.attempt)
        else:
            return run
        return _carried_out_on_run(connection, run, [new], now, actor)

    @transaction
    def retry_run(self, connection: Connection, run_id: int, *, actor: Actor = LOCAL_ACTOR) -> Run:
        """Queues a failed, cancelled or stopped run again, and with it an experiment that has ended."""
        return self._retry_run(connection, run_id, actor)

    @transaction
    def retry_runs(
        self, connection: Connection, experiment_id: int, ids: Collection[int], *, actor: Actor = LOCAL_ACTOR
    ) -> list[Run]:
        """Retries several runs of an experiment; those that cannot be retried stay as they are."""
        again = TERMINAL_RUN_STATES - {RunState.succeeded}
        runs = [read_run(connection, id) for id in _of(connection, experiment_id, ids)]
        return [self._retry_run(connection, run.id, actor) if run.state in again else run for run in runs]

    def _retry_run(self, connection: Connection, run_id: int, actor: Actor) -> Run:
        now = self.clock()
        row, run = lock_run(connection, run_id)
        if run.state not in TERMINAL_RUN_STATES or run.state is RunState.succeeded:
            raise Conflict(
                f"run {run_id} is {run.state}; only a failed, cancelled or stopped run can be retried"
            )
        ended = row.state in TERMINAL_EXPERIMENT_STATES
        if row.cancel_requested_s is not None and not ended:
            raise Conflict(f"experiment {run.experiment_id} is being cancelled; retry when it has ended")
        if ended:
            self._queue_again(connection, run.experiment_id, frozenset(), now)
        connection.execute(
            statements.move_run(run_id, RunState.queued, sources=TERMINAL_RUN_STATES, **_UNENDED, **_AFRESH)
        )
        _check_queue_cap(connection, run.experiment_id, 1)
        new = [NewEvent(EventKind.run_retried, "queued again", run_id, run.attempt)]
        if ended:
            new.append(NewEvent(EventKind.experiment_retried, "queued again"))
        return _carried_out_on_run(connection, run, new, now, actor)

    @transaction
    def change_runs(
        self,
        connection: Connection,
        /,
        experiment_id: int,
        ids: Collection[int],
        *,
        add: Collection[str] = (),
        remove: Collection[str] = (),
        actor: Actor = LOCAL_ACTOR,
        **fields: Any,
    ) -> list[Run]:
        """Adds tags to runs of an experiment, takes others away, and sets `name`, `starred` and `notes`."""
        given = ((name, value) for name, value in fields.items() if value is not None)
        fields = {name: storable(value) if isinstance(value, str) else value for name, value in given}
        now, runs = self.clock(), []
        for id in _of(connection, experiment_id, ids):
            run = read_run(connection, id)
            after = fields | {"tags": _retagged(f"run {id}", run.tags, add, remove)}
            before = {name: getattr(run, name) for name in after}
            if before != after:
                connection.execute(statements.set_run(id, **_stored(after)))
                what = ", ".join(name for name in after if before[name] != after[name])
                new = NewEvent(EventKind.run_annotated, f"{what} changed", id, run.attempt)
                announce(connection, experiment_id, [new], now, actor)
                note_change(connection, actor, str(new.kind), id, now, before=before, after=after)
            runs.append(read_run(connection, id))
        return runs

    @transaction
    def tag(
        self,
        connection: Connection,
        experiment_id: int,
        *,
        add: Collection[str] = (),
        remove: Collection[str] = (),
        actor: Actor = LOCAL_ACTOR,
    ) -> Experiment:
        before = _locked(connection, experiment_id)
        tags = _retagged(f"experiment {experiment_id}", before.tags, add, remove)
        message = f"tags: {', '.join(tags)}" if tags else "no tags"
        new = NewEvent(EventKind.experiment_tagged, message, data={"tags": tags})
        return self._set(connection, before, new, actor, tags=tags)

    @transaction
    def rename(
        self, connection: Connection, experiment_id: int, name: str, *, actor: Actor = LOCAL_ACTOR
    ) -> Experiment:
        before = _locked(connection, experiment_id)
        new = NewEvent(EventKind.experiment_renamed, f"renamed from {before.name}")
        return self._set(connection, before, new, actor, name=name)

    @transaction
    def annotate(
        self, connection: Connection, experiment_id: int, notes: str, *, actor: Actor = LOCAL_ACTOR
    ) -> Experiment:
        """Replaces the notes of an experiment; empty = none."""
        if len(notes) > LONGEST_NOTES:
            raise BadValue(
                "notes", f"they have {len(notes):,} characters; at most {LONGEST_NOTES:,} are kept"
            )
        before, text = _locked(connection, experiment_id), storable(notes)
        new = NewEvent(EventKind.experiment_annotated, "notes changed" if text else "notes removed")
        return self._set(connection, before, new, actor, notes=text)

    @transaction
    def archive(
        self, connection: Connection, experiment_id: int, archived: bool = True, *, actor: Actor = LOCAL_ACTOR
    ) -> Experiment:
        """Archives an experiment, which lists then leave out unless asked, or takes it back."""
        before = _locked(connection, experiment_id)
        if archived == (before.archived_s is not None):
            return before  # It stays archived since when it was.
        kind = EventKind.experiment_archived if archived else EventKind.experiment_unarchived
        new = NewEvent(kind, kind.partition(".")[2])
        return self._set(connection, before, new, actor, archived_s=self.clock() if archived else None)

    def _set(
        self, connection: Connection, before: Experiment, new: NewEvent, actor: Actor, **fields: Any
    ) -> Experiment:
        """Sets fields of an experiment, unless they have these values already."""
        old, now = {name: getattr(before, name) for name in fields}, self.clock()
        if old == fields:
            return before
        connection.execute(statements.set_experiment(before.id, **_stored(fields)))
        announce(connection, before.id, [new], now, actor)
        note_change(connection, actor, str(new.kind), before.id, now, before=old, after=fields)
        return read_experiment(connection, before.id)


def cancel_experiment(connection: Connection, experiment_id: int, now: float, actor: Actor) -> Experiment:
    row = lock_experiment(connection, experiment_id)
    if row.state in _WAITING:
        leave_runs(connection, experiment_id, RunState.cancelled, now)
        connection.execute(
            statements.move_experiment(
                experiment_id,
                ExperimentState.cancelled,
                sources=_WAITING,
                cancel_requested_s=now,
                ended_s=now,
                lease_owner=None,
                lease_until_s=None,
            )
        )
        new = NewEvent(EventKind.experiment_cancelled, "cancelled")
    elif row.state not in TERMINAL_EXPERIMENT_STATES and row.cancel_requested_s is None:
        connection.execute(statements.set_experiment(experiment_id, cancel_requested_s=now))
        new = NewEvent(EventKind.experiment_cancel_requested, "cancellation requested")
    else:
        return read_experiment(connection, experiment_id)
    return _carried_out(connection, experiment_id, [new], now, actor, _standing(row))


def _locked(connection: Connection, experiment_id: int) -> Experiment:
    lock_experiment(connection, experiment_id)
    return read_experiment(connection, experiment_id)


def _of(connection: Connection, experiment_id: int, ids: Collection[int]) -> list[int]:
    """Locks an experiment; the ids in order, if all are of its runs."""
    lock_experiment(connection, experiment_id)
    own = select(_r.id).where(_r.experiment_id == experiment_id, _r.id.in_(sorted(set(ids))))
    missing = set(ids) - set(connection.execute(own).scalars())
    if missing:
        raise NotFound("run", min(missing))
    return sorted(set(ids))


def _retagged(what: str, tags: Collection[str], add: Collection[str], remove: Collection[str]) -> list[str]:
    for tag in add:
        if not _TAG.fullmatch(tag):
            wanted = "use up to 50 letters, digits and . _ : / -, no spaces"
            raise BadValue("tags", f"{tag[:60]!r} is not a tag; {wanted}")
    after = sorted({*tags, *add} - set(remove))
    if len(after) > MOST_TAGS:
        raise BadValue("tags", f"{what} would have {len(after)}; at most {MOST_TAGS}")
    return after


def _stored(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tags_text(value) if name == "tags" else value for name, value in fields.items()}


def _lock_ended(connection: Connection, experiment_id: int) -> sa.Row[Any]:
    row = lock_experiment(connection, experiment_id)
    if row.state not in TERMINAL_EXPERIMENT_STATES:
        raise Conflict(
            f"experiment {experiment_id} is {row.state}; only a finished experiment can be retried"
        )
    return row


def _check_queue_cap(connection: Connection, experiment_id: int, more: int) -> None:
    """Checks the limit of queued runs in the transaction that has queued some again."""
    experiment = read_experiment(connection, experiment_id)
    project, owner = experiment.project, experiment.owner
    most = ProjectLimits.model_validate(read_project(connection, project).settings).queued_runs_per_user
    if most is None or not more:
        return
    queued = count_queued_in_turn(connection, project, owner)
    problem = queue_cap_problem(project, owner, queued - more, more, most)
    if problem is not None:
        raise Conflict(problem.message)


def _standing(row: sa.Row[Any]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("state", "cancel_requested_s", "pause_requested_s")}


def _carried_out(
    connection: Connection,
    experiment_id: int,
    new: Sequence[NewEvent],
    now: float,
    actor: Actor,
    before: Mapping[str, Any],
) -> Experiment:
    """Stores the events of a request that was carried out, and what it changed for the audit log."""
    announce(connection, experiment_id, new, now, actor)
    experiment = read_experiment(connection, experiment_id)
    after = {name: getattr(experiment, name) for name in before}
    note_change(connection, actor, str(new[-1].kind), experiment_id, now, before=before, after=after)
    return experiment


def _carried_out_on_run(
    connection: Connection, before: Run, new: Sequence[NewEvent], now: float, actor: Actor
) -> Run:
    announce(connection, before.experiment_id, new, now, actor)
    after = read_run(connection, before.id)
    was, became = (
        {"state": run.state, "cancel_requested_s": run.cancel_requested_s} for run in (before, after)
    )
    note_change(connection, actor, str(new[0].kind), before.id, now, before=was, after=became)
    return after


def keep_summaries(run_ids: Collection[int]) -> sa.Update:
    """Leaves the summaries of runs at the attempts that they came from."""
    s = schema.run_summaries.c
    summary = select(s.summary).where(s.run_id == _a.run_id, s.attempt == _a.number)
    of_runs = update(schema.attempts).where(_a.run_id.in_(list(run_ids)), summary.exists())
    return of_runs.values(summary=summary.scalar_subquery())
