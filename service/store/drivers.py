"""What the driver of an experiment does to it.

Every write is fenced: it carries the experiment's attempt. A write that changes no row raises
`StaleAttempt` when another attempt is current (stop), or `Conflict` when the experiment has moved on under
the same attempt (look again).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, select, update

from service.db import schema, statements, writers
from service.db.errors import Conflict, StaleAttempt
from service.db.statements import ACTIVE_EXPERIMENT_STATES
from service.domain.access import EVERYTHING, Visibility
from service.domain.events import EventKind
from service.domain.records import Experiment, Placement
from service.domain.shares import DeviceAllowance, DeviceHolder, HeldDevices
from service.domain.states import (
    TERMINAL_EXPERIMENT_STATES,
    TERMINAL_RUN_STATES,
    UNFINISHED_RUN_STATES,
    ExperimentState,
    RunState,
)
from service.store.accounting import placements_of
from service.store.attempts import LONGEST_MESSAGE, failure_values, leave_runs
from service.store.base import (
    NewEvent,
    StorePart,
    announce,
    check_experiment_attempt,
    insert_events,
    lock_for_attempt,
    records,
    storable,
    transaction,
)
from service.store.process_metrics import count_in
from trainers.errors import FailureClass

_r, _x, _p, _a = schema.runs.c, schema.experiments.c, schema.placements.c, schema.attempts.c

_ATTEMPTS_LOST = "stillhouse_driver_attempts_lost_total"
_LEFT_OVER = {
    ExperimentState.succeeded: RunState.stopped,
    ExperimentState.incomplete: RunState.stopped,
    ExperimentState.failed: RunState.failed,
    ExperimentState.cancelled: RunState.cancelled,
    ExperimentState.paused: RunState.paused,
}
"""Where runs go that have not ended when their experiment does."""
_holds_lease = (
    _x.id == bindparam("experiment"),
    _x.attempt == bindparam("current"),
    _x.state.in_(sorted(ACTIVE_EXPERIMENT_STATES)),
    _x.lease_until_s.is_not(None),
)
RENEW_LEASE = (
    update(schema.experiments)
    .where(*_holds_lease)
    .values(lease_until_s=bindparam("until"), lease_s=bindparam("lease"), silent_since_s=None)
    .returning(_x.cancel_requested_s, _x.pause_requested_s)
)
"""The driver's heartbeat, unless its lease was withdrawn; answers what people asked for."""
_REQUESTS = select(_x.cancel_requested_s, _x.pause_requested_s).where(*_holds_lease)
"""What people asked for, read without renewing the lease."""
_ATTEMPTS_TO_CANCEL = select(_r.id, _r.attempt).where(
    _r.experiment_id == bindparam("experiment"),
    _r.cancel_requested_s.is_not(None),
    _r.state.not_in(sorted(TERMINAL_RUN_STATES)),
)
"""Attempts, as (run, number), at runs whose cancellation was asked for one by one."""
_ALLOWANCES_OF = select(schema.allowances).where(schema.allowances.c.experiment_id == bindparam("experiment"))
"""What one experiment may hold, by hardware."""


@dataclass(frozen=True, slots=True)
class Requests:
    """What people and the scheduler ask of a running experiment.

    `cancel_attempts` are to end one by one, as (run, number). Hardware without an allowance is not limited.
    """

    cancel: bool
    pause: bool
    cancel_attempts: frozenset[tuple[int, int]]
    allowances: Mapping[str, DeviceAllowance] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Held:
    """Devices of one kind that another experiment holds."""

    experiment_id: int
    hardware: str
    devices: float


class Drivers(StorePart):
    @transaction
    def started(self, connection: Connection, experiment_id: int, attempt: int, node: str, pid: int) -> None:
        """starting -> running. The same driver may repeat the call."""
        now = self.clock()
        row = lock_for_attempt(connection, experiment_id, attempt)
        if row.lease_until_s is None:
            raise StaleAttempt(
                f"experiment {experiment_id}: the lease of attempt {attempt} lapsed and was withdrawn; "
                "another attempt follows"
            )
        lease: dict[str, Any] = {
            "lease_owner": storable(f"{node}:{pid}"),
            "lease_until_s": self.database_time(connection) + self.settings.lease_s,
            "lease_s": self.settings.lease_s,
            "silent_since_s": None,
        }
        if row.state is ExperimentState.running:
            connection.execute(statements.set_experiment(experiment_id, **lease))
            return
        connection.execute(
            statements.move_experiment(
                experiment_id,
                ExperimentState.running,
                **lease,
                started_s=func.coalesce(schema.experiments.c.started_s, now),
            )
        )
        new = NewEvent(
            EventKind.experiment_started,
            f"driver started on {node}, process {pid}, attempt {attempt}",
            attempt=attempt,
            data={"node": node, "pid": pid},
        )
        announce(connection, experiment_id, [new], now)

    def carried_by(self, submission_id: str) -> list[Experiment]:
        """Returns the experiments whose driver runs, or is to be started, in one Ray job."""
        with self.database.read() as connection:
            return records(
                connection,
                Experiment,
                statements.EXPERIMENTS.where(schema.ACTIVE, _x.submission_id == submission_id),
            )

    @transaction
    def renew_lease(
        self, connection: Connection, experiment_id: int, attempt: int, lease_s: float
    ) -> Requests:
        """The driver's heartbeat: keeps the experiment, and returns what people asked for.

        Raises:
            StaleAttempt: the attempt is over, its lease was withdrawn, or the database takes no writers of
                this release; end now and write nothing.
        """
        renewed = {
            "experiment": experiment_id,
            "current": attempt,
            "until": self.database_time(connection) + lease_s,
            "lease": lease_s,
        }
        row = connection.execute(RENEW_LEASE, renewed).one_or_none()
        return _requests(connection, experiment_id, attempt, row)

    def requests(self, experiment_id: int, attempt: int) -> Requests:
        """What people asked of a running experiment, without writing anything."""
        with self.database.read() as connection:
            key = {"experiment": experiment_id, "current": attempt}
            row = connection.execute(_REQUESTS, key).one_or_none()
            return _requests(connection, experiment_id, attempt, row)

    @transaction
    def finish_experiment(
        self,
        connection: Connection,
        experiment_id: int,
        attempt: int,
        state: ExperimentState,
        *,
        failure: tuple[FailureClass, str] | None = None,
        all_ended: bool = False,
        on_request: bool = False,
    ) -> ExperimentState:
        """Ends an experiment's attempt, or pauses the experiment. Returns where it went.

        A cancellation that was requested beats a pause. Runs that have not ended go with it: to stopped (a
        budget was reached), failed, cancelled or paused. People may have retried runs or withdrawn the pause
        since the caller looked: `all_ended` refuses while a run has not ended, `on_request` refuses a pause
        whose request was withdrawn, both with `Conflict`: look again and carry on.
        """
        now = self.clock()
        row = lock_for_attempt(connection, experiment_id, attempt, 1)
        target = state
        if row.cancel_requested_s is not None and state is ExperimentState.paused:
            target = ExperimentState.cancelled
        unfinished_runs = (
            select(func.count())
            .select_from(schema.runs)
            .where(_r.experiment_id == experiment_id, _r.state.in_(sorted(UNFINISHED_RUN_STATES)))
        )
        if all_ended and (left := connection.execute(unfinished_runs).scalar()):
            raise Conflict(f"experiment {experiment_id} has {left} runs that have not ended")
        if on_request and target is ExperimentState.paused and row.pause_requested_s is None:
            raise Conflict(f"experiment {experiment_id}: the pause request was withdrawn")
        _end_experiment(connection, experiment_id, target, row, failure, now)
        message = str(target) if failure is None else f"{target}: {failure[0]}: {failure[1]}"
        new = NewEvent(EventKind.of_experiment(target), message[:LONGEST_MESSAGE], attempt=attempt)
        insert_events(connection, experiment_id, row.event_count, [new], now)
        if failure is not None:
            count_in(connection, now, _ATTEMPTS_LOST, failure_class=failure[0])
        return target

    @transaction
    def release_experiment(
        self,
        connection: Connection,
        experiment_id: int,
        attempt: int,
        *,
        delay_s: float,
        failure: tuple[FailureClass, str] | None = None,
        yielded: str | None = None,
    ) -> ExperimentState:
        """Gives the experiment back to the queue for another attempt, or cancels or pauses it as requested.

        Its runs stay as they are: the next driver resets those of this attempt.

        Args:
            delay_s: earliest next claim, from now.
            failure: shown with the experiment while it waits.
            yielded: who has the devices that it could use, in words: the attempt is over, but not lost.
        """
        now = self.clock()
        row = lock_for_attempt(connection, experiment_id, attempt, 1)
        if row.cancel_requested_s is not None:
            target = ExperimentState.cancelled
        elif row.pause_requested_s is not None:
            target = ExperimentState.paused
        else:
            target = ExperimentState.queued
        if target is ExperimentState.queued:
            connection.execute(
                statements.move_experiment(
                    experiment_id,
                    target,
                    sources=ACTIVE_EXPERIMENT_STATES,
                    not_before_s=self.database_time(connection) + delay_s,
                    lease_owner=None,
                    lease_until_s=None,
                    **failure_values(failure),
                )
            )
            kind = EventKind.experiment_released
            message = f"queued again, to start in {delay_s:g} s at the earliest"
            if yielded is not None:
                kind, message = (EventKind.experiment_yielded, f"queued until it may hold devices: {yielded}")
        else:
            _end_experiment(connection, experiment_id, target, row, failure, now)
            kind, message = EventKind.of_experiment(target), str(target)
        if failure is not None:
            message += f"; {failure[0]}: {failure[1]}"
            count_in(connection, now, _ATTEMPTS_LOST, failure_class=failure[0])
        new = NewEvent(kind, message[:LONGEST_MESSAGE], attempt=attempt)
        insert_events(connection, experiment_id, row.event_count, [new], now)
        return target

    @transaction
    def note(
        self,
        connection: Connection,
        experiment_id: int,
        attempt: int,
        message: str,
        *,
        kind: EventKind = EventKind.experiment_note,
        run_id: int | None = None,
    ) -> None:
        row = lock_for_attempt(connection, experiment_id, attempt, 1)
        new = NewEvent(kind, message[:LONGEST_MESSAGE], run_id=run_id, attempt=attempt)
        insert_events(connection, experiment_id, row.event_count, [new], self.clock())

    def record_placements(self, experiment_id: int, attempt: int, changed: Sequence[Placement]) -> None:
        """Stores placements that are new, became ready, were seen again or were released; may be repeated."""
        rows = [
            {**asdict(placement), "experiment_id": experiment_id, "experiment_attempt": attempt}
            for placement in changed
        ]

        def body(connection: Connection) -> None:
            lock_for_attempt(connection, experiment_id, attempt)
            connection.execute(
                statements.insert_or_replace(connection, schema.placements, ("experiment_id", "id")), rows
            )

        if rows:
            self.database.write(body)

    def set_waiting(self, experiment_id: int, attempt: int, reasons: Mapping[int, str | None]) -> None:
        """Stores what queued runs wait for, by run, and announces it; None = nothing any more."""
        now = self.clock()
        texts = {run_id: None if text is None else storable(text) for run_id, text in reasons.items()}
        new = [
            NewEvent(EventKind.run_waiting, f"waiting for {text}", run_id)
            for run_id, text in texts.items()
            if text is not None
        ]

        def body(connection: Connection) -> None:
            row = announce(connection, experiment_id, new, now)
            check_experiment_attempt(experiment_id, attempt, row)
            connection.execute(set_waiting(experiment_id, texts))

        if texts:
            self.database.write(body)

    def placements(self, experiment_id: int) -> list[Placement]:
        return self.read_records(Placement, placements_of(experiment_id))

    def held_devices(self, *, limit: int, visible: Visibility = EVERYTHING) -> list[HeldDevices]:
        """What is held now, oldest first; experiments that the reader does not see are without names."""
        active = (
            select(_r.experiment_id, _r.id.label("run_id"), _a.node, _a.placement)
            .join(schema.attempts, (_a.run_id == _r.id) & (_a.number == _r.attempt))
            .where(_r.state.in_(statements.ACTIVE_RUN_STATES))
            .subquery()
        )
        held_now = (
            select(
                _x.pool, _p.hardware, _p.devices, _p.workers, _p.placed_s, active.c.node,
                active.c.run_id, _x.id, _x.name, _x.owner, _x.project,
            )
            .join(schema.experiments, _x.id == _p.experiment_id)
            .outerjoin(active, (active.c.experiment_id == _p.experiment_id) & (active.c.placement == _p.id))
            .where(_p.released_s.is_(None))
            .order_by(_p.placed_s, _p.experiment_id, _p.id)
            .limit(limit)
        )  # fmt: skip
        held = []
        for pool, hardware, devices, workers, placed_s, node, run_id, *experiment in self.read(held_now):
            holder = DeviceHolder(*experiment)
            seen = (run_id, holder) if visible.includes(holder.project) else (None, None)
            held.append(HeldDevices(pool, hardware, devices, workers, placed_s, node, *seen))
        return held

    def held_by_others(self, experiment_id: int) -> list[Held]:
        held_by_others = (
            select(_p.experiment_id, _p.hardware, func.sum(_p.devices))
            .where(_p.released_s.is_(None), _p.experiment_id != experiment_id)
            .group_by(_p.experiment_id, _p.hardware)
            .order_by(_p.experiment_id, _p.hardware)
        )
        return [Held(*row) for row in self.read(held_by_others)]


def _requests(
    connection: Connection, experiment_id: int, attempt: int, row: sa.Row[*tuple[Any, ...]] | None
) -> Requests:
    if (refusal := writers.refusal(connection)) is not None:
        raise StaleAttempt(refusal)
    if row is None:
        raise StaleAttempt(f"attempt {attempt} at experiment {experiment_id} has ended")
    cancelled = connection.execute(_ATTEMPTS_TO_CANCEL, {"experiment": experiment_id})
    allowed = connection.execute(_ALLOWANCES_OF, {"experiment": experiment_id})
    return Requests(
        cancel=row.cancel_requested_s is not None,
        pause=row.pause_requested_s is not None,
        cancel_attempts=frozenset((row.id, row.attempt) for row in cancelled),
        allowances={
            row.hardware: DeviceAllowance(row.devices, row.preemptible, row.reason) for row in allowed
        },
    )


def _end_experiment(
    connection: Connection,
    experiment_id: int,
    target: ExperimentState,
    row: sa.Row[Any],
    failure: tuple[FailureClass, str] | None,
    now: float,
) -> None:
    """Moves the experiment and what is left of its runs; the caller holds the lock."""
    left = _LEFT_OVER[target]
    run_failure = (
        (failure or (FailureClass.lost, "the experiment failed")) if left is RunState.failed else None
    )
    leave_runs(connection, experiment_id, left, now, failure=run_failure)
    moved = connection.execute(
        statements.move_experiment(
            experiment_id,
            target,
            sources=ACTIVE_EXPERIMENT_STATES,
            ended_s=now if target in TERMINAL_EXPERIMENT_STATES else None,
            lease_owner=None,
            lease_until_s=None,
            **failure_values(failure),
        )
    )
    if not moved.rowcount:
        raise Conflict(f"experiment {experiment_id} is {row.state}; it cannot become {target}")


def set_waiting(experiment_id: int, reasons: Mapping[int, str | None]) -> sa.Update:
    return (
        update(schema.runs)
        .where(_r.experiment_id == experiment_id, _r.state == RunState.queued, _r.id.in_(list(reasons)))
        .values(waits_for=sa.case(dict(reasons), value=_r.id, else_=None))
    )
