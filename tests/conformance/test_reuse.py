"""Runs that take the figures of others: stored with their experiment, charged once, read through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.domain.states import ExperimentState, RunState
from service.specs.reuse import Reuse, config_sha256
from service.store import Conflict, NewExperiment, PointBatch, RecordBatch, Store
from tests.conformance.building import Submit, plans_of

FACTS = {"data": {"train.sha256": "abc"}, "student_sha256": None}
FIGURES = {"accuracy": 0.9, "cost_usd": 2.0, "energy_kwh": 0.5, "total_time_s": 60.0, "rare_figure": 7.0}


@pytest.fixture
def source(store: Store, running: Callable[..., Any]) -> int:
    """A run that has succeeded, with a curve, a record and a summary."""
    experiment, (run,) = running(1)
    attempt = store.attempts.open(run.id, experiment.attempt)
    store.attempts.run_started(run.id, attempt, total_steps=9, resumed_from_step=0, facts=FACTS)
    store.recording.record(RecordBatch(points=[PointBatch(run.id, attempt, "loss", [9], [0.25], [1.0])]))
    store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary=FIGURES)
    store.drivers.finish_experiment(experiment.id, experiment.attempt, ExperimentState.succeeded)
    return int(run.id)


def submit_reusing(store: Store, runs: int, reuse: Reuse) -> int:
    spec, plans, text = plans_of(runs)
    return store.submissions.submit(NewExperiment(spec, plans, spec_text=text, owner="ada", reuse=reuse))[
        0
    ].id


def test_a_reused_run_shows_the_figures_of_the_other_and_is_not_charged(store: Store, source: int) -> None:
    id = submit_reusing(store, 2, Reuse({0: source}, {1: "run 9 has other data"}))
    first, second = store.runs.page(experiment_id=id).items
    assert (first.state, first.reused_from, first.accuracy) == (RunState.succeeded, source, 0.9)
    assert (first.attempt, second.state, second.reused_from) == (0, RunState.queued, None)
    assert store.runs.summary(first.id) == FIGURES
    assert [point.value for point in store.series.points(first.id)["loss"]] == [0.25]
    assert [point.value for point in store.series.latest_points(first.id)] == [0.25]
    assert store.runs.attempts(first.id)[0].facts == FACTS
    totals = store.accounting.totals(id)
    assert (totals.cost_usd, totals.energy_kwh, totals.device_hours) == (0, 0, 0)
    assert store.experiments.reused_count(id) == 1
    told = {event.kind: event.message for event in store.experiments.events(id)}
    assert told["experiment.note"] == "not reused: run 9 has other data"
    assert f"run {source} of experiment" in told["run.reused"]
    assert store.experiments.get(id).state is ExperimentState.queued


def test_equal_runs_are_found_by_their_settings_and_reused_ones_are_not(store: Store, source: int) -> None:
    _, plans, _ = plans_of(1, priority=99)
    submit_reusing(store, 1, Reuse({0: source}))
    (found,) = store.runs.equal([config_sha256(plans[0].spec, plans[0].spec.pricing()), "another"])
    assert (found.run_id, found.seed, found.facts) == (source, 0, FACTS)
    assert store.runs.equal([]) == []


def test_an_experiment_whose_every_run_is_reused_has_ended(store: Store, source: int) -> None:
    spec, plans, text = plans_of(1)
    experiment, created = store.submissions.submit(
        NewExperiment(spec, plans, spec_text=text, owner="ada", reuse=Reuse({0: source}))
    )
    assert (experiment.state, created) == (ExperimentState.succeeded, True)
    assert experiment.ended_s is not None
    with pytest.raises(Conflict, match="nothing to retry"):
        store.requests.retry(experiment.id)


def test_what_is_reused_is_not_deleted_before_the_reuse(store: Store, source: int) -> None:
    id = submit_reusing(store, 1, Reuse({0: source}))
    original = store.runs.get(source).experiment_id
    with pytest.raises(Conflict, match=f"experiment {id} reuses run {source}"):
        store.removal.delete(original)
    store.removal.delete(id)
    store.removal.delete(original)


def test_a_run_that_is_gone_meanwhile_is_trained(store: Store, submit: Submit, source: int) -> None:
    store.removal.delete(store.runs.get(source).experiment_id)
    id = submit_reusing(store, 1, Reuse({0: source}))
    (run,) = store.runs.page(experiment_id=id).items
    assert (run.state, run.reused_from) == (RunState.queued, None)
