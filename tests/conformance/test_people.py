"""Users, tokens and projects: what the store accepts, keeps and notes in the audit log."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from service.config.document import SpecError
from service.db import schema
from service.domain.access import TOKEN_PREFIX, Actor, Role, Scope, UserKind
from service.domain.people import AuditRow
from service.store import BadValue, Conflict, NotFound, Store
from service.store.people import NOTE_USES_EVERY_S, secret_sha256
from tests.conformance.building import Submit, plans_of

ROOT = Actor("root", 7, "192.0.2.1")


def log(store: Store) -> list[AuditRow]:
    return list(store.audit.rows())


def test_a_user_joins_the_default_project(store: Store) -> None:
    user = store.people.add_user("ada", email="ada@example.org", actor=ROOT)
    assert (user.kind, user.administrator, user.disabled_s) == (UserKind.person, False, None)
    assert [user.name for user in store.people.users()] == ["ada"]
    assert [(member.user, member.role) for member in store.projects.get("default").members] == [
        ("ada", Role.member)
    ]
    (row,) = log(store)
    assert (row.actor, row.token_id, row.address) == ("root", 7, "192.0.2.1")
    assert (row.action, row.object_kind, row.object_id, row.before) == ("user.add", "user", "ada", None)
    assert row.after is not None and row.after["email"] == "ada@example.org"


def test_an_identity_is_one_users(store: Store) -> None:
    store.people.add_user("ada", subject="https://id.example|1")
    with pytest.raises(Conflict, match="belongs to user ada"):
        store.people.add_user("bob", subject="https://id.example|1")


def test_only_what_changes_of_a_user_is_noted(store: Store) -> None:
    store.people.add_user("ada")
    assert store.people.set_user("ada", disabled=True).disabled_s is not None
    store.people.set_user("ada", disabled=True)
    assert store.people.set_user("ada", disabled=False, administrator=True).administrator
    assert [(row.action, sorted(row.after or {})) for row in log(store)[1:]] == [
        ("user.disable", ["disabled_s"]),
        ("user.set", ["administrator", "disabled_s"]),
    ]


def test_a_token_is_kept_as_a_hash_and_shown_once(store: Store) -> None:
    store.people.add_user("ada")
    made = store.people.create_token("ada", name="ci", scope=Scope.submit, lasts_s=3600.0, actor=ROOT)
    assert made.secret.startswith(TOKEN_PREFIX)
    assert len(made.secret) == len(TOKEN_PREFIX) + 43, "256 bits"
    assert made.expires_s == made.created_s + 3600.0
    (token,) = store.people.tokens("ada")
    assert not hasattr(token, "secret") and made.secret.startswith(token.prefix)
    with store.database.read() as connection:
        (row,) = connection.execute(sa.select(schema.tokens)).all()
        written = [str(value) for value in connection.execute(sa.select(schema.audit)).all()]
    assert row.sha256 == secret_sha256(made.secret)
    assert not any(made.secret in text for text in (str(row), *written))


def test_the_last_use_of_tokens_is_written_together_once_a_minute(store: Store) -> None:
    now = 1_000.0
    store.clocks.simulated = lambda: now
    store.people.add_user("ada")
    first, second = (store.people.create_token("ada", name=name, scope=Scope.read).id for name in ("a", "b"))

    def used() -> list[float | None]:
        return [store.people.token(id).last_used_s for id in (first, second)]

    store.people.token_used(first)
    assert used() == [1_000.0, None]
    now += NOTE_USES_EVERY_S / 2
    store.people.token_used(first)
    store.people.token_used(second)
    assert used() == [1_000.0, None]
    now += NOTE_USES_EVERY_S / 2
    store.people.token_used(first)
    assert used() == [1_060.0, 1_030.0]


def test_a_token_name_is_free_again_after_its_token(store: Store) -> None:
    now = 1_000.0
    store.clocks.simulated = lambda: now
    store.people.add_user("ada")
    made = store.people.create_token("ada", name="ci", scope=Scope.read)
    with pytest.raises(Conflict, match="has a token 'ci' already"):
        store.people.create_token("ada", name="ci", scope=Scope.read)
    assert store.people.revoke_token(made.id, actor=ROOT).revoked_s == 1_000.0
    store.people.create_token("ada", name="ci", scope=Scope.read, lasts_s=10.0)
    now = 1_010.0
    store.people.create_token("ada", name="ci", scope=Scope.read)
    assert store.people.revoke_token(made.id).revoked_s == 1_000.0, "revoked once, it stays so"
    assert [row.action for row in log(store)].count("token.revoke") == 1


def test_projects_have_members_with_roles(store: Store) -> None:
    store.people.add_user("ada")
    store.projects.create("nlp", title="Language", actor=ROOT)
    store.projects.set_member("nlp", "ada", Role.viewer, actor=ROOT)
    project = store.projects.set_member("nlp", "ada", Role.maintainer, actor=ROOT)
    assert [(member.user, member.role) for member in project.members] == [("ada", Role.maintainer)]
    assert store.projects.remove_member("nlp", "ada", actor=ROOT).members == []
    rows = [(row.action, row.before, row.after) for row in log(store) if "member" in row.action]
    assert rows == [
        ("project.member_set", None, {"members": {"ada": "viewer"}}),
        ("project.member_set", {"members": {"ada": "viewer"}}, {"members": {"ada": "maintainer"}}),
        ("project.member_remove", {"members": {"ada": "maintainer"}}, None),
    ]


def test_changes_of_a_project_are_noted_before_and_after(store: Store) -> None:
    store.projects.create("nlp", title="Language")
    project = store.projects.set("nlp", visible_to_all=True, title="Language models", actor=ROOT)
    assert (project.visible_to_all, project.title) == (True, "Language models")
    store.projects.set("nlp", visible_to_all=True)
    row = log(store)[-1]
    assert (row.action, row.actor) == ("project.set", "root")
    assert (row.before, row.after) == (
        {"visible_to_all": False, "title": "Language"},
        {"visible_to_all": True, "title": "Language models"},
    )


def test_the_default_project_is_there_and_stays(store: Store) -> None:
    assert [(project.name, project.visible_to_all) for project in store.projects.all()] == [("default", True)]
    with pytest.raises(Conflict, match="cannot be archived"):
        store.projects.archive("default")


def test_an_archived_project_takes_no_experiment_and_keeps_those_it_has(store: Store, submit: Submit) -> None:
    store.projects.create("nlp")
    kept = submit(project="nlp", key="k")
    assert kept.project == "nlp"
    store.projects.archive("nlp")
    with pytest.raises(SpecError, match="project nlp is archived"):
        submit(project="nlp")
    with pytest.raises(SpecError, match="there is no project cv; list them"):
        submit(project="cv")
    assert store.experiments.get(kept.id).project == "nlp"
    store.projects.archive("nlp", False)
    assert submit(project="nlp").id > kept.id


def test_one_bad_project_refuses_one_submission_of_a_group(store: Store) -> None:
    from service.store import NewExperiment

    good, bad = (NewExperiment(*plans_of(1, project=name), "ada") for name in ("default", "nowhere"))
    answers = store.submissions.submit_many([good, bad, good])
    assert isinstance(answers[1], SpecError)
    assert [type(answers[place]) for place in (0, 2)] == [tuple, tuple]


REFUSED: list[tuple[Callable[[Store], object], type[Exception], str]] = [
    (lambda s: s.people.add_user("ada"), Conflict, "user ada exists already"),
    (lambda s: s.people.add_user("no spaces"), BadValue, "not a user's name"),
    (lambda s: s.people.add_user("bob", email="bob"), BadValue, "not an e-mail address"),
    (lambda s: s.people.set_user("bob", disabled=True), NotFound, "there is no user bob"),
    (lambda s: s.people.create_token("bob", name="x", scope=Scope.read), NotFound, "there is no user bob"),
    (lambda s: s.people.create_token("ada", name="", scope=Scope.read), BadValue, "not a token's name"),
    (
        lambda s: s.people.create_token("ada", name="x", scope=Scope.admin),
        Conflict,
        "ada is not an administrator",
    ),
    (
        lambda s: s.people.create_token("ada", name="x", scope=Scope.read, project="cv"),
        NotFound,
        "there is no project cv",
    ),
    (
        lambda s: s.people.create_token("eve", name="x", scope=Scope.read),
        Conflict,
        "eve is disabled.*user enable",
    ),
    (lambda s: s.people.revoke_token(99), NotFound, "no token has the id 99"),
    (lambda s: s.projects.create("default"), Conflict, "project default exists already"),
    (lambda s: s.projects.create("NLP"), BadValue, "not a project's name"),
    (lambda s: s.projects.create("nlp", title="x" * 201), BadValue, "title.*201 characters"),
    (lambda s: s.projects.set("cv", title="x"), NotFound, "there is no project cv"),
    (lambda s: s.projects.set_member("cv", "ada", Role.member), NotFound, "there is no project cv"),
    (lambda s: s.projects.set_member("default", "bob", Role.member), NotFound, "there is no user bob"),
    (
        lambda s: s.projects.remove_member("default", "bob"),
        NotFound,
        "there is no member of project default bob",
    ),
]


@pytest.fixture(scope="module")
def two_users(lasting_store: Store) -> Store:
    """A store with two users, of whom one is disabled."""
    lasting_store.people.add_user("ada")
    lasting_store.people.add_user("eve")
    lasting_store.people.set_user("eve", disabled=True)
    return lasting_store


@pytest.mark.parametrize(("call", "error", "says"), REFUSED, ids=[says for _, _, says in REFUSED])
def test_what_is_refused_is_said_in_one_line_and_changes_nothing(
    two_users: Store, call: Callable[[Store], object], error: type[Exception], says: str
) -> None:
    before = log(two_users)
    with pytest.raises(error) as refusal:
        call(two_users)
    assert re.search(says, str(refusal.value)) and "\n" not in str(refusal.value)
    assert log(two_users) == before
    people = two_users.people
    assert (len(people.users()), len(people.tokens()), len(two_users.projects.all())) == (2, 0, 1)
