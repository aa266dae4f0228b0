"""Live follow as server-sent events: what has changed, at most every half second, until the end.

However many follow one experiment or run, the store is polled once for them (`api.feeds`). This module
knows what is read for each and how it is written.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Send

from api.changes import ChangesSource
from api.feeds import Feeds, FeedSnapshot, frame
from api.problems import ProblemError
from service.domain.access import Visibility
from service.domain.records import (
    Attempt,
    DeletedId,
    Event,
    ExperimentCost,
    ExperimentStatus,
    LatestPoint,
    ListedExperiment,
    LogLine,
    ManyChanges,
    NewSeries,
    PointRow,
    QueueCounts,
    Run,
    RunProgress,
)
from service.domain.serialization import adapter, to_json
from service.domain.states import TERMINAL_EXPERIMENT_STATES, TERMINAL_RUN_STATES
from service.scheduling.queue import Queue
from service.store import Store

INTERVAL_S = 0.5  # Time between two polls of one experiment or run
MAX_POINTS = 2000  # Points of a metric that are sent at once; more are thinned as `GET points` thins them
_EVENTS_PER_READ = 500
_METRICS_PER_READ = 4
_FIRST_LINES, _MOST_LINES = 32, 1000
_BYTES_PER_READ = 256 * 1024
"""Target size of one log read; the number of lines is estimated from those read so far."""
_ACTIVE_RUNS = 100  # Most running runs whose progress is pushed; further ones are read from lists
_PREPARING = "preparing"  # Phase in which only the log says how far a run is


class EventStream(StreamingResponse):
    """Server-sent events; the generator behind them ends with the connection."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], status_code: int = 200) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(frames, status_code, headers)
        self._frames = frames

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._frames):
            await super().stream_response(send)


EXPERIMENT_EVENTS: Mapping[str, Any] = {
    "event": Event,
    "run": RunProgress,
    "experiment": ExperimentStatus,
    "end": ExperimentStatus,
}
"""Data of each event, by its name."""
RUN_EVENTS: Mapping[str, Any] = {
    "run": RunProgress,
    "log": LogLine,
    "points": dict[str, NewSeries],
    "end": RunProgress,
}
CHANGES_EVENTS: Mapping[str, Any] = {
    "experiment": ListedExperiment,
    "deleted": DeletedId,
    "costs": dict[int, ExperimentCost],
    "queue": QueueCounts,
    "many": ManyChanges,
}


class Streams(Feeds):
    def __init__(self, store: Store, interval_s: float = INTERVAL_S) -> None:
        super().__init__(interval_s)
        self._store = store
        self._changes = ChangesSource(store, Queue(store))

    def follow_changes(self, visible: Visibility, after_s: float | None) -> AsyncGenerator[bytes, None]:
        """Experiments that a reader sees and that change, and the queue when it changes; never ends.

        `after_s` is the place that an id of this stream names; None = now.
        """
        return self.follow("changes", self._changes, after_s, lambda frames: frames.seen_by(visible))

    def follow_experiment(self, experiment_id: int, after: int) -> AsyncGenerator[bytes, None]:
        """Events after number `after` without a gap, runs and the experiment as they change, then `end`.

        Only `event` carries an id: runs are sent as they are now, and again after a reconnect.
        """
        return self.follow(("experiment", experiment_id), ExperimentSource(self._store, experiment_id), after)

    def follow_run(self, run_id: int, place: Place) -> AsyncGenerator[bytes, None]:
        """Returns the run as it changes, log lines and points after a place, then `end`.

        A point is identified by name and step. When a new attempt resumes from step n, a `run` event says so
        and the points after n come again. A reconnect may repeat the points of its last step, never leave
        one out, unless more than `MAX_POINTS` of a metric were missed: then they come thinned.
        """
        return self.follow(("run", run_id), RunSource(self._store, run_id), place)


@dataclass(frozen=True, slots=True)
class RunView:
    active: bool
    payload: str


@dataclass(frozen=True, slots=True)
class ExperimentSnapshot(FeedSnapshot[int]):
    """An experiment after a poll; its place is the number of its newest event."""

    summary: str
    runs: Mapping[int, RunView]  # Runs that were active while the experiment was followed, by id


@dataclass(frozen=True, slots=True)
class ExperimentSource:
    store: Store
    experiment_id: int

    def poll(self, last: ExperimentSnapshot | None) -> tuple[ExperimentSnapshot, bytes]:
        # The experiment is read first: whatever had happened by then is in the reads that follow.
        experiment = self.store.experiments.get(self.experiment_id)
        summary = to_json(
            ExperimentStatus.of(experiment, self.store.experiments.run_counts(self.experiment_id))
        )
        number = last.place if last is not None else 0
        frames: list[bytes] = []
        named: set[int] = set()
        for page in self._events(number):
            number = page[-1].number
            if last is not None:  # A run that ended before anybody followed is read from lists.
                named.update(event.run_id for event in page if event.run_id is not None)
                frames += map(_event_frame, page)
        before = last.runs if last is not None else {}
        runs = self._views(before, named)
        frames += [frame("run", view.payload) for id, view in runs.items() if view is not before.get(id)]
        if last is None or summary != last.summary:
            frames.append(frame("experiment", summary))
        end = frame("end", summary) if experiment.state in TERMINAL_EXPERIMENT_STATES else None
        return ExperimentSnapshot(number, end, summary, runs), b"".join(frames) if last is not None else b""

    def catch_up(self, place: int, snapshot: ExperimentSnapshot) -> Iterator[bytes]:
        for page in self._events(place):
            yield b"".join(_event_frame(event) for event in page if event.number <= snapshot.place)
            if page[-1].number >= snapshot.place:
                break
        yield b"".join(frame("run", view.payload) for view in snapshot.runs.values())
        yield frame("experiment", snapshot.summary)

    def _events(self, after: int) -> Iterator[list[Event]]:
        while page := self.store.experiments.events(self.experiment_id, after=after, limit=_EVENTS_PER_READ):
            yield page
            after = page[-1].number

    def _views(self, before: Mapping[int, RunView], named: set[int]) -> dict[int, RunView]:
        """Returns the runs that are active, were active a poll ago, or that an event names."""
        store = self.store
        page = store.runs.page(
            experiment_id=self.experiment_id,
            filter="state IN ('starting', 'running')",
            page_size=_ACTIVE_RUNS,
        )
        active = {run.id: run for run in page.items}
        settled = (named | {run_id for run_id, view in before.items() if view.active}) - active.keys()
        views = dict(before)
        for run in [*active.values(), *(store.runs.get(run_id) for run_id in sorted(settled))]:
            line = store.runs.last_log_line(run.id) if run.phase == _PREPARING else None
            view = RunView(run.id in active, _run_payload(run, store.series.latest_points(run.id), line))
            if before.get(run.id) != view:
                views[run.id] = view
        return views


@dataclass(frozen=True, slots=True)
class Place:
    """How far a follower of a run has read: the id of its last event."""

    attempt: int = 1
    step: int = 0
    line: int = 0
    steps: Mapping[str, int] | None = None
    """Last step of each metric; None when only `step` is known, as after a reconnect."""
    newest: bool = False  # The follower has all that there is so far, wherever that ends

    @classmethod
    def parse(cls, text: str | None) -> Place:
        """Returns the place that a Last-Event-ID names, or raises `invalid-parameter`."""
        if text is None:
            return cls()
        parts = text.split("-")
        if len(parts) != 3:
            raise _foreign_id()
        attempt, step, line = map(parse_number, parts)
        return cls(attempt, step, line)

    def __str__(self) -> str:
        return f"{self.attempt}-{self.step}-{self.line}"

    def step_of(self, name: str) -> int:
        """Returns the last step that the follower has of a metric; -1 = none."""
        return self.step - 1 if self.steps is None else self.steps.get(name, -1)

    def resumed(self, attempts: list[Attempt]) -> Place:
        """Returns the place once newer attempts have taken back what they do again."""
        place = self
        for attempt in attempts:
            # Where an attempt continues from is known once it has begun; until then it has no points.
            if attempt.number > place.attempt and attempt.resumed_from_step is not None:
                ceiling = attempt.resumed_from_step
                steps = place.steps and {name: min(step, ceiling) for name, step in place.steps.items()}
                place = replace(place, attempt=attempt.number, step=min(place.step, ceiling), steps=steps)
        return place


@dataclass(frozen=True, slots=True)
class RunSnapshot(FeedSnapshot[Place]):
    payload: str
    attempts: list[Attempt]


@dataclass(frozen=True, slots=True)
class RunSource:
    store: Store
    run_id: int

    def poll(self, last: RunSnapshot | None) -> tuple[RunSnapshot, bytes]:
        # The run is read first: whatever it had reported by then is in the reads that follow.
        run = self.store.runs.get(self.run_id)
        attempts, latest = self.store.runs.attempts(self.run_id), self.store.series.latest_points(self.run_id)
        line = self.store.runs.last_log_line(self.run_id)
        payload, steps = _run_payload(run, latest), _visible_steps(latest, attempts)
        place = Place(line=line.cursor if line is not None else 0).resumed(attempts)
        place = replace(place, step=max(steps.values(), default=0), steps=steps)
        end = frame("end", payload, str(place)) if run.state in TERMINAL_RUN_STATES else None
        snapshot = RunSnapshot(place, end, payload, attempts)
        if last is None:
            return snapshot, b""
        run_frame = frame("run", payload, str(last.place)) if payload != last.payload else b""
        return snapshot, run_frame + b"".join(self._between(last.place, snapshot))

    def catch_up(self, place: Place, snapshot: RunSnapshot) -> Iterator[bytes]:
        yield frame("run", snapshot.payload, str(snapshot.place if place.newest else place))
        if not place.newest:
            yield from self._between(place, snapshot)

    def _between(self, place: Place, snapshot: RunSnapshot) -> Iterator[bytes]:
        """Yields the log lines and points from a place to a snapshot."""
        place = place.resumed(snapshot.attempts)
        for lines in self._lines(place.line, snapshot.place.line):
            frames = []
            for line in lines:
                place = replace(place, line=line.cursor)
                frames.append(frame("log", to_json(line), str(place)))
            yield b"".join(frames)
        # An id tells what is complete: until the last of the metrics is sent, points have none.
        waiting: dict[str, NewSeries] = {}
        for fresh in self._points(place, snapshot.place.steps or {}):
            if waiting:
                yield _points_frame(waiting, None)
            waiting = fresh
        if waiting:
            yield _points_frame(waiting, str(snapshot.place))

    def _lines(self, after: int, until: int) -> Iterator[list[LogLine]]:
        limit = _FIRST_LINES
        while after < until:
            lines = self.store.runs.logs(self.run_id, after=after or None, limit=limit)
            yield [line for line in lines if line.cursor <= until]
            if len(lines) < limit:
                return
            after = lines[-1].cursor
            mean_bytes = sum(len(line.message) for line in lines) // len(lines) + 1
            limit = max(_FIRST_LINES, min(_MOST_LINES, _BYTES_PER_READ // mean_bytes))

    def _points(self, place: Place, steps: Mapping[str, int]) -> Iterator[dict[str, NewSeries]]:
        """New points up to these steps, some metrics at a time, each from where the follower is."""
        behind = sorted(
            (place.step_of(name), name) for name, step in steps.items() if place.step_of(name) < step
        )
        for after, group in itertools.groupby(behind, key=lambda entry: entry[0]):
            names = [name for _, name in group]
            for first in range(0, len(names), _METRICS_PER_READ):
                some = names[first : first + _METRICS_PER_READ]
                last = max(steps[name] for name in some)
                found = self.store.series.sampled_points(
                    self.run_id, some, min_step=after + 1, max_step=last, max_points=MAX_POINTS
                )
                if fresh := {
                    name: NewSeries.of(one.points, one.bucket_steps)
                    for name, one in found.items()
                    if one.points
                }:
                    yield fresh


def _visible_steps(latest: list[PointRow], attempts: list[Attempt]) -> dict[str, int]:
    """Returns the last step of each metric that no newer attempt does again."""
    return {
        point.name: Place(attempt=point.attempt, step=point.step).resumed(attempts).step for point in latest
    }


def parse_number(text: str) -> int:
    """Returns the number that a Last-Event-ID is, or raises `invalid-parameter`."""
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise _foreign_id()
    return int(text)


def _foreign_id() -> ProblemError:
    return ProblemError("invalid-parameter", "header Last-Event-ID is not an id of this stream; leave it out")


def _event_frame(event: Event) -> bytes:
    return frame("event", to_json(event), str(event.number))


def _points_frame(fresh: dict[str, NewSeries], id: str | None) -> bytes:
    return frame("points", adapter(dict[str, NewSeries]).dump_json(fresh).decode(), id)


def _run_payload(run: Run, latest: list[PointRow], line: LogLine | None = None) -> str:
    return to_json(RunProgress(run, {row.name: LatestPoint(row.step, row.value) for row in latest}, line))
