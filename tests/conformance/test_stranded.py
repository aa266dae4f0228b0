"""No run is left behind: whatever people ask for and drivers report, in whatever order, every run goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import hypothesis
import pytest
import sqlalchemy as sa
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from service.domain.records import Experiment, Placement, Run
from service.domain.states import (
    TERMINAL_EXPERIMENT_STATES,
    TERMINAL_RUN_STATES,
    ExperimentState,
    RunState,
)
from service.scheduling.queue import Queue
from service.store import Conflict, NewExperiment, NotFound, StaleAttempt, Store
from tests.conformance.building import Submit, plans_of
from trainers.errors import FailureClass

Running = Callable[..., tuple[Experiment, list[Run]]]
Training = Callable[..., tuple[Experiment, Run, int]]

BUG = (FailureClass.bug, "IndexError")


def states_of(store: Store, experiment_id: int) -> list[RunState]:
    return [run.state for run in store.runs.page(experiment_id=experiment_id).items]


# -- Pause, then resume ----------------------------------------------------------------------


def test_a_withdrawn_pause_queues_the_runs_that_have_stopped_for_it(store: Store, running: Running) -> None:
    experiment, (first, second) = running(2)
    for run in (first, second):
        store.attempts.open(run.id, 1)
        store.attempts.run_started(run.id, 1, total_steps=9, resumed_from_step=0, facts={})
    store.requests.pause(experiment.id)
    assert store.attempts.finish_run(first.id, 1, RunState.paused) is RunState.paused
    store.requests.resume(experiment.id)
    assert states_of(store, experiment.id) == [RunState.queued, RunState.running]
    assert (
        store.experiments.events(experiment.id)[-1].message
        == "pause request withdrawn; 1 paused run queued again"
    )
    assert store.attempts.open(first.id, 1) == 2


def test_a_run_that_stops_for_a_withdrawn_pause_is_queued_again(store: Store, training: Training) -> None:
    experiment, run, attempt = training()
    store.requests.pause(experiment.id)
    store.requests.resume(experiment.id)
    assert store.attempts.finish_run(run.id, attempt, RunState.paused) is RunState.queued
    event = store.experiments.events(experiment.id)[-1]
    assert (event.kind, event.message) == (
        "run.resumed",
        "attempt 1 paused, but the request was withdrawn; queued again",
    )
    assert store.attempts.open(run.id, 1) == 2


def test_a_run_that_stops_for_a_cancellation_before_its_retry_is_queued_again(
    store: Store, training: Training
) -> None:
    """The worker of attempt 2 hears the stop that was meant for attempt 1."""
    _, run, attempt = training()
    store.requests.cancel_run(run.id)
    assert store.attempts.finish_run(run.id, attempt, RunState.cancelled) is RunState.cancelled
    store.requests.retry_run(run.id)
    store.attempts.open(run.id, 1)
    assert store.attempts.finish_run(run.id, 2, RunState.cancelled) is RunState.queued


def test_a_withdrawn_pause_is_not_carried_out(store: Store, running: Running) -> None:
    experiment, (run,) = running()
    store.requests.pause(experiment.id)
    store.requests.resume(experiment.id)
    with pytest.raises(Conflict, match="withdrawn"):
        store.drivers.finish_experiment(experiment.id, 1, ExperimentState.paused, on_request=True)
    assert store.experiments.get(experiment.id).state is ExperimentState.running
    store.requests.pause(experiment.id)
    store.drivers.finish_experiment(experiment.id, 1, ExperimentState.paused, on_request=True)
    assert store.runs.get(run.id).state is RunState.paused


@pytest.mark.parametrize(
    ("end", "left"),
    [
        (ExperimentState.succeeded, RunState.stopped),
        (ExperimentState.incomplete, RunState.stopped),
        (ExperimentState.failed, RunState.failed),
    ],
)
def test_paused_runs_end_with_their_experiment(
    store: Store, training: Training, end: ExperimentState, left: RunState
) -> None:
    experiment, run, attempt = training()
    store.requests.pause(experiment.id)
    store.attempts.finish_run(run.id, attempt, RunState.paused)
    store.drivers.finish_experiment(experiment.id, 1, end)
    assert store.runs.get(run.id).state is left
    assert store.requests.retry(experiment.id).state is ExperimentState.queued


# -- A retry while the experiment ends -------------------------------------------------------


def test_an_experiment_does_not_end_over_a_run_that_was_retried(store: Store, training: Training) -> None:
    experiment, run, attempt = training()
    store.attempts.finish_run(run.id, attempt, RunState.failed, failure=BUG)
    store.requests.retry_run(run.id)
    with pytest.raises(Conflict, match="has 1 runs that have not ended"):
        store.drivers.finish_experiment(experiment.id, 1, ExperimentState.failed, failure=BUG, all_ended=True)
    assert store.runs.get(run.id).state is RunState.queued
    assert store.experiments.get(experiment.id).state is ExperimentState.running


# -- Runs that a dead driver has left --------------------------------------------------------


@pytest.mark.parametrize("ask", ["cancel", "pause"])
def test_what_a_dead_driver_left_goes_with_an_experiment_that_waits(
    store: Store, running: Running, ask: str
) -> None:
    experiment, (first, second) = running(2)
    for run in (first, second):
        store.attempts.open(run.id, 1)
    store.attempts.run_started(first.id, 1, total_steps=9, resumed_from_step=0, facts={})
    held = Placement("p", "cpu", 1, 1, 0.1, 5.0, placed_s=1.0, ready_s=None, released_s=None, seen_s=2.0)
    store.drivers.record_placements(experiment.id, 1, [held])
    store.drivers.release_experiment(experiment.id, 1, delay_s=0)
    went = getattr(store.requests, ask)(experiment.id).state
    assert states_of(store, experiment.id) == [RunState(str(went))] * 2
    assert [attempt.ended_s is None for attempt in store.runs.attempts(first.id)] == [False]
    assert store.drivers.held_by_others(0) == []


def test_the_answer_of_an_opened_attempt_can_be_asked_for_again(store: Store, running: Running) -> None:
    experiment, (run,) = running()
    assert store.attempts.open(run.id, 1, number=1) == 1
    store.requests.pause(experiment.id)
    assert store.attempts.open(run.id, 1, number=1) == 1
    assert len(store.runs.attempts(run.id)) == 1
    store.attempts.run_started(run.id, 1, total_steps=9, resumed_from_step=0, facts={})
    with pytest.raises(Conflict):
        store.attempts.open(run.id, 1, number=1)


def test_an_attempt_is_opened_under_the_next_number_alone(store: Store, running: Running) -> None:
    _, (run,) = running()
    with pytest.raises(Conflict, match="the next attempt is 1, not 2"):
        store.attempts.open(run.id, 1, number=2)


def test_runs_that_no_worker_has_are_queued_again(store: Store, running: Running) -> None:
    experiment, (first, second, third) = running(3)
    for run in (first, second, third):
        store.attempts.open(run.id, 1)
    store.requests.cancel_run(second.id)
    with pytest.raises(StaleAttempt):
        store.attempts.reset_runs_without_worker(experiment.id, 2, alive=())
    assert store.attempts.reset_runs_without_worker(experiment.id, 1, alive={third.id}) == [
        first.id,
        second.id,
    ]
    assert states_of(store, experiment.id) == [RunState.queued, RunState.cancelled, RunState.starting]
    assert store.runs.attempts(first.id)[0].failure_class is FailureClass.lost
    assert store.attempts.open(first.id, 1) == 2


def test_a_run_that_nothing_can_train_fails_in_one_step(store: Store, running: Running) -> None:
    experiment, (run,) = running()
    failure = (FailureClass.bad_spec, "no node has 9 CPUs")
    store.attempts.refuse_run(run.id, 1, failure)
    found = store.runs.get(run.id)
    assert (found.state, found.attempt, found.failure_message) == (RunState.failed, 1, failure[1])
    (tried,) = store.runs.attempts(run.id)
    assert (tried.state, tried.started_s == tried.ended_s) == (RunState.failed, True)
    assert store.experiments.events(experiment.id)[-1].message == "failed: bad_spec: no node has 9 CPUs"
    with pytest.raises(Conflict, match="only a queued run"):
        store.attempts.refuse_run(run.id, 1, failure)
    with pytest.raises(StaleAttempt):
        store.attempts.refuse_run(run.id, 2, failure)


# -- The database's own guard ----------------------------------------------------------------


def execute(store: Store, statement: str) -> None:
    store.database.write(lambda connection: connection.execute(sa.text(statement)))


@pytest.mark.parametrize("ended", sorted(TERMINAL_EXPERIMENT_STATES))
def test_the_database_refuses_to_end_an_experiment_before_its_runs(
    store: Store, submit: Submit, ended: ExperimentState
) -> None:
    experiment = submit(2)
    execute(store, "UPDATE runs SET state = 'succeeded' WHERE \"index\" = 0")
    for state in sorted(frozenset(RunState) - TERMINAL_RUN_STATES):
        execute(store, f"UPDATE runs SET state = '{state}' WHERE \"index\" = 1")
        with pytest.raises(sa.exc.IntegrityError, match="cannot end before its runs"):
            execute(store, f"UPDATE experiments SET state = '{ended}'")
    assert store.experiments.get(experiment.id).state is ExperimentState.queued
    execute(store, "UPDATE runs SET state = 'failed' WHERE \"index\" = 1")
    execute(store, f"UPDATE experiments SET state = '{ended}'")


@pytest.mark.parametrize("state", sorted(frozenset(RunState) - TERMINAL_RUN_STATES))
def test_the_database_refuses_a_run_that_waits_in_an_experiment_that_has_ended(
    store: Store, submit: Submit, state: RunState
) -> None:
    experiment = submit()
    store.requests.cancel(experiment.id)
    with pytest.raises(sa.exc.IntegrityError, match="cannot wait in an experiment that has ended"):
        execute(store, f"UPDATE runs SET state = '{state}'")
    assert states_of(store, experiment.id) == [RunState.cancelled]


@pytest.mark.parametrize(
    "database_url", [pytest.param("postgresql", marks=pytest.mark.postgresql)], indirect=True
)
def test_the_guard_holds_between_transactions_that_do_not_see_each_other(
    store: Store, training: Training
) -> None:
    """One queues a run and has not committed; the other, which cannot see that, waits."""
    _, run, attempt = training()
    store.attempts.finish_run(run.id, attempt, RunState.failed, failure=BUG)
    with store.database.writers.connect() as first, store.database.writers.connect() as second:
        with first.begin():
            first.execute(sa.text("UPDATE runs SET state = 'queued'"))
            with pytest.raises(sa.exc.OperationalError, match="lock timeout"), second.begin():
                second.execute(sa.text("SET LOCAL lock_timeout = 20"))
                second.execute(sa.text("UPDATE experiments SET state = 'failed'"))
        with pytest.raises(sa.exc.IntegrityError), second.begin():
            second.execute(sa.text("UPDATE experiments SET state = 'failed'"))


# -- All interleavings -----------------------------------------------------------------------

REFUSED = (Conflict, StaleAttempt, NotFound)
"""What the store may answer to those who act on what they last saw."""
ENDS = [
    RunState.succeeded,
    RunState.failed,
    RunState.stopped,
    RunState.cancelled,
    RunState.paused,
]
LEAVES = sorted(TERMINAL_EXPERIMENT_STATES | {ExperimentState.paused})
PICK = st.integers(0, 5)


@dataclass
class Driver:
    """What the driver of an attempt knows; it acts on that also when another attempt is current."""

    experiment_id: int
    attempt: int
    opened: list[tuple[int, int]] = field(default_factory=list)


class Interleavings(RuleBasedStateMachine):
    """People, schedulers and drivers, also abandoned ones, act in any order on what they remember."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store, self.queue = store, Queue(store)
        self.ids: list[int] = []
        self.drivers: list[Driver] = []
        self.submit(2)

    # What people do.

    @precondition(lambda self: len(self.ids) < 2)
    @rule(runs=st.integers(1, 3))
    def submit(self, runs: int) -> None:
        spec, plans, text = plans_of(runs)
        self.ids.append(
            self.store.submissions.submit(NewExperiment(spec, plans, spec_text=text, owner="ada"))[0].id
        )

    @rule(
        pick=PICK,
        request=st.sampled_from(
            ["requests.pause", "requests.resume", "requests.cancel", "requests.retry", "removal.delete"]
        ),
    )
    def ask_of_experiment(self, pick: int, request: str) -> None:
        with suppress(*REFUSED):
            attrgetter(request)(self.store)(self.ids[pick % len(self.ids)])

    @rule(pick=PICK, place=PICK, request=st.sampled_from(["cancel_run", "retry_run"]))
    def ask_of_run(self, pick: int, place: int, request: str) -> None:
        runs = self.runs_of(self.ids[pick % len(self.ids)])
        if runs:
            with suppress(*REFUSED):
                getattr(self.store.requests, request)(runs[place % len(runs)].id)

    # What schedulers and drivers do.

    @rule()
    def claim(self) -> None:
        for claimed in self.queue.claim("s", lease_s=30, limit=9):
            self.drivers.append(Driver(claimed.id, claimed.attempt))

    @rule(pick=PICK)
    def begin(self, pick: int) -> None:
        if driver := self.driver(pick):
            with suppress(*REFUSED):
                self.store.drivers.started(driver.experiment_id, driver.attempt, "node", 1)
                self.store.attempts.reset_runs_of_dead_attempt(driver.experiment_id, driver.attempt)

    @rule(pick=PICK, place=PICK, answer_lost=st.booleans())
    def open(self, pick: int, place: int, answer_lost: bool) -> None:
        driver = self.driver(pick)
        if driver and (runs := self.runs_of(driver.experiment_id)):
            run = runs[place % len(runs)]
            with suppress(*REFUSED):
                number = self.store.attempts.open(run.id, driver.attempt, number=run.attempt + 1)
                if not answer_lost:
                    driver.opened.append((run.id, number))

    @rule(pick=PICK, place=PICK)
    def refuse(self, pick: int, place: int) -> None:
        driver = self.driver(pick)
        if driver and (runs := self.runs_of(driver.experiment_id)):
            with suppress(*REFUSED):
                self.store.attempts.refuse_run(runs[place % len(runs)].id, driver.attempt, BUG)

    @rule(pick=PICK, place=PICK)
    def train(self, pick: int, place: int) -> None:
        driver = self.driver(pick)
        if driver and driver.opened:
            run_id, number = driver.opened[place % len(driver.opened)]
            with suppress(*REFUSED):
                self.store.attempts.run_started(run_id, number, total_steps=9, resumed_from_step=0, facts={})

    @rule(pick=PICK, place=PICK, state=st.sampled_from(ENDS), retry=st.booleans())
    def end(self, pick: int, place: int, state: RunState, retry: bool) -> None:
        driver = self.driver(pick)
        if driver and driver.opened:
            run_id, number = driver.opened[place % len(driver.opened)]
            failure = BUG if state is RunState.failed else None
            with suppress(*REFUSED):
                self.store.attempts.finish_run(
                    run_id, number, state, failure=failure, retry_delay_s=0.0 if failure and retry else None
                )

    @rule(pick=PICK)
    def recover(self, pick: int) -> None:
        if driver := self.driver(pick):
            with suppress(*REFUSED):
                self.store.attempts.reset_runs_without_worker(
                    driver.experiment_id, driver.attempt, {run_id for run_id, _ in driver.opened}
                )

    @rule(pick=PICK)
    def conclude(self, pick: int) -> None:
        """The driver believes that all runs have ended."""
        if driver := self.driver(pick):
            before = [(run.id, run.state) for run in self.runs_of(driver.experiment_id)]
            with suppress(*REFUSED):
                self.finish(driver, ExperimentState.succeeded, all_ended=True)
                assert [(run.id, run.state) for run in self.runs_of(driver.experiment_id)] == before

    @rule(pick=PICK, state=st.sampled_from(LEAVES))
    def give_up(self, pick: int, state: ExperimentState) -> None:
        """A budget was reached, a stop requested, or the scheduler has seen too many failures."""
        if driver := self.driver(pick):
            with suppress(*REFUSED):
                self.finish(driver, state, on_request=True)

    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        if driver := self.driver(pick):
            with suppress(*REFUSED):
                self.store.drivers.release_experiment(driver.experiment_id, driver.attempt, delay_s=0.0)

    # What always holds.

    @invariant()
    def no_run_is_stranded(self) -> None:
        for id in self.ids:
            with suppress(NotFound):
                experiment = self.store.experiments.get(id)
                for run in self.runs_of(id):
                    self.check(experiment, run)
                numbers = [event.number for event in self.store.experiments.events(id, limit=10_000)]
                assert numbers == list(range(1, len(numbers) + 1))

    def check(self, experiment: Experiment, run: Run) -> None:
        active = run.state in (RunState.starting, RunState.running)
        if experiment.state in TERMINAL_EXPERIMENT_STATES:
            assert run.state in TERMINAL_RUN_STATES
        if experiment.state is ExperimentState.paused:
            assert not active
        if run.state is RunState.paused and experiment.state is not ExperimentState.paused:
            assert experiment.state in (ExperimentState.starting, ExperimentState.running)
            assert experiment.pause_requested_s is not None
        open_ones = [
            attempt.number for attempt in self.store.runs.attempts(run.id) if attempt.ended_s is None
        ]
        assert open_ones == ([run.attempt] if active else [])

    def teardown(self) -> None:
        """From wherever it is, everything ends once people resume and drivers work."""
        for _ in range(3):
            for id in self.ids:
                with suppress(*REFUSED):
                    self.store.requests.resume(id)
            self.claim()
            for driver in self.drivers:
                with suppress(*REFUSED):
                    self.carry_out(driver)
        for id in self.ids:
            with suppress(NotFound):
                assert self.store.experiments.get(id).state in TERMINAL_EXPERIMENT_STATES
                assert all(run.state in TERMINAL_RUN_STATES for run in self.runs_of(id))
                self.store.removal.delete(id)

    def carry_out(self, driver: Driver) -> None:
        id, attempt = driver.experiment_id, driver.attempt
        self.store.drivers.started(id, attempt, "node", 1)
        self.store.attempts.reset_runs_of_dead_attempt(id, attempt)
        self.store.attempts.reset_runs_without_worker(id, attempt, alive=())
        if self.store.experiments.get(id).cancel_requested_s is not None:
            self.finish(driver, ExperimentState.cancelled)
            return
        for run in self.runs_of(id):
            if run.state is RunState.queued:
                number = self.store.attempts.open(run.id, attempt)
                self.store.attempts.run_started(run.id, number, total_steps=9, resumed_from_step=0, facts={})
                self.store.attempts.finish_run(run.id, number, RunState.succeeded)
        self.finish(driver, ExperimentState.succeeded, all_ended=True)

    # Of use above.

    def driver(self, pick: int) -> Driver | None:
        return self.drivers[-1 - pick % len(self.drivers)] if self.drivers else None

    def runs_of(self, id: int) -> list[Run]:
        try:
            return self.store.runs.page(experiment_id=id).items
        except NotFound:
            return []  # Deleted.

    def finish(self, driver: Driver, state: ExperimentState, **checks: Any) -> None:
        self.store.drivers.finish_experiment(driver.experiment_id, driver.attempt, state, **checks)


def interleave(store: Store, examples: int, steps: int = 40) -> None:
    run_state_machine_as_test(
        lambda: Interleavings(store),
        settings=hypothesis.settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )


def test_no_interleaving_strands_a_run(store: Store) -> None:
    interleave(store, 3)


@pytest.mark.slow
def test_none_of_many_interleavings_strands_a_run(store: Store) -> None:
    interleave(store, 40)
