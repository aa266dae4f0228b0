"""Who may do what: the rules alone."""

from __future__ import annotations

import re
from itertools import product

import pytest

from service.domain.access import (
    EVERYTHING,
    Action,
    Principal,
    Role,
    Scope,
    UserKind,
    Visibility,
    local,
)

LOCAL = local()


def person(role: Role | None = None, scope: Scope = Scope.admin, **fields: object) -> Principal:
    """Ada, with a role in project nlp; project shared is open to all."""
    roles = {} if role is None else {"nlp": role}
    return Principal("ada", UserKind.person, scope, roles, frozenset({"shared"}), **fields)  # type: ignore[arg-type]


ALLOWED: dict[Role | None, set[Action]] = {
    None: set(),
    Role.viewer: {Action.see},
    Role.member: {Action.see, Action.submit, Action.manage_own, Action.organise, Action.share},
    Role.maintainer: {
        Action.see, Action.submit, Action.manage_own, Action.manage_any, Action.organise, Action.share,
        Action.manage_project,
    },
}  # fmt: skip


@pytest.mark.parametrize("role", ALLOWED)
def test_a_role_allows_this_and_no_more(role: Role | None) -> None:
    principal = person(role)
    assert {action for action in Action if principal.may(action, "nlp", "ada")} == ALLOWED[role]


def test_an_administrator_may_do_everything_everywhere() -> None:
    principal = person(administrator=True)
    assert all(principal.may(action, "nlp", "ada") for action in Action)
    assert principal.may(Action.manage_any, "nlp", "bob")
    assert principal.visibility == EVERYTHING


SCOPED = {
    Scope.read: {Action.see},
    Scope.submit: {Action.see, Action.submit, Action.manage_own, Action.organise, Action.share},
    Scope.operate: set(Action) - {Action.administer},
    Scope.admin: set(Action),
}


@pytest.mark.parametrize("scope", Scope)
def test_a_scope_caps_even_an_administrator(scope: Scope) -> None:
    principal = person(scope=scope, administrator=True)
    assert {action for action in Action if principal.may(action, "nlp", "ada")} == SCOPED[scope]


def test_scope_admin_makes_no_administrator() -> None:
    assert not person(Role.maintainer, Scope.admin).may(Action.administer)
    assert not person(Role.maintainer, Scope.admin).may(Action.operate)


def test_a_member_neither_manages_nor_organises_what_others_submitted() -> None:
    member, maintainer = person(Role.member), person(Role.maintainer)
    assert member.managing("bob") is Action.manage_any
    assert member.managing("ada") is Action.manage_own
    for action in (Action.manage_own, Action.manage_any, Action.organise):
        assert not member.may(action, "nlp", "bob")
    assert maintainer.may(Action.organise, "nlp", "bob")
    assert not maintainer.may(Action.manage_own, "nlp", "bob")


def test_an_open_project_is_seen_by_all_and_used_by_members() -> None:
    stranger = person()
    assert stranger.may(Action.see, "shared") and stranger.sees("shared")
    assert not stranger.may(Action.submit, "shared")
    assert not stranger.sees("nlp")
    assert stranger.visibility == Visibility(frozenset({"shared"}))


@pytest.mark.parametrize("administrator", [False, True])
def test_a_tokens_project_is_the_only_one_it_reaches(administrator: bool) -> None:
    principal = person(Role.maintainer, restricted_to="nlp", administrator=administrator)
    assert principal.visibility == Visibility(frozenset({"nlp"}))
    for action in Action:
        assert not principal.may(action, "shared", "ada")
        assert not principal.may(action, None, "ada")
    assert principal.may(Action.manage_any, "nlp", "bob")


def test_a_tokens_project_gives_no_role_in_it() -> None:
    principal = person(None, restricted_to="nlp")
    assert principal.visibility == Visibility(frozenset())
    assert not principal.may(Action.see, "nlp")


def test_whoever_is_on_loopback_may_do_everything() -> None:
    for action, project, owner in product(Action, ("nlp", None), ("bob", None)):
        assert LOCAL.may(action, project, owner)
    assert LOCAL.visibility == EVERYTHING
    assert local("ada").managing("ada") is Action.manage_own


@pytest.mark.parametrize(
    ("principal", "asked", "says"),
    [
        (person(scope=Scope.operate), ("ada", Scope.operate, None), None),
        (person(scope=Scope.read), ("ada", Scope.read, None), "needs scope submit"),
        (person(scope=Scope.submit), ("ada", Scope.operate, None), "cannot create or revoke one of"),
        (person(restricted_to="nlp"), ("ada", Scope.read, None), "only for project nlp"),
        (person(restricted_to="nlp"), ("ada", Scope.read, "nlp"), None),
        (person(Role.maintainer), ("bob", Scope.read, None), "needs an administrator"),
        (person(administrator=True), ("bob", Scope.admin, None), None),
        (person(scope=Scope.operate, administrator=True), ("bob", Scope.read, None), "scope admin"),
        (LOCAL, ("bob", Scope.admin, None), None),
    ],
)
def test_no_token_gives_more_than_the_one_it_was_created_with(
    principal: Principal, asked: tuple[str, Scope, str | None], says: str | None
) -> None:
    reason = principal.lacks_for_token(*asked)
    assert (reason is None) == (says is None)
    assert says is None or re.search(says, str(reason))


@pytest.mark.parametrize(
    ("principal", "action", "says"),
    [
        (person(Role.member, Scope.read), Action.submit, "scope submit.*scope read.*token create"),
        (person(Role.member, Scope.submit), Action.manage_any, "scope operate"),
        (person(Role.maintainer, Scope.submit), Action.administer, "scope admin.*an administrator can"),
        (person(Role.viewer), Action.submit, "role member in project nlp, and you are viewer.*can grant"),
        (person(), Action.see, "you are not a member.*maintainer.*administrator can grant"),
        (person(Role.maintainer), Action.administer, "needs an administrator"),
        (person(Role.member), Action.manage_own, "belongs to bob.*maintainer of project nlp"),
        (person(Role.member, restricted_to="cv"), Action.submit, "only for project cv"),
    ],
)
def test_a_refusal_says_what_is_missing_and_who_can_grant_it(
    principal: Principal, action: Action, says: str
) -> None:
    reason = principal.lacks(action, "nlp", "bob")
    assert reason is not None and "\n" not in reason
    assert re.search(says, reason), reason
