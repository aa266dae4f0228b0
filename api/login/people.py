"""Users who come from somewhere else: created at their first login, with the roles of their groups."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator

from fastapi import Request

from api.access import FIRST_ADMINISTRATOR
from api.addresses import client_address
from api.login.oidc import Person
from service.config.groups import GroupTable, Memberships
from service.db.errors import BadValue, Conflict, NotFound
from service.domain.access import LOCAL_ACTOR, Actor, is_user_name
from service.domain.people import User
from service.store import Store

_logger = logging.getLogger(__name__)

_RESERVED = frozenset({FIRST_ADMINISTRATOR, LOCAL_ACTOR.user})
"""Names that a provider's claims cannot choose."""
_UNUSABLE = re.compile(r"[^A-Za-z0-9._@-]+")
_EMAIL = re.compile(r"[^@\s]{1,64}@[^@\s]{1,190}")
_LONGEST_SUGGESTION = 90
_NUMBERS = 1_000


class AccountDisabled(Exception):
    """The user is disabled."""


def person_logs_in(request: Request, person: Person, table: GroupTable) -> str:
    """Returns the user of someone whom the provider vouches for, with the roles that the table gives.

    A user belongs to one identity at the provider for good. Names and addresses are only suggestions: they
    can be given to somebody else there, and must not open an account that exists here.

    Raises:
        AccountDisabled: the user is disabled.
    """
    store: Store = request.app.state.store
    user = store.user_of_subject(person.subject)
    if user is None:
        user = _created(store, person, client_address(request))
    if user.disabled_s is not None:
        raise AccountDisabled(user.name)
    _apply(store, user, table.memberships(person.groups), Actor(user.name, None, client_address(request)))
    request.app.state.principals.forget()
    return user.name


def ensure_user(store: Store, name: str, *, administrator: bool = False) -> None:
    """Adds a user whom somebody else vouches for, unless they exist."""
    try:
        store.user(name)
    except NotFound:
        _unless_taken(lambda: store.add_user(name, administrator=administrator, actor=Actor(name)))


def _created(store: Store, person: Person, address: str) -> User:
    email = person.email if person.email and _EMAIL.fullmatch(person.email) else None
    for name in _names(person.name):
        added = _unless_taken(
            lambda name=name: store.add_user(  # type: ignore[misc]
                name, email=email, subject=person.subject, actor=Actor(name, None, address)
            )
        )
        if added is not None:
            return added
        user = store.user_of_subject(person.subject)
        if user is not None:
            return user  # Another request of theirs was first.
    raise Conflict(f"no name like {person.name[:100]!r} is free; ask an administrator to add the user")


def _names(suggested: str) -> Iterator[str]:
    """Names to try, the suggested one first."""
    text = _UNUSABLE.sub("-", suggested).lstrip("._@-")[:_LONGEST_SUGGESTION].rstrip("-") or "user"
    if is_user_name(text) and text not in _RESERVED:
        yield text
    yield from (f"{text}-{number}" for number in range(2, _NUMBERS))


def _unless_taken(add: Callable[[], User]) -> User | None:
    try:
        return add()
    except Conflict:
        return None


def _apply(store: Store, user: User, memberships: Memberships, actor: Actor) -> None:
    if memberships.administrator not in (None, user.administrator):
        store.set_user(user.name, administrator=memberships.administrator, actor=actor)
    for project in sorted(memberships.managed):
        role = memberships.roles.get(project)
        try:
            if role is not None:
                store.set_member(project, user.name, role, actor=actor)
            else:
                store.remove_member(project, user.name, actor=actor)
        except NotFound as error:
            if role is not None:  # Otherwise they were no member: nothing to take away.
                _logger.warning("groups.yaml: %s; create it, or take it out of the table", error)
        except BadValue as error:
            _logger.warning("groups.yaml: %s", error)
