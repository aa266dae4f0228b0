"""Fences: each clause of each guarded UPDATE refuses alone, and every write of a former attempt is refused.

A world holds one row of each table, in which all guarded statements work. Each way to miss differs from it in
one thing, which one clause alone notices: with the clause nothing changes, without it something does.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection, Update

import service.db
import service.store
from service.db import queue_statements as queueing
from service.db import schema, statements
from service.domain.access import Scope, UserKind
from service.domain.notifications import DeliveryState
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.store import (
    Conflict,
    StaleAttempt,
    Store,
    accounting,
    attempts,
    drivers,
    notifications,
    recording,
)
from service.store import removal as removing
from service.store.base import StorePart
from service.store.recording import AliveRow, RecordBatch
from tests.conformance.building import Submit, plans_of, started
from tests.conformance.test_transitions import Running
from tests.execution.conftest import placement
from trainers.errors import FailureClass

NOW_S = 1000.0
LEASE_S = 30.0


@dataclass(frozen=True)
class Miss:
    """A world in which a statement must change nothing.

    Attributes:
        clause: position of the clause that notices.
        row: columns of the statement's row that differ.
        asked: arguments, or bound parameters, that differ.
    """

    clause: int
    row: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fence:
    """A guarded UPDATE: a constant or a function, with what it is asked and where it changes a row."""

    module: Any
    name: str
    asked: Mapping[str, Any]
    row: Mapping[str, Any]
    misses: tuple[Miss, ...]

    def build(self, **differing: Any) -> tuple[Update, dict[str, Any]]:
        found, asked = getattr(self.module, self.name), {**self.asked, **differing}
        return (found(**asked), {}) if callable(found) else (found, asked)


ID, RUN = 1, 1
"""Of the only experiment and its only run; there is no other, so that 2 is someone else's."""
RUNNING, STARTING, QUEUED, PAUSED = (
    ExperimentState.running, ExperimentState.starting, ExperimentState.queued, ExperimentState.paused,
)  # fmt: skip
LAPSED = {"state": RUNNING, "attempt": 1, "lease_s": LEASE_S, "lease_until_s": NOW_S - 0.5}
NOT_LAPSED = ({"lease_until_s": NOW_S}, {"lease_until_s": NOW_S + 2 * LEASE_S}, {"lease_until_s": None})
ENDED = {"state": ExperimentState.succeeded, "ended_s": 5.0}
DELETED = {**ENDED, "deleted_s": 6.0, "remove_after_s": NOW_S}

FENCES = [
    Fence(statements, "ADVANCE_EVENTS", {"experiment": ID, "count": 1}, {}, (
        Miss(0, asked={"experiment": 2}), Miss(1, {"deleted_s": 1.0}),
    )),
    Fence(
        statements, "move_experiment",
        {"id": ID, "target": ExperimentState.succeeded, "sources": {RUNNING, QUEUED}}, {"state": RUNNING},
        (
            Miss(0, asked={"id": 2}), Miss(1, {"state": ExperimentState.failed}), Miss(1, {"state": QUEUED}),
            Miss(1, asked={"sources": {STARTING}}),
        ),
    ),
    Fence(
        drivers, "RENEW_LEASE",
        {"experiment": ID, "current": 1, "until": 9.0, "lease": 9.0}, {**LAPSED, "lease_until_s": 5.0},
        (
            Miss(0, asked={"experiment": 2}), Miss(1, {"attempt": 2}), Miss(1, asked={"current": 2}),
            Miss(2, {"state": QUEUED}), Miss(2, {"state": PAUSED}), Miss(3, {"lease_until_s": None}),
        ),
    ),
    Fence(
        statements, "adopt_lapsed",
        {"id": ID, "attempt": 1, "owner": "s", "now": NOW_S, "lease_s": LEASE_S, "driver_is_silent": True},
        LAPSED,
        (
            Miss(0, asked={"id": 2}), Miss(1, {"attempt": 2}), Miss(1, asked={"attempt": 2}),
            Miss(2, {"state": QUEUED}), *(Miss(3, row) for row in NOT_LAPSED),
        ),
    ),
    Fence(
        statements, "withdraw_lapsed",
        {"id": ID, "attempt": 1, "now": NOW_S}, {**LAPSED, "silent_since_s": 1.0},
        (
            Miss(0, asked={"id": 2}), Miss(1, {"attempt": 2}), Miss(2, {"state": QUEUED}),
            Miss(3, {"silent_since_s": None}), *(Miss(4, row) for row in NOT_LAPSED),
        ),
    ),
    Fence(
        statements, "move_run",
        {
            "id": RUN, "target": RunState.succeeded, "attempt": 1,
            "sources": {RunState.running, RunState.queued},
        },
        {"state": RunState.running, "attempt": 1},
        (
            Miss(0, asked={"id": 2}), Miss(1, {"state": RunState.stopped}),
            Miss(1, {"state": RunState.queued}), Miss(1, asked={"sources": {RunState.starting}}),
            Miss(2, {"attempt": 2}), Miss(2, asked={"attempt": 0}),
        ),
    ),
    Fence(
        statements, "move_runs",
        {
            "experiment_id": ID, "target": RunState.cancelled,
            "sources": {RunState.running, RunState.succeeded},
        },
        {"state": RunState.running},
        (
            Miss(0, asked={"experiment_id": 2}), Miss(1, {"state": RunState.succeeded}),
            Miss(1, {"state": RunState.queued}),
        ),
    ),
    Fence(
        statements, "end_attempt",
        {"run_id": RUN, "number": 1, "state": RunState.failed, "ended_s": 9.0}, {"ended_s": None},
        (Miss(0, asked={"run_id": 2}), Miss(1, asked={"number": 2}), Miss(2, {"ended_s": 5.0})),
    ),
    Fence(
        statements, "end_open_attempts",
        {"experiment_id": ID, "state": RunState.failed, "ended_s": 9.0}, {"ended_s": None},
        (Miss(0, asked={"experiment_id": 2}), Miss(1, {"ended_s": 5.0})),
    ),
    Fence(
        queueing, "CLAIM",
        {"ids": [ID], "scheduler": "s", "until": 9.0, "lease": 9.0, "job": None}, {"state": QUEUED},
        (Miss(0, asked={"ids": [2]}), Miss(0, {"state": PAUSED}), Miss(0, {"state": RUNNING})),
    ),
    Fence(
        recording, "SET_PROGRESS",
        {"run": RUN, "current": 1, "at_step": 1, "of_steps": 2, "in_phase": "training"},
        {"state": RunState.running, "attempt": 1},
        (
            Miss(0, asked={"run": 2}), Miss(1, {"attempt": 2}), Miss(1, asked={"current": 0}),
            Miss(2, {"state": RunState.succeeded}), Miss(2, {"state": RunState.queued}),
        ),
    ),
    Fence(
        recording, "SET_LAST_STEP", {"run": RUN, "current": 1, "at_step": 5}, {"last_step": 4},
        (Miss(0, asked={"run": 2}), Miss(1, asked={"current": 2}), Miss(2, {"last_step": 5})),
    ),
    Fence(
        recording, "SET_SEEN", {"run": RUN, "current": 1, "at": 5.0}, {"seen_s": 4.0},
        (Miss(0, asked={"run": 2}), Miss(1, asked={"current": 2}), Miss(2, {"seen_s": 5.0})),
    ),
    Fence(
        recording, "SET_CHECKPOINT", {"run": RUN, "current": 1, "at_step": 5, "path": "p"},
        {"attempt": 1, "checkpoint_step": 5},
        (
            Miss(0, asked={"run": 2}), Miss(1, {"attempt": 2}), Miss(1, asked={"current": 0}),
            Miss(2, {"checkpoint_step": 6}),
        ),
    ),
    Fence(
        attempts, "close_placements", {"experiment_id": ID, "before_attempt": 2},
        {"experiment_attempt": 1, "released_s": None},
        (
            Miss(0, asked={"experiment_id": 2}), Miss(1, {"released_s": 5.0}),
            Miss(2, {"experiment_attempt": 2}),
        ),
    ),
    Fence(
        attempts, "clear_waiting", {"experiment_id": ID}, {"waits_for": "1 CPU"},
        (Miss(0, asked={"experiment_id": 2}), Miss(1, {"waits_for": None})),
    ),
    Fence(
        drivers, "set_waiting", {"experiment_id": ID, "reasons": {RUN: "1 CPU"}}, {"state": RunState.queued},
        (
            Miss(0, asked={"experiment_id": 2}), Miss(1, {"state": RunState.running}),
            Miss(2, asked={"reasons": {2: "1 CPU"}}),
        ),
    ),
    Fence(
        accounting, "settle_attempts", {"experiment_id": ID, "attempts": [(RUN, 1)]}, {},
        (
            Miss(0, asked={"experiment_id": 2}), Miss(1, asked={"attempts": [(RUN, 2)]}),
            Miss(1, asked={"attempts": [(2, 1)]}),
        ),
    ),
    Fence(
        accounting, "settle_attempts", {"experiment_id": ID}, {"until_s": None},
        (Miss(0, asked={"experiment_id": 2}), Miss(1, {"until_s": 5.0})),
    ),
    Fence(
        recording, "ADD_MEASURED",
        {"experiment": ID, "run": RUN, "current": 1, "covered": 1.0, "energy": 1.0, "overhead": 1.0}, {},
        (Miss(0, asked={"experiment": 2}), Miss(1, asked={"run": 2}), Miss(2, asked={"current": 2})),
    ),
    Fence(
        removing, "mark_deleted", {"experiment_id": ID, "at_s": 6.0, "remove_after_s": 9.0}, ENDED,
        (Miss(0, asked={"experiment_id": 2}), Miss(1, {"state": RUNNING}), Miss(1, {"state": PAUSED})),
    ),
    Fence(
        removing, "begin_removal", {"experiment_id": ID, "now": NOW_S}, DELETED,
        (
            Miss(0, asked={"experiment_id": 2}), Miss(1, {"deleted_s": None}),
            Miss(2, {"remove_after_s": NOW_S + 0.5}),
        ),
    ),
    Fence(
        removing, "restore", {"experiment_id": ID, "now": NOW_S - 0.5}, DELETED,
        (
            Miss(0, asked={"experiment_id": 2}), Miss(1, {"deleted_s": None}),
            Miss(2, {"remove_after_s": NOW_S - 0.5}), Miss(2, {"remove_after_s": None}),
        ),
    ),
    Fence(
        removing, "note_pruned", {"experiment_id": ID, "ended_s": 5.0, "at_s": 9.0, "keep_every": 2}, ENDED,
        (Miss(0, asked={"experiment_id": 2}), Miss(1, {"ended_s": None}), Miss(1, {"ended_s": 6.0})),
    ),
    Fence(
        notifications, "take", {"ids": [1], "until_s": 9.0}, {"state": DeliveryState.pending},
        (Miss(0, asked={"ids": [2]}), Miss(1, {"state": DeliveryState.delivered})),
    ),
    Fence(
        notifications, "end_attempt", {"delivery_id": 1, "attempt": 1, "answer": "200"},
        {"state": DeliveryState.pending, "attempts": 1},
        (
            Miss(0, asked={"delivery_id": 2}), Miss(1, {"attempts": 2}),
            Miss(2, {"state": DeliveryState.delivered}),
        ),
    ),
    Fence(
        notifications, "pause", {"id": 1, "because": None, "disabled_s": 9.0}, {"disabled_because": None},
        (Miss(0, asked={"id": 2}), Miss(1, {"disabled_because": "revoked"})),
    ),
    Fence(
        notifications, "disable_subscriptions_of", {"token_id": 1, "now": 9.0, "because": "revoked"},
        {"token_id": 1, "disabled_s": None},
        (Miss(0, {"token_id": None}), Miss(0, asked={"token_id": 2}), Miss(1, {"disabled_s": 5.0})),
    ),
]  # fmt: skip

ADDRESSED = {"set_experiment", "set_run", "_claim"}
"""Updates that only say which row they are for: their callers hold the experiment's lock."""


@pytest.fixture(scope="module")
def world(lasting_store: Store) -> Store:
    """A store with one row in each table that a fence stands before, for tests that change nothing in it."""
    fill(lasting_store)
    return lasting_store


def fill(store: Store) -> None:
    experiment, (run,) = started(store, 1)
    store.attempts.open(run.id, experiment.attempt)
    store.attempts.run_started(run.id, 1, total_steps=100, resumed_from_step=0, facts={})
    store.drivers.record_placements(experiment.id, 1, [placement("g", placed_s=1.0)])
    assert (experiment.id, run.id) == (ID, RUN)
    subscription = {
        "id": 1, "owner": "ada", "topics": "failed", "channel": "webhook", "target": "http://127.0.0.1",
        "created_s": 1.0,
    }  # fmt: skip
    delivery = {
        "id": 1, "subscription_id": 1, "message_id": "m", "body": "{}", "state": DeliveryState.pending,
        "attempts": 1, "next_s": 1.0, "created_s": 1.0,
    }  # fmt: skip

    user = {"name": "ada", "kind": UserKind.person, "administrator": False, "created_s": 1.0}
    token = {
        "id": 1, "user": "ada", "name": "ci", "scope": Scope.read, "prefix": "sth_", "sha256": "0" * 64,
        "created_s": 1.0,
    }  # fmt: skip

    def body(connection: Connection) -> None:
        connection.execute(sa.insert(schema.users).values(user))
        connection.execute(sa.insert(schema.tokens).values(token))
        connection.execute(sa.insert(schema.subscriptions).values(subscription))
        connection.execute(sa.insert(schema.deliveries).values(delivery))

    store.database.write(body)


class Undone(Exception):
    """Rolls a trial back."""


def clauses(statement: Update) -> list[sa.ColumnElement[Any]]:
    return list(statement._where_criteria)


def changed_rows(store: Store, fence: Fence, miss: Miss | None = None, *, without: int | None = None) -> int:
    """Returns how many rows a statement changes in a world, as a whole or without one of its clauses."""
    statement, bound = fence.build(**(miss.asked if miss else {}))
    if without is not None:
        statement = statement._generate()
        kept = [clause for place, clause in enumerate(clauses(statement)) if place != without]
        statement._where_criteria = tuple(kept)
    found: list[int] = []

    def body(connection: Connection) -> None:
        if (
            statement.table is schema.experiments
        ):  # A trigger keeps an experiment from ending before its runs.
            connection.execute(sa.update(schema.runs).values(state=RunState.succeeded))
        if world := {**fence.row, **(miss.row if miss else {})}:
            connection.execute(sa.update(statement.table).values(world))
        left = statement.compile(dialect=connection.dialect).params
        result = connection.execute(statement, {name: bound[name] for name in bound if name in left})
        found.append(len(result.all()) if result.returns_rows else result.rowcount)
        raise Undone

    with pytest.raises(Undone):
        store.database.write(body)
    return found[0]


def written(store: Store, statement: Update, world: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a statement makes of the only row of its table."""
    found: list[dict[str, Any]] = []

    def body(connection: Connection) -> None:
        if statement.table is schema.experiments:
            connection.execute(sa.update(schema.runs).values(state=RunState.succeeded))
        connection.execute(sa.update(statement.table).values(world))
        connection.execute(statement)
        found.append(dict(connection.execute(sa.select(statement.table)).mappings().one()))
        raise Undone

    with pytest.raises(Undone):
        store.database.write(body)
    return found[0]


ADOPTED = {"lease_owner": "t", "lease_until_s": NOW_S + 9.0, "lease_s": 9.0}
RELEASED = {"experiment_attempt": 1, "released_s": None, "seen_s": 4.0}


def adopting(*, silent: bool) -> Update:
    return statements.adopt_lapsed(ID, 1, "t", now=NOW_S, lease_s=9.0, driver_is_silent=silent)


@pytest.mark.parametrize(
    ("statement", "row", "after"),
    [
        (
            lambda: adopting(silent=False),
            {**LAPSED, "silent_since_s": 3.0}, {**ADOPTED, "silent_since_s": None},
        ),
        (
            lambda: adopting(silent=True),
            {**LAPSED, "silent_since_s": 3.0}, {**ADOPTED, "silent_since_s": 3.0},
        ),
        (
            lambda: adopting(silent=True),
            {**LAPSED, "silent_since_s": None}, {**ADOPTED, "silent_since_s": NOW_S},
        ),
        (
            lambda: adopting(silent=True),  # The clock of whoever set it was ahead.
            {**LAPSED, "lease_until_s": NOW_S + 2 * LEASE_S + 0.5}, ADOPTED,
        ),
        (
            lambda: statements.withdraw_lapsed(ID, 1, now=NOW_S),
            {**LAPSED, "lease_owner": "s", "silent_since_s": 1.0},
            {"lease_owner": None, "lease_until_s": None, "lease_s": None, "state": RUNNING},
        ),
        (
            lambda: statements.move_run(RUN, RunState.running, attempt=1, total_steps=7),
            {"state": RunState.starting, "attempt": 1}, {"state": RunState.running, "total_steps": 7},
        ),
        (
            lambda: statements.move_runs(ID, RunState.cancelled, sources={RunState.queued}, ended_s=9.0),
            {"state": RunState.queued}, {"state": RunState.cancelled, "ended_s": 9.0},
        ),
        (
            lambda: statements.end_attempt(RUN, 1, RunState.failed, ended_s=9.0), {"ended_s": None},
            {"state": RunState.failed, "ended_s": 9.0},
        ),
        (
            lambda: statements.end_open_attempts(ID, RunState.failed, ended_s=9.0), {"ended_s": None},
            {"state": RunState.failed, "ended_s": 9.0},
        ),
        (lambda: attempts.close_placements(ID), RELEASED, {"released_s": 4.0}),
        (lambda: drivers.set_waiting(ID, {RUN: "1 CPU"}), {"state": RunState.queued}, {"waits_for": "1 CPU"}),
    ],
)  # fmt: skip
def test_a_guarded_update_writes_what_it_is_for(
    world: Store, statement: Callable[[], Update], row: Mapping[str, Any], after: Mapping[str, Any]
) -> None:
    found = written(world, statement(), row)
    assert {name: found[name] for name in after} == after


def test_an_experiment_moves_from_the_states_that_allow_it(world: Store) -> None:
    moves = statements.move_experiment(ID, PAUSED)
    assert written(world, moves, {"state": QUEUED})["state"] == PAUSED
    assert written(world, moves, {"state": ExperimentState.failed})["state"] == ExperimentState.failed


@pytest.mark.parametrize(
    ("asked", "run", "attempt", "is_open"),
    [
        ((RUN, 1), {}, {}, True), ((2, 1), {}, {}, False), ((RUN, 2), {}, {}, False),
        ((RUN, 1), {"state": RunState.running}, {}, False), ((RUN, 1), {"attempt": 2}, {}, False),
        ((RUN, 2), {}, {"number": 2}, False),
    ],
)  # fmt: skip
def test_the_newest_attempt_is_open_while_its_run_starts(
    world: Store, asked: tuple[int, int], run: Mapping[str, Any], attempt: Mapping[str, Any], is_open: bool
) -> None:
    found: list[Any] = []

    def body(connection: Connection) -> None:
        state = {"state": RunState.starting, "attempt": 1, **run}
        connection.execute(sa.update(schema.runs).values(state))
        connection.execute(
            sa.update(schema.attempts).values({"experiment_attempt": 5, "number": 1, **attempt})
        )
        found.append(connection.execute(statements.open_attempt(*asked)).all())
        raise Undone

    with pytest.raises(Undone):
        world.database.write(body)
    assert found == [[(5,)] if is_open else []]


NAMED = [pytest.param(fence, id=fence.name) for fence in FENCES]


@pytest.mark.parametrize("fence", NAMED)
def test_each_clause_of_a_guarded_update_refuses_alone(world: Store, fence: Fence) -> None:
    assert changed_rows(world, fence) == 1
    for miss in fence.misses:
        assert changed_rows(world, fence, miss) == 0, miss
        assert changed_rows(world, fence, miss, without=miss.clause) == 1, miss


@pytest.mark.parametrize("fence", NAMED)
def test_each_clause_of_a_guarded_update_has_a_way_to_miss(fence: Fence) -> None:
    statement, _ = fence.build()
    assert {miss.clause for miss in fence.misses} == set(range(len(clauses(statement))))


def updates_of(*modules: Any) -> Iterator[str]:
    for module in modules:
        for name, found in vars(module).items():
            returned = str(inspect.get_annotations(found).get("return", "")) if callable(found) else ""
            of_module = getattr(found, "__module__", None) == module.__name__
            if isinstance(found, Update) or (of_module and "Update" in returned):
                yield name


def test_no_update_of_an_attempt_or_a_lease_goes_untested() -> None:
    tables = {schema.experiments, schema.runs, schema.attempts, schema.attempt_usage, schema.placements}
    fenced = {fence.module for fence in FENCES}
    assert {*updates_of(*fenced)} == {fence.name for fence in FENCES} | ADDRESSED
    others = [
        importlib.import_module(f"{package.__name__}.{found.name}")
        for package in (service.db, service.store)
        for found in pkgutil.iter_modules(package.__path__)
    ]
    for module in set(others) - fenced:
        for name in updates_of(module):
            found = getattr(module, name)
            known = name in ("_reuse_run", *(fence.name for fence in FENCES))
            assert known or not isinstance(found, Update) or found.table not in tables, name


Write = Callable[[Store, int], Any]
OF_THE_EXPERIMENT: dict[str, Write] = {
    "started": lambda store, attempt: store.drivers.started(ID, attempt, "n", 1),
    "renew_lease": lambda store, attempt: store.drivers.renew_lease(ID, attempt, 1e6),
    "requests": lambda store, attempt: store.drivers.requests(ID, attempt),
    "finish_experiment": lambda store, attempt: store.drivers.finish_experiment(
        ID, attempt, ExperimentState.failed
    ),
    "release_experiment": lambda store, attempt: store.drivers.release_experiment(ID, attempt, delay_s=0),
    "note": lambda store, attempt: store.drivers.note(ID, attempt, "x"),
    "open": lambda store, attempt: store.attempts.open(RUN, attempt, number=1),
    "refuse_run": lambda store, attempt: store.attempts.refuse_run(RUN, attempt, (FailureClass.bug, "x")),
    "record_placements": lambda store, attempt: store.drivers.record_placements(
        ID, attempt, [placement("h", placed_s=1.0)]
    ),
    "set_waiting": lambda store, attempt: store.drivers.set_waiting(ID, attempt, {RUN: "1 CPU"}),
    "reset_runs_of_dead_attempt": lambda store, attempt: store.attempts.reset_runs_of_dead_attempt(
        ID, attempt
    ),
    "reset_runs_without_worker": lambda store, attempt: store.attempts.reset_runs_without_worker(
        ID, attempt, ()
    ),
    "set_point": lambda store, attempt: store.submissions.set_point(
        ID, attempt, [0], {}, plans_of(1)[0], "x"
    ),
}
OF_THE_RUN: dict[str, Write] = {
    "run_started": lambda store, attempt: store.attempts.run_started(
        RUN, attempt, total_steps=1, resumed_from_step=0, facts={}
    ),
    "finish_run": lambda store, attempt: store.attempts.finish_run(RUN, attempt, RunState.succeeded),
}

OF_THE_QUEUE: dict[str, Callable[[Queue, int], bool]] = {  # These answer False; see test_claims.py.
    "adopt": lambda queue, attempt: queue.adopt(ID, attempt, "other", 30.0),
    "withdraw": lambda queue, attempt: queue.withdraw(ID, attempt),
}


def everything(store: Store) -> dict[str, Any]:
    with store.database.read() as connection:
        return {
            table.name: connection.execute(sa.select(table).order_by(*table.primary_key)).all()
            for table in schema.metadata.sorted_tables
        }


@pytest.mark.parametrize("attempt", [0, 2])
def test_a_write_of_another_attempt_changes_nothing(world: Store, attempt: int) -> None:
    before = everything(world)
    for write in (OF_THE_EXPERIMENT | OF_THE_RUN).values():
        with pytest.raises(StaleAttempt):
            write(world, attempt)
    assert not any(write(Queue(world), attempt) for write in OF_THE_QUEUE.values())
    assert everything(world) == before


def test_a_write_of_an_attempt_that_was_given_back_changes_nothing(store: Store) -> None:
    fill(store)
    store.drivers.release_experiment(ID, 1, delay_s=0)
    before = everything(store)
    for write in OF_THE_EXPERIMENT.values():
        with pytest.raises(StaleAttempt):
            write(store, 1)
    assert everything(store) == before


def test_every_write_that_carries_an_attempt_is_among_them() -> None:
    carrying = {
        name
        for part in StorePart.__subclasses__()
        for name, method in inspect.getmembers(part, inspect.isfunction)
        if {"attempt", "experiment_attempt"} & {*inspect.signature(method).parameters}
        and not name.startswith("_")
    }
    assert carrying - {"logs"} == {*OF_THE_EXPERIMENT, *OF_THE_RUN, *OF_THE_QUEUE}


def test_a_run_whose_cancellation_was_requested_opens_no_attempt(store: Store, running: Running) -> None:
    experiment, (run,) = running()
    store.database.write(
        lambda connection: connection.execute(statements.set_run(run.id, cancel_requested_s=1.0))
    )
    with pytest.raises(Conflict, match="only a queued run can start"):
        store.attempts.open(run.id, experiment.attempt)
    assert store.runs.attempts(run.id) == []


def test_a_record_of_another_attempt_names_its_writer_and_changes_nothing(world: Store) -> None:
    before = everything(world)
    batch = RecordBatch(alive=[AliveRow(RUN, 2, 1e9)])
    assert world.recording.record(batch) == {(RUN, 2)}
    assert everything(world) == before


def test_a_claim_takes_a_queued_experiment_once(store: Store, queue: Queue, submit: Submit) -> None:
    submit()
    assert [claimed.attempt for claimed in queue.claim("s1", lease_s=30)] == [1]
    assert queue.claim("s2", lease_s=30) == []
