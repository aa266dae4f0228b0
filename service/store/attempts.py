"""Attempts at the runs of an experiment: opened, reported and ended by its driver and its workers.

Every write is fenced: it carries the run's attempt, or the experiment's where the run's is new. A write that
changes no row raises `StaleAttempt` when another attempt is current (stop), or `Conflict` when the run has
moved on under the same attempt (look again).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, func, select, update

from service.db import schema, statements
from service.db.errors import Conflict, StaleAttempt
from service.db.statements import ACTIVE_RUN_STATES
from service.domain.events import EventKind
from service.domain.records import SUMMARY_FIELDS, Run
from service.domain.states import TERMINAL_RUN_STATES, UNFINISHED_RUN_STATES, RunState
from service.store.accounting import open_usage, settle_attempts
from service.store.base import (
    NewEvent,
    StorePart,
    announce,
    experiment_id_of,
    insert_events,
    lock_experiment,
    lock_for_attempt,
    lock_run,
    read_run,
    storable,
    transaction,
)
from service.store.process_metrics import count_failures, count_in
from trainers.errors import FAILURES_OF_MACHINES, FailureClass

_r, _a, _p = schema.runs.c, schema.attempts.c, schema.placements.c

LONGEST_MESSAGE = 4000  # Failure messages are cut to this many characters
_DRIVER_GONE = (FailureClass.lost, "the driver is gone")


class Attempts(StorePart):
    @transaction
    def open(
        self,
        connection: Connection,
        run_id: int,
        experiment_attempt: int,
        *,
        workers: int | None = None,
        placement: str | None = None,
        number: int | None = None,
    ) -> int:
        """queued -> starting under a new attempt of the run; returns its number.

        Args:
            workers: processes of this attempt; None = as many as the run had before.
            placement: id of the devices that it runs on; None = it never gets to run.
            number: of the new attempt, so that the call may be repeated when its answer was lost; None = the
                next.

        Raises:
            StaleAttempt: the experiment's attempt is over.
            Conflict: the run is not queued any more, or cancel or pause was requested.
        """
        now = self.clock()
        experiment_id = experiment_id_of(connection, run_id)
        row = lock_for_attempt(connection, experiment_id, experiment_attempt)
        if number is not None:
            newest = connection.execute(statements.open_attempt(run_id, number)).one_or_none()
            if newest is not None and newest.experiment_attempt == experiment_attempt:
                return number
        if row.cancel_requested_s is not None or row.pause_requested_s is not None:
            request = "cancel" if row.cancel_requested_s is not None else "pause"
            raise Conflict(
                f"experiment {experiment_id} has a {request} request; no further attempts are opened"
            )
        run = read_run(connection, run_id)
        following, had, has = run.attempt + 1, run.workers, workers or run.workers
        if number not in (None, following):
            raise Conflict(f"run {run_id}: the next attempt is {following}, not {number}")
        moved = connection.execute(
            statements.move_run(
                run_id,
                RunState.starting,
                attempt=run.attempt,
                sources={RunState.queued},
                **failure_values(None),
                phase="preparing",
                waits_for=None,
                **({} if has == had else _resized(had, has)),
            )
            .where(schema.runs.c.cancel_requested_s.is_(None))
            .values(attempt=following)
        )
        if not moved.rowcount:
            raise Conflict(f"run {run_id} is {run.state}; only a queued run can start")
        _insert_attempt(
            connection,
            now,
            run_id=run_id,
            number=following,
            experiment_attempt=experiment_attempt,
            state=RunState.starting,
            workers=has,
            placement=placement,
        )
        with_workers = "" if has == had else f" with {has} worker{'' if has == 1 else 's'}, previously {had}"
        message = f"attempt {following} started{with_workers}"
        new = NewEvent(EventKind.run_starting, message, run_id, following)
        announce(connection, experiment_id, [new], now)
        return following

    @transaction
    def refuse_run(
        self, connection: Connection, run_id: int, experiment_attempt: int, failure: tuple[FailureClass, str]
    ) -> None:
        """queued -> failed, under an attempt that never ran: nothing could train the run."""
        now = self.clock()
        experiment_id = experiment_id_of(connection, run_id)
        row = lock_for_attempt(connection, experiment_id, experiment_attempt, 1)
        run = read_run(connection, run_id)
        number = run.attempt + 1
        moved = connection.execute(
            statements.move_run(
                run_id,
                RunState.failed,
                attempt=run.attempt,
                sources={RunState.queued},
                ended_s=now,
                phase=None,
                waits_for=None,
                **failure_values(failure),
                **_failure_counter(failure[0]),
            ).values(attempt=number)
        )
        if not moved.rowcount:
            raise Conflict(f"run {run_id} is {run.state}; only a queued run can be refused")
        _insert_attempt(
            connection,
            now,
            run_id=run_id,
            number=number,
            experiment_attempt=experiment_attempt,
            state=RunState.failed,
            ended_s=now,
            workers=run.workers,
            **failure_values(failure),
        )
        connection.execute(settle_attempts(experiment_id, [(run_id, number)]))
        new = _end_event(run_id, number, RunState.failed, RunState.failed, failure, None)
        insert_events(connection, experiment_id, row.event_count, [new], now)
        count_failures(connection, now, failure[0], retried=False)

    @transaction
    def run_started(
        self,
        connection: Connection,
        run_id: int,
        attempt: int,
        *,
        total_steps: int,
        resumed_from_step: int,
        facts: Mapping[str, Any],
    ) -> None:
        """starting -> running, with the worker's own findings.

        Args:
            total_steps: optimizer updates of the whole run.
            resumed_from_step: points of older attempts beyond it are hidden from now on.
            facts: reproducibility; JSON values.
        """
        now = self.clock()
        experiment_id = experiment_id_of(connection, run_id)
        row = lock_experiment(connection, experiment_id, 1)
        moved = connection.execute(
            statements.move_run(
                run_id,
                RunState.running,
                attempt=attempt,
                total_steps=total_steps,
                step=resumed_from_step,
                started_s=func.coalesce(schema.runs.c.started_s, now),
                # Asked for as `auto`, or not to be had here: the column says what really runs. A run that
                # takes no step has no optimizer.
                implementation=facts.get("optimizer_implementation") or schema.runs.c.implementation,
                global_batch_size=facts.get("global_size") or schema.runs.c.global_batch_size,
            )
        )
        if not moved.rowcount:
            raise _refused_run(connection, run_id, attempt)
        connection.execute(
            update(schema.attempts)
            .where(_a.run_id == run_id, _a.number == attempt)
            .values(
                state=RunState.running,
                resumed_from_step=resumed_from_step,
                last_step=resumed_from_step,
                resumed_from_s=facts.get("resumed_from_s"),
                seen_s=now,
                node=facts.get("worker_node"),
                pid=facts.get("worker_pid"),
                facts=dict(facts),
            )
        )
        resumed = f"resumed from step {resumed_from_step}" if resumed_from_step else "from the beginning"
        message = f"attempt {attempt}, {total_steps} steps, {resumed}"
        data = {"total_steps": total_steps, "resumed_from_step": resumed_from_step}
        new = NewEvent(EventKind.run_started, message, run_id, attempt, data)
        insert_events(connection, experiment_id, row.event_count, [new], now)

    @transaction
    def finish_run(
        self,
        connection: Connection,
        run_id: int,
        attempt: int,
        state: RunState,
        *,
        summary: Mapping[str, float | int | str | None] | None = None,
        failure: tuple[FailureClass, str] | None = None,
        retry_delay_s: float | None = None,
    ) -> RunState:
        """Ends an attempt: the one transition out of starting and running. Returns where the run went.

        A cancellation that was requested beats retry and pause. A run that stopped for a request that was
        withdrawn meanwhile is queued again, with its checkpoint.

        Args:
            state: succeeded, stopped, cancelled, paused or failed; with `retry_delay_s`, failed.
            failure: class and one line, for failed.
            retry_delay_s: queue the run again after this delay instead of failing it for good.
        """
        now = self.clock()
        row, run = lock_run(connection, run_id, 1)
        target = _destination(RunState.queued if retry_delay_s is not None else state, row, run)
        ended = target in TERMINAL_RUN_STATES
        # NaN becomes NULL: the columns are typed.
        figures = {name: None if value != value else value for name, value in (summary or {}).items()}
        values: dict[str, Any] = {
            "phase": None,
            "ended_s": now if ended else None,
            "not_before_s": 0.0,
            **failure_values(failure if target is not RunState.succeeded else None),
            **(_failure_counter(failure[0]) if failure else {}),
            **{name: figures[name] for name in SUMMARY_FIELDS if name in figures},
        }
        if target is RunState.queued:
            values["not_before_s"] = self.database_time(connection) + (retry_delay_s or 0.0)
        moved = connection.execute(
            statements.move_run(run_id, target, attempt=attempt, sources=ACTIVE_RUN_STATES, **values)
        )
        if not moved.rowcount:
            raise _refused_run(connection, run_id, attempt)
        own_end = state if retry_delay_s is None else RunState.failed
        connection.execute(
            statements.end_attempt(run_id, attempt, own_end, ended_s=now, **failure_values(failure))
        )
        connection.execute(settle_attempts(run.experiment_id, [(run_id, attempt)]))
        if summary:
            connection.execute(
                statements.insert_or_replace(connection, schema.run_summaries, ("run_id",)),
                {"run_id": run_id, "attempt": attempt, "summary": dict(summary)},
            )
        reached = connection.execute(
            select(_a.last_step).where(_a.run_id == run_id, _a.number == attempt)
        ).scalar_one()
        lost = max(0, reached - (run.checkpoint_step or 0))
        new = _end_event(run_id, attempt, own_end, target, failure, retry_delay_s, lost)
        insert_events(connection, run.experiment_id, row.event_count, [new], now)
        if new.kind is EventKind.run_preempted:
            count_in(connection, now, "stillhouse_preemptions_total", project=row.project)
        elif failure is not None:
            count_failures(connection, now, failure[0], retried=target is RunState.queued)
        return target

    @transaction
    def reset_runs_of_dead_attempt(
        self, connection: Connection, experiment_id: int, attempt: int
    ) -> list[int]:
        """Queues runs that an older attempt at the experiment left starting or running; returns their ids.

        Called by the next driver at its start. A run whose cancellation was requested is cancelled instead.
        """
        lock_for_attempt(connection, experiment_id, attempt)
        connection.execute(close_placements(experiment_id, before_attempt=attempt))
        connection.execute(clear_waiting(experiment_id))
        left = [run for run in _active(connection, experiment_id) if run.experiment_attempt < attempt]
        why = "the driver and its lease are gone"
        return _queue_lost(connection, experiment_id, left, why, self.clock())

    @transaction
    def reset_runs_without_worker(
        self, connection: Connection, experiment_id: int, attempt: int, alive: Collection[int]
    ) -> list[int]:
        """Queues the runs again that have an open attempt of this driver which no worker carries out.

        The answer of a transaction can be lost with the connection: the attempt is then open, and the driver
        does not know. A run whose cancellation was requested is cancelled instead. `alive` are the runs whose
        attempts the driver knows of.
        """
        lock_for_attempt(connection, experiment_id, attempt)
        left = [run for run in _active(connection, experiment_id) if run.id not in alive]
        why = "the attempt was opened, but no worker has it"
        return _queue_lost(connection, experiment_id, left, why, self.clock())


def _insert_attempt(connection: Connection, now: float, *, run_id: int, number: int, **values: Any) -> None:
    key = {"run_id": run_id, "number": number}
    connection.execute(sa.insert(schema.attempts).values(**key, started_s=now, last_step=0, **values))
    usage = open_usage(run_id, number, placement=values.get("placement"), started_s=now)
    connection.execute(usage)


def _active(connection: Connection, experiment_id: int) -> Sequence[Any]:
    active_attempts = (
        select(_r.id, _r.attempt, _r.cancel_requested_s, _a.experiment_attempt)
        .join(schema.attempts, (_a.run_id == _r.id) & (_a.number == _r.attempt))
        .where(_r.experiment_id == experiment_id, _r.state.in_(sorted(statements.ACTIVE_RUN_STATES)))
        .order_by(_r.id)
    )
    return connection.execute(active_attempts).all()


def _queue_lost(
    connection: Connection, experiment_id: int, lost: Sequence[sa.Row[Any]], why: str, now: float
) -> list[int]:
    failure = (FailureClass.lost, why)
    for run in lost:
        target = RunState.queued if run.cancel_requested_s is None else RunState.cancelled
        connection.execute(
            statements.move_run(
                run.id,
                target,
                attempt=run.attempt,
                sources=ACTIVE_RUN_STATES,
                phase=None,
                not_before_s=0.0,
                ended_s=None if target is RunState.queued else now,
                **failure_values(failure),
                **_failure_counter(failure[0]),
            )
        )
        connection.execute(
            statements.end_attempt(
                run.id, run.attempt, RunState.failed, ended_s=now, **failure_values(failure)
            )
        )
    if lost:
        connection.execute(settle_attempts(experiment_id))
        new = [NewEvent(EventKind.run_lost, why, run.id, run.attempt) for run in lost]
        announce(connection, experiment_id, new, now)
        count_failures(connection, now, failure[0], retried=True, by=float(len(lost)))
    return [run.id for run in lost]


def _destination(wanted: RunState, row: sa.Row[Any], run: Run) -> RunState:
    """Where a run goes, given what people have requested by now."""
    cancelled = row.cancel_requested_s is not None or run.cancel_requested_s is not None
    if wanted in (RunState.queued, RunState.paused, RunState.cancelled) and cancelled:
        return RunState.cancelled
    # The worker was asked to stop before people thought better of it.
    withdrawn = wanted is RunState.cancelled or (wanted is RunState.paused and row.pause_requested_s is None)
    return RunState.queued if withdrawn else wanted


def _refused_run(connection: Connection, run_id: int, attempt: int) -> StaleAttempt | Conflict:
    run = read_run(connection, run_id)
    if run.attempt != attempt:
        return StaleAttempt(f"run {run_id}: attempt {attempt} has ended; the current one is {run.attempt}")
    if run.state is RunState.queued:
        return StaleAttempt(f"run {run_id}: attempt {attempt} has ended; the run is waiting for the next")
    return Conflict(f"run {run_id} is already {run.state}")


def _resized(had: int, has: int) -> dict[str, Any]:
    """Columns of a run that follow the number of workers of its newest attempt."""
    columns = schema.runs.c
    return {
        "workers": has,
        "devices": columns.devices / had * has,
        "price_usd_per_hour": columns.price_usd_per_hour / had * has,
        "power_w": columns.power_w / had * has,
    }


def _end_event(
    run_id: int,
    attempt: int,
    own_end: RunState,
    target: RunState,
    failure: tuple[FailureClass, str] | None,
    retry_delay_s: float | None,
    lost_steps: int = 0,
) -> NewEvent:
    why = "" if failure is None else f": {failure[0]}: {failure[1]}"
    if target is RunState.queued and retry_delay_s is None:
        message = f"attempt {attempt} {own_end}, but the request was withdrawn; queued again"
        return NewEvent(EventKind.run_resumed, message, run_id, attempt)
    if target is RunState.queued:
        if failure is not None and failure[0] is FailureClass.preempted:
            message = f"attempt {attempt} gave its devices back: {failure[1]}; queued again"
            kind = EventKind.run_preempted
        else:
            kind = EventKind.run_retrying
            message = f"attempt {attempt} failed{why}; retrying in {retry_delay_s or 0:g} s"
        return NewEvent(kind, message[:LONGEST_MESSAGE], run_id, attempt, {"lost_steps": lost_steps})
    data = None if failure is None else {"failure_class": str(failure[0])}
    return NewEvent(EventKind.of_run(target), f"{target}{why}"[:LONGEST_MESSAGE], run_id, attempt, data)


def _failure_counter(failure: FailureClass) -> dict[str, Any]:
    """Returns the counter that a failure raises; preemption raises none."""
    if failure is FailureClass.preempted:
        return {}
    if failure in FAILURES_OF_MACHINES:
        return {"infrastructure_failures": _r.infrastructure_failures + 1}
    return {"own_failures": _r.own_failures + 1}


def leave_runs(
    connection: Connection,
    experiment_id: int,
    state: RunState,
    now: float,
    *,
    failure: tuple[FailureClass, str] | None = None,
) -> None:
    """Moves every run that has not ended to `state`, and closes what a driver left open.

    Comes before the move of the experiment itself: the database refuses to end an experiment with a run that
    has not ended. The caller holds the experiment's lock.
    """
    # An attempt that is still open has not reported its end: it went with its driver.
    connection.execute(
        statements.end_open_attempts(
            experiment_id, state, ended_s=now, **failure_values(failure or _DRIVER_GONE)
        )
    )
    connection.execute(settle_attempts(experiment_id))
    connection.execute(
        statements.move_runs(
            experiment_id,
            state,
            sources=UNFINISHED_RUN_STATES,
            ended_s=now if state in TERMINAL_RUN_STATES else None,
            phase=None,
            waits_for=None,
            **failure_values(failure),
        )
    )
    connection.execute(close_placements(experiment_id))


def failure_values(failure: tuple[FailureClass, str] | None) -> dict[str, Any]:
    if failure is None:
        return {"failure_class": None, "failure_message": None}
    return {"failure_class": failure[0], "failure_message": storable(failure[1])[:LONGEST_MESSAGE]}


def close_placements(experiment_id: int, *, before_attempt: int | None = None) -> sa.Update:
    """Ends open placements when they were last seen: their driver is gone; None = of all its attempts."""
    statement = update(schema.placements).where(_p.experiment_id == experiment_id, _p.released_s.is_(None))
    if before_attempt is not None:
        statement = statement.where(_p.experiment_attempt < before_attempt)
    return statement.values(released_s=_p.seen_s)


def clear_waiting(experiment_id: int) -> sa.Update:
    return (
        update(schema.runs)
        .where(_r.experiment_id == experiment_id, _r.waits_for.is_not(None))
        .values(waits_for=None)
    )
