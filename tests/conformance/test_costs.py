"""What several experiments cost so far and will cost, by one statement each for all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from service.domain.records import Experiment, ExperimentCost, Run
from service.domain.states import ExperimentState, RunState
from service.store import AliveRow, ProgressRow, RecordBatch, Store
from tests.conformance.building import Submit

HOUR_USD = 0.05


def advance(store: Store, run: Run, attempt: int, step: int) -> None:
    store.recording.record(RecordBatch(progress=[ProgressRow(run.id, attempt, step, 100, "training")]))


def test_the_rest_is_forecast_from_what_its_own_runs_cost(
    store: Store, submit: Submit, running: Callable[..., tuple[Experiment, list[Run]]]
) -> None:
    now = 1_000_000.0
    store.clocks.simulated = lambda: now
    experiment, runs = running(4)
    waiting = submit(2)
    assert store.accounting.costs([experiment.id, waiting.id]) == {
        experiment.id: ExperimentCost(0.0, None),
        waiting.id: ExperimentCost(0.0, None),
    }
    attempts = [store.attempts.open(run.id, experiment.attempt) for run in runs[:2]]
    for run, attempt in zip(runs, attempts, strict=False):
        store.attempts.run_started(run.id, attempt, total_steps=100, resumed_from_step=0, facts={})
    now += 3600.0
    store.attempts.finish_run(
        runs[0].id, attempts[0], RunState.succeeded, summary={"cost_usd": HOUR_USD, "total_time_s": 3600.0}
    )
    advance(store, runs[1], attempts[1], 25)
    cost = store.accounting.costs([experiment.id])[experiment.id]
    assert cost.so_far_usd == pytest.approx(store.accounting.totals(experiment.id).cost_usd)
    assert cost.so_far_usd == pytest.approx(2 * HOUR_USD)
    # One has 3 h to go; two wait, and cost the mean of one that took 1 h and one that will have taken 4 h.
    assert cost.rest_usd == pytest.approx((3 + 2 * 2.5) * HOUR_USD)


def test_a_resumed_run_is_judged_by_its_present_attempt(
    store: Store, training: Callable[..., tuple[Experiment, Run, int]]
) -> None:
    now = 1_000_000.0
    store.clocks.simulated = lambda: now
    experiment, run, attempt = training()
    now += 36_000.0
    store.attempts.finish_run(run.id, attempt, RunState.queued, retry_delay_s=0.0)
    second = store.attempts.open(run.id, experiment.attempt)
    store.attempts.run_started(run.id, second, total_steps=100, resumed_from_step=80, facts={})
    now += 3600.0
    advance(store, run, second, 90)
    assert store.accounting.costs([experiment.id])[experiment.id].rest_usd == pytest.approx(HOUR_USD)


def test_what_has_ended_costs_nothing_more(
    store: Store, training: Callable[..., tuple[Experiment, Run, int]]
) -> None:
    experiment, run, attempt = training()
    store.attempts.finish_run(run.id, attempt, RunState.succeeded)
    store.drivers.finish_experiment(experiment.id, experiment.attempt, ExperimentState.succeeded)
    assert store.accounting.costs([experiment.id])[experiment.id].rest_usd == 0.0


def test_costs_take_as_many_statements_for_one_experiment_as_for_many(store: Store, submit: Submit) -> None:
    ids = [submit().id for _ in range(5)]
    statements: list[str] = []
    sa.event.listen(
        store.database.readers, "before_cursor_execute", lambda _c, _k, text, *_: statements.append(text)
    )
    counts = []
    for some in (ids[:1], ids):
        statements.clear()
        store.accounting.costs(some)
        counts.append(sum("attempt_usage" in text for text in statements))
    assert counts == [2, 2]


def test_a_new_attempt_is_told_when_those_before_it_lived(
    store: Store, training: Callable[..., tuple[Experiment, Run, int]]
) -> None:
    now = 1_000_000.0
    store.clocks.simulated = lambda: now
    experiment, run, first = training()
    now += 60.0
    store.recording.record(RecordBatch(alive=[AliveRow(run.id, first, now)]))
    now += 60.0
    store.attempts.finish_run(run.id, first, RunState.queued, retry_delay_s=0.0)
    second = store.attempts.open(run.id, experiment.attempt)
    third = second + 1
    lives = ((1_000_000.0, 1_000_060.0), (1_000_120.0, 1_000_120.0))
    assert store.runs.lives(run.id, first, third) == lives
    assert store.runs.lives(run.id, second, third) == lives[1:]
    assert store.runs.lives(run.id, first, second) == lives[:1]
