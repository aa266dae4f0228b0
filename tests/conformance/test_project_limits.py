"""Limits of projects are stored with an audit row, and hold at submission and in a pass."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from service.config.document import SpecError
from service.scheduling.fair_pass import FairPass
from service.scheduling.queue import Queue
from service.specs.project_limits import NO_LIMITS, ProjectLimits
from service.store import BadValue, Conflict, NewExperiment, NotFound, Store
from tests.conformance.building import Submit, plans_of
from tests.conformance.test_allowances import CLUSTER, allowances, hold, started


def test_limits_are_stored_with_what_they_were(store: Store) -> None:
    store.projects.create("nlp")
    assert store.projects.limits("nlp") == NO_LIMITS
    limits = ProjectLimits(weight=2.0, guaranteed={"cpu": 2}, ceiling={"cpu": 4})
    assert store.projects.set_limits("nlp", limits) == limits == store.projects.limits("nlp")
    (row,) = store.audit.page(action="project.limits").items
    assert row.before == {"weight": 1.0, "guaranteed": {}, "ceiling": {}}
    assert row.after == {"weight": 2.0, "guaranteed": {"cpu": 2}, "ceiling": {"cpu": 4}}


def test_only_the_fields_that_may_be_set_are(store: Store) -> None:
    store.projects.create("nlp")
    store.projects.set_limits("nlp", ProjectLimits(weight=2.0))
    new = ProjectLimits.model_validate({"weight": 9.0, "priorities": {"member": "low"}})
    changed = store.projects.set_limits("nlp", new, fields={"priorities"})
    assert (changed.weight, dict(changed.priorities)) == (2.0, {"member": "low"})


def test_what_is_wrong_changes_nothing(store: Store, queue: Queue, submit: Submit) -> None:
    submit(4)
    experiment = started(store, queue)
    hold(store, experiment.id, 2, since_s=store.clock())
    with pytest.raises(BadValue, match="below the 2 in use"):
        store.projects.set_limits("default", ProjectLimits(ceiling={"cpu": 1}))
    with pytest.raises(BadValue, match="not in the catalogue"):
        store.projects.set_limits("default", ProjectLimits(guaranteed={"warp": 1}))
    assert store.projects.limits("default") == NO_LIMITS
    with pytest.raises(NotFound):
        store.projects.set_limits("none", NO_LIMITS)
    store.projects.create("old")
    store.projects.archive("old")
    with pytest.raises(Conflict, match="archived"):
        store.projects.set_limits("old", ProjectLimits(weight=2.0))


def test_queued_runs_of_a_user_stay_within_the_cap(store: Store, submit: Submit) -> None:
    submit(3)
    submit(9, owner="bob")
    spec, plans, written = plans_of(2, 50)
    with pytest.raises(SpecError, match="5 queued runs of ada are more than the 4"):
        store.submissions.submit(NewExperiment(spec, plans, spec_text=written, owner="ada", most_queued=4))
    assert store.projects.queued_runs_of("default", "ada") == 3
    assert store.submissions.submit(
        NewExperiment(spec, plans, spec_text=written, owner="ada", most_queued=5)
    )[1]


@pytest.mark.parametrize("request_of", ["retry", "retry_run", "retry_disturbed", "resume"])
def test_runs_that_are_queued_again_count_for_the_cap(store: Store, submit: Submit, request_of: str) -> None:
    experiment = submit(2)
    (first, _) = (run.id for run in store.runs.page(experiment_id=experiment.id).items)
    if request_of == "resume":
        store.requests.pause(experiment.id)
    else:
        store.requests.cancel(experiment.id)
    if request_of == "retry_disturbed":
        disturbed = "UPDATE runs SET state = 'succeeded', neighbours_foreign_pct = 60 WHERE id = :run"
        store.database.write(lambda connection: connection.execute(text(disturbed), {"run": first}))
    submit(3)
    store.projects.set_limits("default", ProjectLimits(queued_runs_per_user=3))
    before = store.experiments.get(experiment.id)
    ask, of = getattr(store.requests, request_of), first if request_of == "retry_run" else experiment.id
    with pytest.raises(Conflict) as refused:
        ask(of)
    more = 1 if request_of in ("retry_run", "retry_disturbed") else 2
    assert str(refused.value) == (
        f"{3 + more} queued runs of ada are more than the 3 that project default allows a user (3 are "
        f"queued, {more} would be added); wait, queue fewer, or ask an administrator to raise "
        "queued_runs_per_user"
    )
    assert store.experiments.get(experiment.id) == before
    assert store.projects.queued_runs_of("default", "ada") == 3
    submit(9, owner="bob")
    store.projects.set_limits("default", ProjectLimits(queued_runs_per_user=3 + more))
    ask(of)
    assert store.projects.queued_runs_of("default", "ada") == 3 + more


def test_a_users_runs_at_a_time_stay_within_the_cap(store: Store, queue: Queue, submit: Submit) -> None:
    store.projects.set_limits("default", ProjectLimits(concurrent_runs_per_user=1))
    grid = submit(20)
    started(store, queue)
    fair_pass = FairPass(store)
    fair_pass.divide(CLUSTER, queue.active(), 3)
    allowed = allowances(store, grid.id)["cpu"]
    assert allowed.devices == 1
    assert allowed.reason == "ada has 1 of 1 runs at a time in project default"
