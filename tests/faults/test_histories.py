"""Random concurrent histories: schedulers, drivers and people at once, checked against the rules.

    python -m pytest tests/faults/test_histories.py --histories 1000

Actors know only what the store told them, as processes would: a driver holds an attempt until it
is told that it is stale, also when others have taken its experiment away meanwhile.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field

import sqlalchemy as sa

from service.domain.records import Experiment
from service.domain.states import (
    EXPERIMENT_TRANSITIONS,
    TERMINAL_RUN_STATES,
    ExperimentState,
    RunState,
)
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import Conflict, NewExperiment, NotFound, PointBatch, RecordBatch, StaleAttempt, Store
from tests.conformance.building import count, remove_deleted
from trainers.errors import FailureClass

ACTORS = 4
STEPS = 25


@dataclass
class CardSource:
    """What the store acknowledged to all actors."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    submitted: set[int] = field(default_factory=set)
    claimed: list[tuple[int, int]] = field(default_factory=list)
    opened: list[tuple[int, int]] = field(default_factory=list)
    ended: list[tuple[int, int, RunState]] = field(default_factory=list)
    points: dict[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    late: dict[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    """Of attempts that were over: kept until another opens."""
    closed: list[tuple[int, int]] = field(default_factory=list)


class Actor:
    """Scheduler, driver and person in one, acting at random on what it holds or has heard of."""

    def __init__(self, store: Store, told: CardSource, seed: int) -> None:
        self.store = store
        self.queue = Queue(store)
        self.told = told
        self.chance = random.Random(seed)
        self.name = f"actor{seed}"
        self.experiments: list[Experiment] = []
        self.runs: list[tuple[int, int, int]] = []  # (run, attempt, next step)
        self.failed: BaseException | None = None

    def act(self) -> None:
        """Do some things; what the store refuses is what it may refuse."""
        acts = [
            self.submit, self.claim, self.claim, self.drive, self.drive, self.drive, self.write, self.write,
            self.end_run, self.end_run, self.end_experiment, self.take_away, self.ask,
        ]  # fmt: skip
        try:
            for _ in range(STEPS):
                with suppress(StaleAttempt, Conflict):
                    self.chance.choice(acts)()
        except BaseException as error:
            self.failed = error

    def submit(self) -> None:
        spec = validate({"name": "h", "task": {"name": "imdb"}, "seeds": [0, 1]})
        owner = self.chance.choice(["ada", "bob"])
        experiment, _ = self.store.submissions.submit(
            NewExperiment(spec, list(spec.runs()), spec_text="", owner=owner)
        )
        with self.told.lock:
            self.told.submitted.add(experiment.id)

    def claim(self) -> None:
        for experiment in self.queue.claim(self.name, lease_s=30):
            with self.told.lock:
                self.told.claimed.append((experiment.id, experiment.attempt))
            self.experiments.append(experiment)
            self.store.drivers.started(experiment.id, experiment.attempt, self.name, 1)
            self.store.attempts.reset_runs_of_dead_attempt(experiment.id, experiment.attempt)

    def drive(self) -> None:
        if not self.experiments:
            return
        held = self.chance.choice(self.experiments)
        self.store.drivers.renew_lease(held.id, held.attempt, 30)
        for run in self.store.runs.page(experiment_id=held.id, filter="state = 'queued'").items:
            attempt = self.store.attempts.open(run.id, held.attempt)
            with self.told.lock:
                self.told.opened.append((run.id, attempt))
            self.runs.append((run.id, attempt, 0))
            self.store.attempts.run_started(run.id, attempt, total_steps=99, resumed_from_step=0, facts={})

    def write(self) -> None:
        if not self.runs:
            return
        place = self.chance.randrange(len(self.runs))
        run, attempt, step = self.runs[place]
        steps = [step, step + 1]
        stale = self.store.recording.record(
            RecordBatch(points=[PointBatch(run, attempt, "m", steps, [float(attempt)] * 2, [0.0] * 2)])
        )
        with self.told.lock:
            (self.told.late if stale else self.told.points)[run, attempt].update(steps)
        self.runs[place] = (run, attempt, step + 2)

    def end_run(self) -> None:
        if not self.runs:
            return
        run, attempt, _ = self.chance.choice(self.runs)
        state = self.chance.choice(
            [RunState.succeeded, RunState.failed, RunState.stopped, RunState.cancelled]
        )
        retry = 0.0 if state is RunState.failed and self.chance.random() < 0.5 else None
        failure = (FailureClass.bug, "x") if state is RunState.failed else None
        went = self.store.attempts.finish_run(run, attempt, state, failure=failure, retry_delay_s=retry)
        with self.told.lock:
            self.told.ended.append((run, attempt, went))

    def end_experiment(self) -> None:
        if not self.experiments:
            return
        held = self.chance.choice(self.experiments)
        state = self.chance.choice(
            [
                ExperimentState.succeeded,
                ExperimentState.incomplete,
                ExperimentState.failed,
                ExperimentState.paused,
            ]
        )
        self.store.drivers.finish_experiment(held.id, held.attempt, state)
        with self.told.lock:
            self.told.closed.append((held.id, held.attempt))

    def take_away(self) -> None:
        """What a scheduler does with an experiment whose driver seems dead, though it may live."""
        active = self.queue.active()
        if active:
            chosen = self.chance.choice(active)
            self.store.drivers.release_experiment(chosen.id, chosen.attempt, delay_s=0)
            with self.told.lock:
                self.told.closed.append((chosen.id, chosen.attempt))

    def ask(self) -> None:
        with self.told.lock:
            known = sorted(self.told.submitted)
        if known:
            request = self.chance.choice(
                [
                    self.store.requests.cancel,
                    self.store.requests.pause,
                    self.store.requests.resume,
                    self.store.requests.retry,
                ]
            )
            request(self.chance.choice(known))


def test_random_concurrent_histories_keep_the_rules(store: Store, histories: int) -> None:
    for history in range(histories):
        told = CardSource()
        actors = [Actor(store, told, 1000 * history + number) for number in range(ACTORS)]
        actors[0].submit()
        threads = [threading.Thread(target=actor.act) for actor in actors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for actor in actors:
            if actor.failed is not None:
                raise AssertionError(f"history {history}") from actor.failed
        check(store, told)
        clear(store)


def check(store: Store, told: CardSource) -> None:
    """Everything acknowledged is there, nothing happened twice, and every story follows the states."""
    for name, pairs in (("claimed", told.claimed), ("opened", told.opened), ("closed", told.closed)):
        twice = [pair for pair, times in Counter(pairs).items() if times > 1]
        assert not twice, f"{name} twice under one attempt: {twice}"
    ends = Counter((run, attempt) for run, attempt, _ in told.ended)
    assert max(ends.values(), default=1) == 1, "an attempt ended twice"

    for id in told.submitted:
        experiment = store.experiments.get(id)
        events = store.experiments.events(id, limit=10_000)
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        _check_story([event.kind for event in events], experiment.state)
        assert Counter(event.kind for event in events)["experiment.claimed"] == experiment.attempt
        for run in store.runs.page(experiment_id=id).items:
            attempts = store.runs.attempts(run.id)
            assert [attempt.number for attempt in attempts] == list(range(1, run.attempt + 1))
            open_ones = [attempt.number for attempt in attempts if attempt.ended_s is None]
            active = run.state in (RunState.starting, RunState.running)
            assert open_ones == ([run.attempt] if active else []), "an old attempt is still open"
        assert store.accounting.wrong_usage(id) == [], "running sums differ from what they sum up"
    for run, attempt, went in told.ended:
        if went in TERMINAL_RUN_STATES:
            kinds = [e.kind for e in store.experiments.events(store.runs.get(run).experiment_id, limit=10_000)
                     if (e.run_id, e.attempt) == (run, attempt)]  # fmt: skip
            assert kinds.count(f"run.{went}") >= 1
    with store.database.read() as connection:
        found: dict[tuple[int, int], set[int]] = defaultdict(set)
        for row in connection.execute(sa.text("SELECT run_id, attempt, step, value FROM points")):
            assert row.value == row.attempt
            found[row.run_id, row.attempt].add(row.step)
    for place in found.keys() | told.points.keys():
        assert told.points[place] <= found[place] <= told.points[place] | told.late[place], place


_MOVES = {
    "experiment.claimed": ExperimentState.starting,
    "experiment.started": ExperimentState.running,
    "experiment.released": ExperimentState.queued,
    "experiment.retried": ExperimentState.queued,
    "experiment.paused": ExperimentState.paused,
    "experiment.succeeded": ExperimentState.succeeded,
    "experiment.incomplete": ExperimentState.incomplete,
    "experiment.failed": ExperimentState.failed,
    "experiment.cancelled": ExperimentState.cancelled,
}


def _check_story(kinds: list[str], last: ExperimentState) -> None:
    state = ExperimentState.queued
    for kind in kinds:
        target = _MOVES.get(kind)
        if kind == "experiment.resumed" and state is ExperimentState.paused:
            target = ExperimentState.queued
        if target is not None:
            assert target in EXPERIMENT_TRANSITIONS[state], f"{state} -> {target} in {kinds}"
            state = target
    assert state is last


def clear(store: Store) -> None:
    """End and delete everything."""
    queue = Queue(store)
    for experiment in queue.active():
        store.drivers.finish_experiment(experiment.id, experiment.attempt, ExperimentState.cancelled)
    for experiment in store.experiments.page(page_size=1000).items:
        try:
            store.requests.cancel(experiment.id)
            store.removal.delete(experiment.id, at_once=True)
        except NotFound:
            continue
    remove_deleted(store)
    assert count(store, "points") == count(store, "runs") == count(store, "events") == 0
