"""Live follow as server-sent events: what has changed, at most every half second, until the end.

However many follow one experiment or run, the store is polled once for them (`_Feed`); each
follower keeps its own place and reads from the shared snapshot at its own speed, so that a slow
one misses intermediate snapshots but no event. A follower that leaves takes its poll with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fastapi.sse import ServerSentEvent
from starlette.concurrency import run_in_threadpool

from api.problems import ProblemError
from service.db.errors import NotFound, StoreError
from service.domain.records import (
    Attempt,
    Event,
    Experiment,
    ExperimentStatus,
    LatestPoint,
    LogLine,
    NewSeries,
    PointRow,
    Run,
    RunProgress,
)
from service.domain.serialization import adapter, to_json
from service.domain.states import TERMINAL_EXPERIMENT_STATES, TERMINAL_RUN_STATES
from service.store import Store

_logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
"""Time between two polls of one experiment or run."""
_EVENTS_PER_READ = 500
_LINES_PER_READ = 1000
_KEPT_EVENTS = 1000
_ACTIVE_RUNS = 100
"""Most running runs whose progress is pushed; further ones are read from lists."""
_PREPARING = "preparing"
"""Phase in which only the log says how far a run is."""

Snapshot = TypeVar("Snapshot")


class _Feed(Generic[Snapshot]):
    """One poll shared by all followers of one thing; `poll` turns the last snapshot into the next."""

    def __init__(self, poll: Callable[[Snapshot | None], Snapshot]) -> None:
        self._poll = poll
        self._changed = asyncio.Event()
        self._gone = False
        self.followers = 0
        self.snapshot: Snapshot | None = None
        self.version = 0
        self.task: asyncio.Task[None] | None = None

    async def run(self, interval_s: float) -> None:
        """Poll until cancelled or until the thing is deleted."""
        while True:
            try:
                self.snapshot = await run_in_threadpool(self._poll, self.snapshot)
                self.version += 1
            except NotFound:
                self._gone = True
            except StoreError as error:
                # Followers keep their place; the next poll that succeeds continues from there.
                _logger.warning("a live stream waits for the store: %s", error)
            self.wake()
            if self._gone:
                return
            await asyncio.sleep(interval_s)

    def wake(self) -> None:
        """Let every waiting follower look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def next(self, seen: int, closing: Callable[[], bool]) -> Snapshot | None:
        """A snapshot newer than version `seen`; None when there will be none."""
        while True:
            changed = self._changed
            if self._gone or closing():
                return None
            if self.version > seen:
                return self.snapshot
            await changed.wait()


@dataclass(frozen=True, slots=True)
class _RunView:
    """A run and its latest points, as sent."""

    version: int
    """Rises when anything in it changes."""
    active: bool
    payload: str


@dataclass(slots=True)
class _ExperimentSnapshot:
    experiment: Experiment
    summary: str
    last_event: int = 0
    recent: list[Event] = field(default_factory=list)
    runs: dict[int, _RunView] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _RunSnapshot:
    run: Run
    attempts: list[Attempt]
    latest: list[PointRow]


@dataclass(slots=True)
class Place:
    """How far a follower of a run has read: the id of its last event."""

    attempt: int = 1
    step: int = 0
    line: int = 0
    """Cursor of the last log line."""
    steps_by_name: dict[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str | None) -> Place:
        """The place that a Last-Event-ID names.

        Raises:
            ProblemError: `invalid-parameter` when it is not one of ours.
        """
        if text is None:
            return cls()
        parts = text.split("-")
        if len(parts) != 3 or not all(_is_number(part) for part in parts):
            raise _foreign_id()
        attempt, step, line = map(int, parts)
        return cls(attempt, step, line)

    def __str__(self) -> str:
        return f"{self.attempt}-{self.step}-{self.line}"


class Streams:
    """The live streams of one application."""

    def __init__(self, store: Store, interval_s: float = INTERVAL_S) -> None:
        self._store = store
        self._interval_s = interval_s
        self._feeds: dict[tuple[str, int], _Feed[Any]] = {}
        self._closing = False

    @property
    def polls(self) -> int:
        """How many things are being polled now."""
        return len(self._feeds)

    def close(self) -> None:
        """End all streams, so that the server can stop; clients connect again by themselves."""
        self._closing = True
        for feed in self._feeds.values():
            feed.wake()

    @asynccontextmanager
    async def _follow(self, key: tuple[str, int], poll: Callable[[Any], Any]) -> AsyncIterator[_Feed[Any]]:
        feed = self._feeds.get(key)
        if feed is None:
            feed = self._feeds[key] = _Feed(poll)
            feed.task = asyncio.create_task(feed.run(self._interval_s), name=f"poll {key}")
        feed.followers += 1
        try:
            yield feed
        finally:
            feed.followers -= 1
            if feed.followers == 0:
                del self._feeds[key]
                assert feed.task is not None
                feed.task.cancel()

    async def follow_experiment(self, experiment_id: int, after: int) -> AsyncIterator[ServerSentEvent]:
        """Events after number `after` without a gap, runs and the experiment as they change, then `end`.

        Only `event` carries an id: runs are sent as they are now, and again after a reconnect.
        """
        async with self._follow(
            ("experiment", experiment_id), lambda last: self._poll_experiment(experiment_id, last)
        ) as feed:
            seen, sent_summary = 0, ""
            sent_runs: dict[int, int] = {}
            while (snapshot := await feed.next(seen, lambda: self._closing)) is not None:
                seen = feed.version
                last_event, runs, summary = snapshot.last_event, dict(snapshot.runs), snapshot.summary
                ended = snapshot.experiment.state in TERMINAL_EXPERIMENT_STATES
                while after < last_event:
                    for event in await self._events_after(experiment_id, after, snapshot):
                        after = event.number
                        yield ServerSentEvent(event="event", id=str(event.number), raw_data=to_json(event))
                for run_id, view in runs.items():
                    if sent_runs.get(run_id, -1) < view.version:
                        sent_runs[run_id] = view.version
                        yield ServerSentEvent(event="run", raw_data=view.payload)
                if summary != sent_summary:
                    sent_summary = summary
                    yield ServerSentEvent(event="experiment", raw_data=summary)
                if ended:
                    yield ServerSentEvent(event="end", raw_data=summary)
                    return

    async def follow_run(self, run_id: int, place: Place) -> AsyncIterator[ServerSentEvent]:
        """Points and log lines after the last event, the run as it changes, then `end`.

        A point is identified by name and step. When a new attempt resumes from step n, a `run`
        event says so and the points after n come again. A reconnect may repeat the points of
        its last step, never leave one out.
        """
        async with self._follow(("run", run_id), lambda _: self._poll_run(run_id)) as feed:
            seen, sent_run = 0, ""
            while (snapshot := await feed.next(seen, lambda: self._closing)) is not None:
                seen = feed.version
                payload = _run_payload(snapshot.run, snapshot.latest)
                if payload != sent_run:
                    sent_run = payload
                    yield ServerSentEvent(event="run", id=str(place), raw_data=payload)
                async for event in self._lines_and_points(snapshot, place):
                    yield event
                if snapshot.run.state in TERMINAL_RUN_STATES:
                    yield ServerSentEvent(event="end", id=str(place), raw_data=payload)
                    return

    async def _events_after(
        self, experiment_id: int, after: int, snapshot: _ExperimentSnapshot
    ) -> list[Event]:
        recent = snapshot.recent
        if recent and recent[0].number <= after + 1:
            return [event for event in recent if event.number > after]
        return await run_in_threadpool(self._store.events, experiment_id, after=after, limit=_EVENTS_PER_READ)

    async def _lines_and_points(self, snapshot: _RunSnapshot, place: Place) -> AsyncIterator[ServerSentEvent]:
        run_id = snapshot.run.id
        for attempt in snapshot.attempts:
            # Where an attempt continues from is known once it has begun; until then it has no points.
            if attempt.number > place.attempt and attempt.resumed_from_step is not None:
                place.attempt = attempt.number
                place.step = min(place.step, attempt.resumed_from_step)
                place.steps_by_name = {
                    name: min(step, place.step) for name, step in place.steps_by_name.items()
                }
        while lines := await run_in_threadpool(
            self._store.logs, run_id, after=place.line or None, limit=_LINES_PER_READ
        ):
            for line in lines:
                place.line = line.cursor
                yield ServerSentEvent(event="log", id=str(place), raw_data=to_json(line))
            if len(lines) < _LINES_PER_READ:
                break
        if all(place.steps_by_name.get(point.name, -1) >= point.step for point in snapshot.latest):
            return
        series = await run_in_threadpool(self._store.points, run_id, min_step=place.step)
        fresh: dict[str, NewSeries] = {}
        for name, rows in series.items():
            new = [row for row in rows if row.step > place.steps_by_name.get(name, -1)]
            if new:
                fresh[name] = NewSeries.of(new)
                place.steps_by_name[name] = new[-1].step
                place.step = max(place.step, new[-1].step)
        if fresh:
            points = adapter(dict[str, NewSeries]).dump_json(fresh).decode()
            yield ServerSentEvent(event="points", id=str(place), raw_data=points)

    def _poll_experiment(self, experiment_id: int, last: _ExperimentSnapshot | None) -> _ExperimentSnapshot:
        store = self._store
        experiment = store.experiment(experiment_id)
        status = ExperimentStatus.of(experiment, store.run_counts(experiment_id))
        snapshot = _ExperimentSnapshot(experiment, to_json(status))
        if last is not None:
            snapshot.last_event, snapshot.recent, snapshot.runs = last.last_event, last.recent, last.runs
        named: set[int] = set()
        while page := store.events(experiment_id, after=snapshot.last_event, limit=_EVENTS_PER_READ):
            snapshot.recent = [*snapshot.recent, *page][-_KEPT_EVENTS:]
            snapshot.last_event = page[-1].number
            if last is not None:  # Runs that ended before anybody followed are read from lists.
                named.update(event.run_id for event in page if event.run_id is not None)
        snapshot.runs = self._run_views(experiment_id, snapshot.runs, named)
        return snapshot

    def _run_views(
        self, experiment_id: int, last: dict[int, _RunView], named: set[int]
    ) -> dict[int, _RunView]:
        """The runs that are active, were active a poll ago, or that an event names."""
        page = self._store.runs(
            experiment_id=experiment_id, filter="state IN ('starting', 'running')", page_size=_ACTIVE_RUNS
        )
        active = {run.id: run for run in page.items}
        settled = (named | {run_id for run_id, view in last.items() if view.active}) - active.keys()
        views = dict(last)
        for run in [*active.values(), *(self._store.run(run_id) for run_id in sorted(settled))]:
            line = self._store.last_log_line(run.id) if run.phase == _PREPARING else None
            payload = _run_payload(run, self._store.latest_points(run.id), line)
            before = views.get(run.id)
            if before is None or before.payload != payload:
                version = before.version + 1 if before else 0
                views[run.id] = _RunView(version, run.id in active, payload)
        return views

    def _poll_run(self, run_id: int) -> _RunSnapshot:
        # The run is read first: whatever it had reported by then is in the reads that follow.
        run = self._store.run(run_id)
        return _RunSnapshot(run, self._store.attempts(run_id), self._store.latest_points(run_id))


def parse_event_number(text: str | None) -> int:
    """The event number in a Last-Event-ID of an experiment's stream; 0 = from the beginning.

    Raises:
        ProblemError: `invalid-parameter` when it is no number.
    """
    if text is None:
        return 0
    if not _is_number(text):
        raise _foreign_id()
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _foreign_id() -> ProblemError:
    return ProblemError("invalid-parameter", "header Last-Event-ID is not an id of this stream; leave it out")


def _run_payload(run: Run, latest: list[PointRow], line: LogLine | None = None) -> str:
    return to_json(RunProgress(run, {row.name: LatestPoint(row.step, row.value) for row in latest}, line))
