"""The audit log: every change has its row, and no row changes or goes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from service.domain.access import Actor
from service.domain.events import EventKind, Topic
from service.domain.records import Experiment, Run
from service.domain.states import ExperimentState, RunState
from service.store import Conflict, Store
from tests.conformance.building import Submit

ADA, BOB = Actor("ada", 1, "192.0.2.1"), Actor("bob")
SESSION = Actor("ada")


SQLITE_ONLY = (
    "INSERT OR REPLACE INTO audit (id, at_s, actor, action, object_kind, object_id) "
    "VALUES (1, 0, 'eve', 'token.create', 'token', '1')",
    "REPLACE INTO audit (id, at_s, actor, action, object_kind, object_id) "
    "VALUES (1, 0, 'eve', 'token.create', 'token', '1')",
    "UPDATE OR REPLACE audit SET actor = 'eve'",
)
POSTGRESQL_ONLY = ("TRUNCATE audit", "TRUNCATE audit RESTART IDENTITY CASCADE")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET actor = 'eve'",
        "UPDATE audit SET id = id + 1",
        "DELETE FROM audit",
        "INSERT INTO audit (id, at_s, actor, action, object_kind, object_id) "
        "VALUES (1, 0, 'eve', 'token.create', 'token', '1') ON CONFLICT (id) DO UPDATE SET actor = 'eve'",
        *SQLITE_ONLY,
        *POSTGRESQL_ONLY,
    ],
)
def test_the_database_refuses_to_change_or_remove_rows(store: Store, statement: str) -> None:
    other = POSTGRESQL_ONLY if store.database.is_sqlite else SQLITE_ONLY
    if statement in other:
        return  # The other database's words.
    store.projects.create("nlp", actor=ADA)
    with pytest.raises(sa.exc.IntegrityError, match="the audit log only grows"):
        store.database.write(lambda connection: connection.execute(sa.text(statement)))
    assert [row.actor for row in store.audit.rows()] == ["ada"]
    store.projects.create("cv", actor=BOB)
    assert [row.actor for row in store.audit.rows()] == ["ada", "bob"]


def test_a_change_that_is_refused_leaves_no_row(store: Store, submit: Submit) -> None:
    experiment = submit()
    with pytest.raises(Conflict):
        store.removal.delete(experiment.id, actor=ADA)
    with pytest.raises(Conflict):
        store.requests.retry(experiment.id, actor=ADA)
    assert list(store.audit.rows()) == []


MANAGING: list[tuple[Callable[[Store, int], object], str, str]] = [
    (lambda s, id: s.requests.pause(id, actor=ADA), "experiment.paused", "paused"),
    (lambda s, id: s.requests.resume(id, actor=ADA), "experiment.resumed", "queued"),
    (lambda s, id: s.requests.set_priority(id, 90, actor=ADA), "experiment.priority", "queued"),
    (lambda s, id: s.requests.cancel(id, actor=ADA), "experiment.cancelled", "cancelled"),
    (lambda s, id: s.requests.retry(id, actor=ADA), "experiment.retried", "queued"),
]


def test_requests_are_noted_and_events_carry_their_actor(store: Store, submit: Submit) -> None:
    experiment = submit(owner="bob")
    for act, kind, state in MANAGING:
        act(store, experiment.id)
        row = list(store.audit.rows())[-1]
        assert (row.actor, row.token_id, row.address) == ("ada", 1, "192.0.2.1")
        assert (row.action, row.object_kind, row.object_id) == (kind, "experiment", str(experiment.id))
        event = store.experiments.events(experiment.id)[-1]
        assert (event.kind, event.actor) == (kind, "ada")
        assert store.experiments.get(experiment.id).state == ExperimentState(state)
    priority = next(row for row in store.audit.rows() if row.action == "experiment.priority")
    assert (priority.before, priority.after) == ({"priority": 50}, {"priority": 90})
    assert store.experiments.events(experiment.id)[0].actor == "bob", "who submitted it"


def test_what_changes_nothing_is_not_noted(store: Store, submit: Submit) -> None:
    experiment = submit()
    store.requests.cancel(experiment.id, actor=ADA)
    store.requests.cancel(experiment.id, actor=BOB)
    assert [row.actor for row in store.audit.rows()] == ["ada"]


def test_requests_about_runs_are_noted(store: Store, submit: Submit) -> None:
    experiment = submit(2)
    run = store.runs.page(experiment_id=experiment.id).items[0]
    store.requests.cancel_run(run.id, actor=ADA)
    store.requests.retry_run(run.id, actor=BOB)
    assert [(row.action, row.object_id, row.actor) for row in store.audit.rows()] == [
        ("run.cancelled", str(run.id), "ada"),
        ("run.retried", str(run.id), "bob"),
    ]
    actors = {event.kind: event.actor for event in store.experiments.events(experiment.id)}
    assert (actors["run.cancelled"], actors["run.retried"]) == ("ada", "bob")


def test_subscriptions_and_views_are_noted_without_secrets(store: Store) -> None:
    url = "https://hooks.example.com/services/T000/secret"
    one = store.notifications.subscribe("ada", "webhook", url, [Topic.end], secret="whsec_x", actor=SESSION)
    store.notifications.unsubscribe(one.id, actor=BOB)
    view = store.views.save("ada", "mine", "state=failed", actor=SESSION)
    assert store.views.save("ada", "mine", "state=failed", actor=SESSION) == view, "which is no change"
    store.views.save("ada", "mine", "state=queued", actor=SESSION)
    store.views.delete(view.id, actor=BOB)
    store.views.delete(view.id, actor=BOB)
    rows = list(store.audit.rows())
    assert [(row.action, row.object_id, row.actor) for row in rows] == [
        ("subscription.add", str(one.id), "ada"),
        ("subscription.remove", str(one.id), "bob"),
        ("view.save", str(view.id), "ada"),
        ("view.save", str(view.id), "ada"),
        ("view.delete", str(view.id), "bob"),
    ]
    assert rows[0].after == rows[1].before
    assert rows[0].after is not None and rows[0].after["target"] == "hooks.example.com"
    assert "secret" not in str(rows) and "whsec" not in str(rows)
    assert (rows[3].before, rows[3].after) == ({"query": "state=failed"}, {"query": "state=queued"})


@pytest.mark.parametrize("state", [ExperimentState.cancelled, ExperimentState.paused])
@pytest.mark.parametrize("through", ["driver", "scheduler"])
def test_what_a_driver_carries_out_names_who_asked(
    store: Store, running: Callable[..., tuple[Experiment, object]], state: ExperimentState, through: str
) -> None:
    experiment, _ = running()
    if state is ExperimentState.cancelled:
        store.requests.cancel(experiment.id, actor=BOB)
    else:
        store.requests.pause(experiment.id, actor=ADA)
        store.requests.resume(experiment.id, actor=ADA)
        store.requests.pause(experiment.id, actor=BOB)
    if through == "driver":
        store.drivers.finish_experiment(experiment.id, experiment.attempt, state)
    else:
        store.drivers.release_experiment(experiment.id, experiment.attempt, delay_s=0.0)
    last = store.experiments.events(experiment.id)[-1]
    assert (last.kind, last.actor) == (f"experiment.{state}", "bob")


def test_a_cancelled_run_names_who_asked_and_so_does_the_message(
    store: Store, training: Callable[..., tuple[Experiment, Run, int]]
) -> None:
    store.notifications.subscribe("ada", "webhook", "https://hooks.example.com/", [Topic.end])
    experiment, run, attempt = training()
    store.requests.cancel_run(run.id, actor=BOB)
    store.attempts.finish_run(run.id, attempt, RunState.cancelled)
    last = store.experiments.events(experiment.id)[-1]
    assert (last.kind, last.actor) == ("run.cancelled", "bob")
    store.requests.cancel(experiment.id, actor=ADA)
    store.drivers.finish_experiment(experiment.id, experiment.attempt, ExperimentState.cancelled)
    store.notifications.address()
    (sent,) = store.notifications.take_deliveries(10, 60.0)
    assert json.loads(sent.body)["data"]["actor"] == "ada"


def test_a_budget_that_holds_an_experiment_is_no_ones_request(
    store: Store, running: Callable[..., tuple[Experiment, object]]
) -> None:
    experiment, _ = running()
    store.requests.pause(experiment.id, actor=BOB)
    store.requests.resume(experiment.id, actor=BOB)
    store.drivers.note(experiment.id, experiment.attempt, "held", kind=EventKind.experiment_held)
    store.drivers.finish_experiment(experiment.id, experiment.attempt, ExperimentState.paused)
    assert store.experiments.events(experiment.id)[-1].actor is None


def test_what_the_service_does_has_no_actor(
    store: Store, running: Callable[..., tuple[Experiment, object]]
) -> None:
    experiment, _ = running()
    actors = {event.kind: event.actor for event in store.experiments.events(experiment.id)}
    assert (actors["experiment.submitted"], actors["experiment.started"]) == ("ada", None)


def test_the_log_is_filtered_and_read_in_pages(store: Store) -> None:
    now = 1_000.0
    store.clocks.simulated = lambda: now
    store.projects.create("nlp", actor=ADA)
    now = 2_000.0
    store.projects.create("cv", actor=BOB)
    store.projects.archive("cv", actor=ADA)
    store.people.add_user("eve", actor=BOB)

    def found(**chosen: object) -> list[tuple[str, str]]:
        return [(row.action, row.object_id) for row in store.audit.rows(**chosen)]

    assert found(since_s=1_500.0, actor="ada") == [("project.archive", "cv")]
    assert found(until_s=1_500.0) == [("project.create", "nlp")]
    assert found(action="project.create") == [("project.create", "nlp"), ("project.create", "cv")]
    assert len(found(action="project")) == 3 and found(action="proj") == []
    assert found(object_kind="user") == found(object_id="eve") == [("user.add", "eve")]
    first = store.audit.page(limit=3)
    assert (len(first.items), first.next_after) == (3, first.items[-1].id)
    rest = store.audit.page(after=first.next_after, limit=3)
    assert (len(rest.items), rest.next_after) == (1, None)
    newest = store.audit.page(newest_first=True, limit=3)
    assert [row.id for row in newest.items] == [row.id for row in (*rest.items, *reversed(first.items))][:3]
    oldest = store.audit.page(newest_first=True, after=newest.next_after or 0, limit=3)
    assert (oldest.items, oldest.next_after) == (first.items[:1], None)
