"""What people do to keep order: deletion that can be taken back, tags, notes and the archive."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service.domain.access import Actor, Visibility
from service.domain.records import DeletedExperiment, Experiment, Run
from service.domain.states import ExperimentState, RunState
from service.specs.models import experiment_folder
from service.specs.reuse import Reuse
from service.store import BadValue, Conflict, NewExperiment, NotFound, Store, removal
from tests.conformance.building import Submit, count, plans_of, remove_deleted

ADA = Actor("ada")
DAY_S = 86_400.0
Training = Callable[..., tuple[Experiment, Run, int]]


@pytest.fixture
def ended(store: Store, training: Training) -> tuple[Experiment, Run]:
    """An experiment that has ended with a result."""
    experiment, run, attempt = training()
    store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary={"accuracy": 0.5})
    store.drivers.finish_experiment(experiment.id, experiment.attempt, ExperimentState.succeeded)
    return store.experiments.get(experiment.id), store.runs.get(run.id)


def test_a_deleted_experiment_comes_back_as_it_was(store: Store, ended: tuple[Experiment, Run]) -> None:
    experiment, run = ended
    until_s = store.removal.delete(experiment.id, actor=ADA)
    assert until_s is not None
    assert store.removal.deleted_experiments() == [], "it is kept"
    assert store.removal.deleted_experiment(experiment.id) == ("default", "ada")
    assert store.removal.restore(experiment.id, actor=ADA) == experiment
    assert store.runs.get(run.id) == run
    assert store.runs.page().items == [run]
    assert store.removal.deleted_experiment(experiment.id) is None
    assert [event.kind for event in store.experiments.events(experiment.id)][-2:] == [
        "experiment.deleted", "experiment.restored",
    ]  # fmt: skip
    assert [row.action for row in store.audit.rows()] == ["experiment.deleted", "experiment.restored"]


def test_what_can_be_restored_is_listed_by_when_it_goes(
    store: Store, ended: tuple[Experiment, Run], submit: Submit
) -> None:
    experiment, _ = ended
    now = 1_000.0
    store.clocks.simulated = lambda: now
    store.projects.create("secret")
    hidden = submit(project="secret")
    store.requests.cancel(hidden.id)
    store.removal.delete(hidden.id)
    now += 10
    store.removal.delete(experiment.id)
    first, second = store.removal.restorable_experiments(limit=10)
    assert (first.id, first.project, first.deleted_s) == (hidden.id, "secret", 1_000.0)
    assert second == DeletedExperiment(
        experiment.id, experiment.name, "ada", "default", ExperimentState.succeeded, 1, 1_010.0,
        1_010.0 + 30 * DAY_S,
    )  # fmt: skip
    assert store.removal.restorable_experiments(limit=1) == [first]
    default = Visibility(frozenset({"default"}))
    assert store.removal.restorable_experiments(limit=10, visible=default) == [second]
    now += 30 * DAY_S - 5
    assert store.removal.restorable_experiments(limit=10) == [second], "the other one is past restoring"


def test_rows_and_files_go_when_the_time_is_over(store: Store, ended: tuple[Experiment, Run]) -> None:
    experiment, _ = ended
    folder = experiment_folder(store.settings, experiment.id)
    folder.mkdir(parents=True)
    now = 1_000.0
    store.clocks.simulated = lambda: now
    assert store.removal.delete(experiment.id) == 1_000.0 + 30 * DAY_S
    now += 30 * DAY_S - 1
    remove_deleted(store)
    assert folder.exists() and count(store, "runs") == 1
    now += 2
    with pytest.raises(Conflict, match="is being removed; submit its spec again"):
        store.removal.restore(experiment.id)
    remove_deleted(store)
    assert not folder.exists() and count(store, "experiments") == count(store, "runs") == 0
    with pytest.raises(NotFound):
        store.removal.restore(experiment.id)


def test_what_is_restored_is_not_removed(store: Store, ended: tuple[Experiment, Run]) -> None:
    experiment, _ = ended
    store.removal.delete(experiment.id)
    removal = store.removal.removing(experiment.id)
    store.removal.restore(experiment.id)
    assert list(removal) == []
    assert count(store, "runs") == 1


def test_what_is_being_removed_is_not_restored(
    store: Store, ended: tuple[Experiment, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, _ = ended
    monkeypatch.setattr(removal, "STATEMENTS_AT_A_TIME", 1)
    store.removal.delete(experiment.id, at_once=True)
    next(store.removal.removing(experiment.id))
    with pytest.raises(Conflict, match="being removed"):
        store.removal.restore(experiment.id)


def test_a_deleted_experiment_can_be_removed_at_once_later(
    store: Store, ended: tuple[Experiment, Run]
) -> None:
    experiment, _ = ended
    store.removal.delete(experiment.id)
    assert store.removal.delete(experiment.id, at_once=True, actor=ADA) is None
    assert store.removal.deleted_experiments() == [experiment.id]
    assert list(store.audit.rows())[-1].action == "experiment.removed"


def test_what_is_not_deleted_is_not_restored(store: Store, submit: Submit) -> None:
    experiment = submit()
    with pytest.raises(Conflict, match="is not deleted"):
        store.removal.restore(experiment.id)
    with pytest.raises(NotFound, match="no experiment has the id 99"):
        store.removal.restore(99)


def test_a_key_replays_a_restored_experiment(store: Store, submit: Submit) -> None:
    first = submit(key="k")
    store.requests.cancel(first.id)
    store.removal.delete(first.id)
    with pytest.raises(Conflict, match="has been deleted"):
        submit(key="k")
    store.removal.restore(first.id)
    assert submit(key="k").id == first.id


def test_figures_of_a_deleted_run_come_back_after_it(store: Store, ended: tuple[Experiment, Run]) -> None:
    original, run = ended
    spec, plans, text = plans_of(1)
    user, _ = store.submissions.submit(
        NewExperiment(spec, plans, spec_text=text, owner="ada", reuse=Reuse({0: run.id}))
    )
    store.removal.delete(user.id)
    store.removal.delete(original.id)
    with pytest.raises(Conflict, match=f"figures of run {run.id}; restore experiment {original.id} first"):
        store.removal.restore(user.id)
    store.removal.restore(original.id)
    assert store.removal.restore(user.id).id == user.id
    store.removal.delete(user.id)
    store.removal.delete(original.id, at_once=True)
    remove_deleted(store)
    with pytest.raises(Conflict, match=f"figures of run {run.id}, which has been removed"):
        store.removal.restore(user.id)


def test_tags_are_words_in_order_and_found_by_a_filter(store: Store, submit: Submit) -> None:
    experiment, other = submit(), submit()
    store.requests.tag(experiment.id, add=["nlp", "baseline"], actor=ADA)
    assert store.requests.tag(experiment.id, add=["v2", "nlp"], remove=["baseline"]).tags == ["nlp", "v2"]
    store.requests.tag(other.id, add=["nlp2"])
    assert [found.id for found in store.experiments.page(filter="tags LIKE '% nlp %'").items] == [
        experiment.id
    ]
    rows = [(row.before, row.after) for row in store.audit.rows(object_id=str(experiment.id))]
    assert rows == [
        ({"tags": []}, {"tags": ["baseline", "nlp"]}),
        ({"tags": ["baseline", "nlp"]}, {"tags": ["nlp", "v2"]}),
    ]
    assert store.experiments.events(experiment.id)[1].actor == "ada"
    before = len(store.experiments.events(experiment.id))
    store.requests.tag(experiment.id, add=["nlp"], remove=["gone"])
    assert len(store.experiments.events(experiment.id)) == before, "nothing changed"


def test_lists_in_the_order_of_tags_continue(store: Store, submit: Submit) -> None:
    for tag in ("b", "a", "c"):
        store.requests.tag(submit().id, add=[tag])
    seen: list[str] = []
    token = None
    while True:
        page = store.experiments.page(order_by="tags", page_size=1, page_token=token)
        seen += [tag for found in page.items for tag in found.tags]
        if (token := page.next_page_token) is None:
            break
    assert seen == ["a", "b", "c"]


@pytest.mark.parametrize("tag", ["", "two words", "-x", "x" * 51, "a\n"])
def test_a_tag_that_is_no_word_is_refused(store: Store, submit: Submit, tag: str) -> None:
    experiment = submit()
    with pytest.raises(BadValue, match="not a tag"):
        store.requests.tag(experiment.id, add=[tag])
    assert store.experiments.get(experiment.id).tags == []


def test_another_name_leaves_the_spec_as_it_was(store: Store, submit: Submit) -> None:
    experiment = submit()
    assert store.requests.rename(experiment.id, "baseline").name == "baseline"
    assert store.requests.rename(experiment.id, "baseline").name == "baseline"
    assert '"baseline"' not in store.experiments.spec(experiment.id)[1]
    (event,) = (one for one in store.experiments.events(experiment.id) if "renamed" in one.kind)
    assert event.message == f"renamed from {experiment.name}"


def test_notes_and_archive_are_kept(store: Store, submit: Submit) -> None:
    experiment = submit()
    assert store.requests.annotate(experiment.id, "look\nat run 3").notes == "look\nat run 3"
    with pytest.raises(BadValue, match="4,001 characters"):
        store.requests.annotate(experiment.id, "x" * 4_001)
    archived = store.requests.archive(experiment.id)
    assert archived.archived_s is not None
    assert store.requests.archive(experiment.id).archived_s == archived.archived_s
    assert store.requests.archive(experiment.id, False).archived_s is None
    assert [row.action for row in store.audit.rows()] == [
        "experiment.annotated", "experiment.archived", "experiment.unarchived",
    ]  # fmt: skip
