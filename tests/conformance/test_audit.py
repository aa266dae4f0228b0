"""The audit log: every change has its row, and no row changes or goes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sqlalchemy as sa

from service.domain.access import Actor
from service.domain.records import Experiment
from service.domain.states import ExperimentState
from service.store import Conflict, Store
from tests.conformance.building import Submit

ADA, BOB = Actor("ada", 1, "192.0.2.1"), Actor("bob")


@pytest.mark.parametrize("statement", ["UPDATE audit SET actor = 'eve'", "DELETE FROM audit"])
def test_the_database_refuses_to_change_or_remove_rows(store: Store, statement: str) -> None:
    store.create_project("nlp", actor=ADA)
    with pytest.raises(sa.exc.IntegrityError, match="the audit log only grows"):
        store.database.write(lambda connection: connection.execute(sa.text(statement)))
    assert [row.actor for row in store.audit_rows()] == ["ada"]


def test_a_change_that_is_refused_leaves_no_row(store: Store, submit: Submit) -> None:
    experiment = submit()
    with pytest.raises(Conflict):
        store.delete(experiment.id, actor=ADA)
    with pytest.raises(Conflict):
        store.retry(experiment.id, actor=ADA)
    assert list(store.audit_rows()) == []


STEERING: list[tuple[Callable[[Store, int], object], str, str]] = [
    (lambda s, id: s.request_pause(id, actor=ADA), "experiment.paused", "paused"),
    (lambda s, id: s.resume(id, actor=ADA), "experiment.resumed", "queued"),
    (lambda s, id: s.set_priority(id, 90, actor=ADA), "experiment.priority", "queued"),
    (lambda s, id: s.request_cancel(id, actor=ADA), "experiment.cancelled", "cancelled"),
    (lambda s, id: s.retry(id, actor=ADA), "experiment.retried", "queued"),
]


def test_requests_are_noted_and_events_carry_their_actor(store: Store, submit: Submit) -> None:
    experiment = submit(owner="bob")
    for act, kind, state in STEERING:
        act(store, experiment.id)
        row = list(store.audit_rows())[-1]
        assert (row.actor, row.token_id, row.address) == ("ada", 1, "192.0.2.1")
        assert (row.action, row.object_kind, row.object_id) == (kind, "experiment", str(experiment.id))
        event = store.events(experiment.id)[-1]
        assert (event.kind, event.actor) == (kind, "ada")
        assert store.experiment(experiment.id).state == ExperimentState(state)
    priority = next(row for row in store.audit_rows() if row.action == "experiment.priority")
    assert (priority.before, priority.after) == ({"priority": 50}, {"priority": 90})
    assert store.events(experiment.id)[0].actor == "bob", "who submitted it"


def test_what_changes_nothing_is_not_noted(store: Store, submit: Submit) -> None:
    experiment = submit()
    store.request_cancel(experiment.id, actor=ADA)
    store.request_cancel(experiment.id, actor=BOB)
    assert [row.actor for row in store.audit_rows()] == ["ada"]


def test_requests_about_runs_are_noted(store: Store, submit: Submit) -> None:
    experiment = submit(2)
    run = store.runs(experiment_id=experiment.id).items[0]
    store.request_cancel_run(run.id, actor=ADA)
    store.retry_run(run.id, actor=BOB)
    assert [(row.action, row.object_id, row.actor) for row in store.audit_rows()] == [
        ("run.cancelled", str(run.id), "ada"),
        ("run.retried", str(run.id), "bob"),
    ]
    actors = {event.kind: event.actor for event in store.events(experiment.id)}
    assert (actors["run.cancelled"], actors["run.retried"]) == ("ada", "bob")


def test_what_the_service_does_has_no_actor(
    store: Store, running: Callable[..., tuple[Experiment, object]]
) -> None:
    experiment, _ = running()
    actors = {event.kind: event.actor for event in store.events(experiment.id)}
    assert (actors["experiment.submitted"], actors["experiment.started"]) == ("ada", None)


def test_the_log_is_filtered_and_read_in_pages(store: Store) -> None:
    now = 1_000.0
    store.clock = lambda: now
    store.create_project("nlp", actor=ADA)
    now = 2_000.0
    store.create_project("cv", actor=BOB)
    store.archive_project("cv", actor=ADA)
    store.add_user("eve", actor=BOB)

    def found(**chosen: object) -> list[tuple[str, str]]:
        return [(row.action, row.object_id) for row in store.audit_rows(**chosen)]

    assert found(since_s=1_500.0, actor="ada") == [("project.archive", "cv")]
    assert found(until_s=1_500.0) == [("project.create", "nlp")]
    assert found(action="project.create") == [("project.create", "nlp"), ("project.create", "cv")]
    assert len(found(action="project")) == 3 and found(action="proj") == []
    assert found(object_kind="user") == found(object_id="eve") == [("user.add", "eve")]
    first = store.audit(limit=3)
    assert (len(first.items), first.next_after) == (3, first.items[-1].id)
    rest = store.audit(after=first.next_after, limit=3)
    assert (len(rest.items), rest.next_after) == (1, None)
