"""Whether an installation that has come to rest kept its promises.

Reads the event log and the tables by SQL of its own, and what clients and workers were told. It imports
nothing of the product: what is wrong there cannot be wrong here in the same way.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Rows = list[tuple[Any, ...]]

FAULTS = ("lost", "duplicated", "stale_writes", "stranded", "stuck", "acknowledged_missing", "refused_stored")
"""What is counted; the last two at full disks."""
_TERMINAL = {"succeeded", "incomplete", "failed", "cancelled"}
_TERMINAL_RUN = _TERMINAL | {"stopped"}
_AFTER = {
    "experiment.claimed": ({"queued"}, "starting"),
    "experiment.started": ({"starting"}, "running"),
    "experiment.released": ({"starting", "running"}, "queued"),
    "experiment.yielded": ({"starting", "running"}, "queued"),
    "experiment.retried": (_TERMINAL, "queued"),
    "experiment.paused": ({"queued", "starting", "running"}, "paused"),
    "experiment.succeeded": ({"running"}, "succeeded"),
    "experiment.incomplete": ({"running"}, "incomplete"),
    "experiment.failed": ({"starting", "running"}, "failed"),
    "experiment.cancelled": ({"queued", "paused", "starting", "running"}, "cancelled"),
}
"""From which states an event leads to which."""
_RUN_ENDS = {
    f"run.{end}"
    for end in ("succeeded", "failed", "cancelled", "stopped", "paused", "retrying", "preempted", "lost")
}
_TABLES_OF_RUNS = ("points", "latest_points", "log_lines", "measurements", "attempts", "run_summaries")
_TABLES_OF_EXPERIMENTS = ("runs", "events", "experiment_specs", "cell_specs", "placements", "run_references")
_CLOCK_S = 1e-3
"""How far a row's time may be off: it is rounded on its way."""


@dataclass(slots=True)
class CardSource:
    """What the product has acknowledged.

    Attributes:
        submits: experiment and number of its runs, by idempotency key.
        points: steps by run, attempt and metric.
        requests: (act, id of the experiment or run) of each acknowledged request, with repetitions.
        perhaps: the same of requests without an answer: they may have been carried out.
        all_succeed: nobody asked for anything but success.
    """

    submits: dict[str, tuple[int, int]] = field(default_factory=dict)
    points: dict[tuple[int, int, str], set[int]] = field(default_factory=lambda: defaultdict(set))
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    perhaps: Counter[tuple[str, int]] = field(default_factory=Counter)
    all_succeed: bool = True

    def read_points(self, lines: Iterable[str]) -> None:
        """Add what workers have noted: run, attempt, metric and steps."""
        for line in lines:
            run, attempt, name, *steps = line.split()
            self.points[int(run), int(attempt), name].update(map(int, steps))

    def possible(self, act: str, id: int) -> int:
        """How often a request may have been carried out."""
        return self.requests[act, id] + self.perhaps[act, id]


@dataclass(slots=True)
class Findings:
    """What is wrong, one line each, by what it counts as."""

    lines: dict[str, list[str]] = field(default_factory=lambda: {fault: [] for fault in FAULTS})

    def add(self, fault: str, line: str) -> None:
        """Count something."""
        self.lines[fault].append(line)

    def counts(self) -> dict[str, int]:
        """How many of each."""
        return {fault: len(lines) for fault, lines in self.lines.items()}

    def __bool__(self) -> bool:
        return any(self.lines.values())


@dataclass(frozen=True, slots=True)
class _Event:
    number: int
    run: int | None
    attempt: int | None
    kind: str


class Checker:
    """One look at a database at rest.

    Args:
        rows: answers a query.
        told: what was acknowledged.
        metric: of whose values each names its writer.
        writer_of: who wrote a value of it.
    """

    def __init__(
        self, rows: Callable[[str], Rows], told: CardSource, metric: str, writer_of: Callable[[float], int]
    ) -> None:
        self._rows, self._told, self._metric, self._writer_of = rows, told, metric, writer_of
        self.findings = Findings()
        self._experiments = {
            id: (state, attempt, events)
            for id, state, attempt, events in rows("SELECT id, state, attempt, event_count FROM experiments")
        }
        self._runs = {
            id: (experiment, state, attempt)
            for id, experiment, state, attempt in rows("SELECT id, experiment_id, state, attempt FROM runs")
        }
        self._total_steps = dict(rows("SELECT id, total_steps FROM runs"))
        self._events: dict[int, list[_Event]] = defaultdict(list)
        for experiment, number, run, attempt, kind in rows(
            "SELECT experiment_id, number, run_id, attempt, kind FROM events ORDER BY experiment_id, number"
        ):
            self._events[experiment].append(_Event(number, run, attempt, kind))
        self._attempts: dict[int, dict[int, tuple[float, float | None, int | None]]] = defaultdict(dict)
        for run, number, started_s, ended_s, resumed in rows(
            "SELECT run_id, number, started_s, ended_s, resumed_from_step FROM attempts"
        ):
            self._attempts[run][number] = (started_s, ended_s, resumed)

    def check(self) -> Findings:
        """Look at everything."""
        self._submits()
        self._states()
        for id, events in self._events.items():
            if id in self._experiments:
                self._story(id, events)
        self._ends()
        self._attempt_rows()
        self._points()
        self._requests()
        self._orphans()
        return self.findings

    def _submits(self) -> None:
        keys = dict(self._rows("SELECT key, experiment_id FROM idempotency_keys"))
        runs = Counter(experiment for experiment, _, _ in self._runs.values())
        for key, (id, count) in self._told.submits.items():
            if self._told.possible("delete", id):
                continue
            if id not in self._experiments or keys.get(key) != id:
                self.findings.add("lost", f"submit {key}: experiment {id} is not there")
            elif runs[id] != count:
                self.findings.add("lost", f"experiment {id} has {runs[id]} of {count} runs")
        known = {id for id, _ in self._told.submits.values()}
        for id in self._experiments.keys() - known:
            self.findings.add("duplicated", f"experiment {id}: no client was told of it")
        for name, count in self._rows("SELECT name, count(*) FROM experiments GROUP BY name"):
            if count > 1:
                self.findings.add("duplicated", f"experiment '{name}' is there {count} times")

    def _states(self) -> None:
        for run, (experiment, state, _) in self._runs.items():
            of_experiment = self._experiments.get(experiment, ("missing",))[0]
            if of_experiment in _TERMINAL and state not in _TERMINAL_RUN:
                self.findings.add("stranded", f"experiment {experiment} {of_experiment}, run {run} {state}")
            elif self._told.all_succeed and state != "succeeded":
                self.findings.add("lost", f"experiment {experiment} {of_experiment}, run {run} {state}")

    def _story(self, id: int, events: list[_Event]) -> None:
        """The events of an experiment, as moves of it and of its runs."""
        state, attempt, count = self._experiments[id]
        if [event.number for event in events] != list(range(1, count + 1)):
            self.findings.add("lost", f"experiment {id}: {len(events)} events, numbers do not run to {count}")
        now, claims = "queued", 0
        newest: dict[int, int] = {}
        ended: set[tuple[int, int]] = set()
        for event in events:
            where = f"experiment {id}, event {event.number} {event.kind}"
            if event.kind == "experiment.claimed":
                claims += 1
            elif event.run is None and event.attempt is not None and event.attempt < claims:
                self.findings.add("stale_writes", f"{where}: by attempt {event.attempt} after {claims}")
            sources, target = _AFTER.get(event.kind, (None, now))
            if event.kind == "experiment.resumed" and now == "paused":
                target = "queued"
            if sources is not None and now not in sources:
                self.findings.add("duplicated", f"{where}: while {now}")
            now = target
            if event.run is None or event.attempt is None:
                continue
            if event.kind == "run.starting":
                if event.attempt != newest.get(event.run, 0) + 1:
                    self.findings.add("duplicated", f"{where}: run {event.run}, attempt {event.attempt}")
                newest[event.run] = event.attempt
            elif event.kind == "run.started" or event.kind in _RUN_ENDS:
                if event.attempt < newest.get(event.run, 0):
                    self.findings.add("stale_writes", f"{where}: run {event.run}, attempt {event.attempt}")
                if event.kind in _RUN_ENDS and event.attempt:
                    if (event.run, event.attempt) in ended and event.kind != "run.cancelled":
                        self.findings.add("duplicated", f"{where}: attempt {event.attempt} ended twice")
                    ended.add((event.run, event.attempt))
        if now != state:
            self.findings.add("lost", f"experiment {id} is {state}, its events lead to {now}")
        if claims != attempt:
            self.findings.add("lost", f"experiment {id}: attempt {attempt}, {claims} claims in its events")

    def _ends(self) -> None:
        """Every run that ended did so for a reason that the events have."""
        for run, (experiment, state, _) in self._runs.items():
            events = [event for event in self._events[experiment] if event.run in (run, None)]
            own = [event for event in events if event.run == run]
            reasons = [event.kind for event in own if event.kind in _RUN_ENDS]
            if state == "stopped" and (not reasons or reasons[-1] != "run.stopped"):
                self.findings.add("lost", f"run {run} is stopped, and was not: {reasons[-1:]}")
            if state == "failed" and (not reasons or reasons[-1] != "run.failed"):
                self.findings.add("lost", f"run {run} is failed, and did not: {reasons[-1:]}")
            cancelled = self._told.possible("cancel", experiment) + self._told.possible("cancel_run", run)
            if state == "cancelled" and not cancelled:
                self.findings.add("lost", f"run {run} is cancelled, which nobody asked for")
            again = [event.number for event in own if event.kind == "run.retried"]
            if again and not any(
                event.number > again[-1]
                and (
                    event.kind in {"run.starting", "run.cancelled", "run.cancel_requested"}
                    or event.kind.startswith(("experiment.cancel", "experiment.paused"))
                )
                for event in events
            ):
                self.findings.add("lost", f"run {run} was queued again and never started; it is {state}")

    def _attempt_rows(self) -> None:
        for run, (_, state, attempt) in self._runs.items():
            rows = self._attempts[run]
            if sorted(rows) != list(range(1, attempt + 1)):
                self.findings.add("lost", f"run {run}: attempts {sorted(rows)} of {attempt}")
            for number, (_, ended_s, _) in rows.items():
                if ended_s is None and (number < attempt or state in _TERMINAL_RUN):
                    self.findings.add("lost", f"run {run} {state}: attempt {number} has no end")

    def _points(self) -> None:
        stored: dict[tuple[int, int, str], dict[int, float]] = defaultdict(dict)
        writers: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for run, attempt, name, step, at_s, value in self._rows(
            "SELECT p.run_id, p.attempt, n.name, p.step, p.at_s, p.value "
            "FROM points p JOIN metric_names n ON n.id = p.name_id"
        ):
            stored[run, attempt, name][step] = value
            if name == self._metric:
                writers[self._writer_of(value)].add((run, attempt))
            self._written_in_time("points", run, attempt, at_s)
        for writer, places in writers.items():
            if len(places) > 1:
                self.findings.add("stale_writes", f"writer {writer} has written as {sorted(places)}")
        trained = Counter(place for places in writers.values() for place in places)
        for (run, attempt), count in trained.items():
            if count > 1:
                self.findings.add("duplicated", f"run {run}, attempt {attempt} was trained {count} times")
        for run, attempt, at_s in self._rows("SELECT run_id, attempt, at_s FROM log_lines"):
            self._written_in_time("log_lines", run, attempt, at_s)
        for (run, attempt, name), steps in self._told.points.items():
            missing = steps - stored[run, attempt, name].keys()
            if missing and run in self._runs:
                line = f"run {run}, attempt {attempt}: {name} at {_short(missing)} was acknowledged"
                self.findings.add("lost", line)
        for run, (_, state, attempt) in self._runs.items():
            steps = {number: set(stored[run, number, self._metric]) for number in range(1, attempt + 1)}
            self._series(run, state, steps)

    def _written_in_time(self, table: str, run: int, attempt: int, at_s: float) -> None:
        following = self._attempts[run].get(attempt + 1)
        if following is not None and at_s > following[0] + _CLOCK_S:
            late_s = at_s - following[0]
            line = f"{table}: run {run}, attempt {attempt} wrote {late_s:.3f} s after the next had begun"
            self.findings.add("stale_writes", line)

    def _series(self, run: int, state: str, steps: Mapping[int, set[int]]) -> None:
        """What people see: of an attempt, the steps up to where the first later one went on."""
        visible: Counter[int] = Counter()
        hidden_beyond = float("inf")
        for number in sorted(steps, reverse=True):
            visible.update(step for step in steps[number] if step <= hidden_beyond)
            resumed = self._attempts[run].get(number, (0.0, None, None))[2]
            if resumed is not None:
                hidden_beyond = min(hidden_beyond, resumed)
        twice = [step for step, count in visible.items() if count > 1]
        if twice:
            self.findings.add("duplicated", f"run {run}: steps {_short(twice)} are there twice")
        holes = set(range(1, max(visible, default=0) + 1)) - visible.keys()
        if holes:
            self.findings.add("lost", f"run {run} {state}: no point at {_short(holes)}")
        total = self._total_steps.get(run)
        if state == "succeeded" and max(visible, default=0) != total:
            self.findings.add("lost", f"run {run} succeeded at step {max(visible, default=0)} of {total}")

    def _requests(self) -> None:
        for id, events in self._events.items():
            kinds = Counter(event.kind for event in events)
            by_runs = sum(
                self._told.possible("retry_run", run)
                for run, (experiment, _, _) in self._runs.items()
                if experiment == id
            )
            retried = kinds["experiment.retried"]
            if retried < self._told.requests["retry", id]:
                self.findings.add("lost", f"experiment {id}: retry was acknowledged, and has no event")
            if retried > self._told.possible("retry", id) + by_runs:
                self.findings.add("duplicated", f"experiment {id}: {retried} x experiment.retried")
            for act in ("cancel", "pause"):
                asked = self._told.requests[act, id]
                if asked and not any(kind.startswith(f"experiment.{act}") for kind in kinds):
                    ended = any(f"experiment.{state}" in kinds for state in _TERMINAL)
                    if not (act == "cancel" and ended):
                        self.findings.add(
                            "lost", f"experiment {id}: {act} was acknowledged, and has no event"
                        )
            again = Counter(event.run for event in events if event.kind == "run.retried")
            for run, (experiment, _, _) in self._runs.items():
                if experiment != id:
                    continue
                if again[run] < self._told.requests["retry_run", run]:
                    self.findings.add("lost", f"run {run}: retry was acknowledged, and has no event")
                if again[run] > self._told.possible("retry_run", run):
                    self.findings.add("duplicated", f"run {run}: {again[run]} x run.retried")
        for (act, id), count in self._told.requests.items():
            if act == "delete" and count and id in self._experiments:
                self.findings.add("lost", f"experiment {id} was deleted, and is there")

    def _orphans(self) -> None:
        for tables, owner, owners in (
            (_TABLES_OF_RUNS, "run_id", "runs"),
            (_TABLES_OF_EXPERIMENTS, "experiment_id", "experiments"),
        ):
            for table in tables:
                for (id,) in self._rows(
                    f"SELECT DISTINCT {owner} FROM {table} WHERE {owner} NOT IN (SELECT id FROM {owners})"
                ):
                    self.findings.add("stale_writes", f"{table} has rows of {owner} {id}, which is deleted")


class ProgressWatch:
    """Finds what does not move: an experiment is stuck that is as it was for longer than the patience.

    Args:
        patience_s: how long nothing may happen.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[int, tuple[object, float]] = {}
        self.longest_s = 0.0
        """The longest time without progress so far."""

    def look(self, now_s: float, signatures: Mapping[int, object]) -> list[int]:
        """Returns the experiments that are stuck.

        Args:
            now_s: monotonic time.
            signatures: something that changes with every progress, by experiment that has not ended.
        """
        stuck = []
        for id, signature in signatures.items():
            before, since_s = self._since.get(id, (None, now_s))
            if signature != before:
                since_s = now_s
            self._since[id] = signature, since_s
            self.longest_s = max(self.longest_s, now_s - since_s)
            if now_s - since_s > self._patience_s:
                stuck.append(id)
        return stuck


def _short(steps: Iterable[int]) -> str:
    listed = sorted(steps)
    return ", ".join(map(str, listed[:5])) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
