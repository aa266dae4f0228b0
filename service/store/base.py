"""What all parts of the store share: the database, the clocks, and how events are numbered."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection, func, select

from service.config.settings import Settings
from service.db import schema, statements
from service.db.clock import database_time
from service.db.engine import Database
from service.db.errors import NotFound, StaleAttempt, StoreError
from service.db.statements import ACTIVE_EXPERIMENT_STATES
from service.domain.access import Actor
from service.domain.events import EventKind
from service.domain.notifications import TOPICS
from service.domain.records import Experiment, Run, StoredRecord

logger = logging.getLogger(__name__)

_r = schema.runs.c
Part = TypeVar("Part", bound="StorePart")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Record = TypeVar("Record", bound=StoredRecord)


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event before it has its number."""

    kind: EventKind
    message: str
    run_id: int | None = None
    attempt: int | None = None
    data: dict[str, Any] | None = None
    actor: str | None = None  # User who caused it; None = the service itself


class Clocks:
    """The clocks of a store. `simulated`, in Unix seconds, replaces all of them; None = the real ones."""

    def __init__(self, simulated: Callable[[], float] | None = None) -> None:
        self.simulated = simulated

    def now(self) -> float:
        """Unix seconds of this host: for the dates of events, never for leases."""
        return (self.simulated or time.time)()

    def monotonic(self) -> float:
        """Seconds that only grow: for waits of this process."""
        return (self.simulated or time.monotonic)()

    def database_time(self, connection: Connection) -> float:
        """Unix seconds by the database's clock, which is the same for all hosts: for leases."""
        return self.simulated() if self.simulated else database_time(connection)


class StorePart:
    """Base of the store's aggregates, and of the store."""

    def __init__(self, database: Database, settings: Settings, clocks: Clocks) -> None:
        self.database = database
        self.settings = settings
        self.clocks = clocks
        self.clock, self.monotonic = clocks.now, clocks.monotonic
        self.database_time = clocks.database_time

    def read(self, statement: sa.Executable) -> Sequence[sa.Row[*tuple[Any, ...]]]:
        with self.database.read() as connection:
            return connection.execute(statement).all()

    def read_records(self, kind: type[Record], statement: sa.Executable) -> list[Record]:
        with self.database.read() as connection:
            return records(connection, kind, statement)

    def read_record(self, kind: type[Record], statement: sa.Executable) -> Record | None:
        with self.database.read() as connection:
            return record(connection, kind, statement)


def transaction(
    method: Callable[Concatenate[Part, Connection, Arguments], Result],
) -> Callable[Concatenate[Part, Arguments], Result]:
    """Gives a method a transaction of its own, which commits what it writes.

    The method may be run more than once: it must touch nothing but the connection.
    """

    @wraps(method)
    def write(part: Part, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return part.database.write(lambda connection: method(part, connection, *args, **kwargs))

    return write


def records(connection: Connection, kind: type[Record], statement: sa.Executable) -> list[Record]:
    return [kind.from_row(row) for row in connection.execute(statement).mappings()]


def record(connection: Connection, kind: type[Record], statement: sa.Executable) -> Record | None:
    """None = no row."""
    row = connection.execute(statement).mappings().one_or_none()
    return None if row is None else kind.from_row(row)


def required(found: Record | None, kind: str, id: object) -> Record:
    if found is None:
        raise NotFound(kind, id)
    return found


def until_stopped(step: Callable[[], object], every_s: float, what: str, stop: threading.Event) -> None:
    """Repeats a step, whatever it raises: one that fails must not end all later ones."""
    while not stop.is_set():
        try:
            step()
        except StoreError as error:
            logger.warning("%s wait for the database: %s", what, error)
        except Exception:
            logger.exception("%s failed; trying again", what)
        stop.wait(every_s)


def storable(text: str) -> str:
    """Returns text that both databases accept: no NUL, no lone surrogate."""
    if "\x00" in text:
        text = text.replace("\x00", "\ufffd")
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def announce(
    connection: Connection,
    experiment_id: int,
    new: Sequence[NewEvent],
    now: float,
    actor: Actor | None = None,
) -> sa.Row[Any]:
    """Locks the experiment, numbers the events and stores them; returns the experiment's standing.

    Every transition begins here: the lock on the experiment's row puts transitions of one experiment in an
    order, and makes that order the order of its events.
    """
    if actor is not None:
        new = [replace(event, actor=storable(actor.user)) for event in new]
    row = lock_experiment(connection, experiment_id, len(new))
    insert_events(connection, experiment_id, row.event_count, new, now)
    return row


def lock_experiment(connection: Connection, experiment_id: int, event_count: int = 0) -> sa.Row[Any]:
    """Locks the experiment's row and reserves the next event numbers."""
    row = connection.execute(
        statements.ADVANCE_EVENTS, {"experiment": experiment_id, "count": event_count}
    ).one_or_none()
    if row is None:
        raise NotFound("experiment", experiment_id)
    return row


def lock_run(connection: Connection, run_id: int, event_count: int = 0) -> tuple[sa.Row[Any], Run]:
    """Locks the experiment of a run; returns its standing, and the run as it is from now on."""
    row = lock_experiment(connection, experiment_id_of(connection, run_id), event_count)
    return row, read_run(connection, run_id)


def insert_events(
    connection: Connection, experiment_id: int, last_number: int, new: Sequence[NewEvent], now: float
) -> None:
    """Stores events whose numbers end at `last_number`, and notifications of those with a topic.

    A notification has no receivers yet: who writes events, a driver for instance, reads no one's
    subscriptions.
    """
    first = last_number - len(new) + 1
    new = [_with_requester(connection, experiment_id, event) for event in new]
    notices = [
        {
            "key": f"experiment:{experiment_id}:{number}",
            "kind": str(event.kind),
            "at_s": now,
            "experiment_id": experiment_id,
            "message": storable(event.message),
            "data": {
                **(event.data or {}),
                **({"run": event.run_id} if event.run_id else {}),
                **({"actor": event.actor} if event.actor else {}),
            },
        }
        for number, event in enumerate(new, first)
        if event.kind in TOPICS
    ]
    if notices:
        # Inline: to return its id, the row would have to be read, which the role of drivers may not do.
        connection.execute(sa.insert(schema.notices).inline(), notices)
    if new:
        connection.execute(
            sa.insert(schema.events),
            [
                asdict(event)
                | {"experiment_id": experiment_id, "number": number, "at_s": now}
                | {"kind": str(event.kind), "message": storable(event.message)}
                for number, event in enumerate(new, first)
            ],
        )


_PAUSES: Final = frozenset({EventKind.experiment_pause_requested, EventKind.experiment_held})
"""Events that lead to a pause; where a budget holds the experiment, no person asked for it."""
_REQUESTS: Final[Mapping[EventKind, frozenset[EventKind]]] = {
    EventKind.experiment_cancelled: frozenset({EventKind.experiment_cancel_requested}),
    EventKind.experiment_paused: _PAUSES,
    EventKind.run_cancelled: frozenset(
        {EventKind.run_cancel_requested, EventKind.experiment_cancel_requested}
    ),
    EventKind.run_paused: _PAUSES,
}
"""Requests that a driver carries out later, by the event of their outcome."""


def _with_requester(connection: Connection, experiment_id: int, event: NewEvent) -> NewEvent:
    """Adds the person to an event that carries out a request later."""
    if event.actor is not None or event.kind not in _REQUESTS:
        return event
    c = schema.events.c
    newest_requester = (
        select(c.actor)
        .where(c.experiment_id == experiment_id, c.kind.in_(sorted(_REQUESTS[event.kind])))
        .where(
            c.run_id.is_(None) if event.run_id is None else c.run_id.is_(None) | (c.run_id == event.run_id)
        )
        .order_by(c.number.desc())
        .limit(1)
    )
    return replace(event, actor=connection.execute(newest_requester).scalar())


def read_experiment(connection: Connection, id: int) -> Experiment:
    return required(record(connection, Experiment, statements.experiment_by_id(id)), "experiment", id)


def read_run(connection: Connection, id: int) -> Run:
    return required(record(connection, Run, statements.run_by_id(id)), "run", id)


def source_of(connection: Connection, run_id: int) -> int:
    """The run whose points, logs and record a run shows: another that it reuses, or itself."""
    source_of_run = select(func.coalesce(_r.reused_from, _r.id)).where(
        _r.id == run_id, statements.VISIBLE_RUN
    )
    source: int | None = connection.execute(source_of_run).scalar()
    if source is None:
        raise NotFound("run", run_id)
    return source


def experiment_id_of(connection: Connection, run_id: int) -> int:
    experiment_of_run = select(_r.experiment_id).where(_r.id == run_id, statements.VISIBLE_RUN)
    experiment_id: int | None = connection.execute(experiment_of_run).scalar()
    if experiment_id is None:
        raise NotFound("run", run_id)
    return experiment_id


def lock_for_attempt(
    connection: Connection, experiment_id: int, attempt: int, event_count: int = 0
) -> sa.Row[Any]:
    """Locks the experiment for whoever drives it; raises `StaleAttempt`."""
    row = lock_experiment(connection, experiment_id, event_count)
    check_experiment_attempt(experiment_id, attempt, row)
    return row


def check_experiment_attempt(experiment_id: int, attempt: int, row: sa.Row[Any]) -> None:
    """The fence of whoever drives an experiment; raises `StaleAttempt`."""
    if row.attempt != attempt:
        raise StaleAttempt(
            f"experiment {experiment_id}: attempt {attempt} has ended; the current one is {row.attempt}"
        )
    if row.state not in ACTIVE_EXPERIMENT_STATES:
        raise StaleAttempt(
            f"experiment {experiment_id}: attempt {attempt} has ended; the experiment is {row.state}"
        )
