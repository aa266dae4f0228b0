"""What becomes of an experiment's runs when no driver holds it any more."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

from service.db import placement_statements, statements, usage_statements
from service.domain.states import TERMINAL_RUN_STATES, UNFINISHED_RUN_STATES, RunState
from service.store.base import storable
from trainers.errors import FailureClass

LONGEST_MESSAGE = 4000
"""Failure messages are cut to this many characters."""

_DRIVER_GONE = (FailureClass.lost, "the driver is gone")


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
    connection.execute(usage_statements.settle_open_attempts(experiment_id))
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
    connection.execute(placement_statements.close_placements(experiment_id))


def failure_values(failure: tuple[FailureClass, str] | None) -> dict[str, Any]:
    if failure is None:
        return {"failure_class": None, "failure_message": None}
    return {"failure_class": failure[0], "failure_message": storable(failure[1])[:LONGEST_MESSAGE]}
