"""Users who come from somewhere else, and are created when they first do.

A provider's get the roles of their groups; those of a trusted proxy are named in a header.
"""

import base64
import json
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Self

from fastapi import Request

from api.access import FIRST_ADMINISTRATOR
from api.guard import SAFE_METHODS
from api.login.sessions import refuse_foreign_page
from api.principals import Identify, Identity, Via
from api.problems import ProblemError
from api.throttle import client_address, from_trusted_proxy
from service.config.groups import GroupTable, Memberships
from service.db.errors import BadValue, Conflict, NotFound
from service.domain.access import LOCAL_ACTOR, Actor, is_user_name
from service.domain.people import User
from service.store import Store
from service.store.people import EMAIL

_logger = logging.getLogger(__name__)

LOGIN_LASTS_S = 600.0  # Time in which someone who left for the provider must be back
_RESERVED = frozenset({FIRST_ADMINISTRATOR, LOCAL_ACTOR.user})  # Names that a provider's claims cannot choose
_UNUSABLE = re.compile(r"[^A-Za-z0-9._@-]+")
_LONGEST_SUGGESTION = 90
_NUMBERS = 1_000
_MOST_KNOWN = 10_000


class ProviderError(Exception):
    """A login at the provider failed; the message is for the server's log."""

    problem = "provider-refused"


class ProviderUnavailable(ProviderError):
    """The provider does not answer, or answers what is not OpenID Connect."""

    problem = "provider-unavailable"


@dataclass(frozen=True, slots=True)
class Departure:
    """A login that has left for the provider, as the browser keeps it in a cookie until it is back."""

    state: str
    nonce: str
    verifier: str
    return_to: str

    def packed(self) -> str:
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode().rstrip("=")

    @classmethod
    def unpacked(cls, text: str) -> Self | None:
        try:
            fields = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            departure = cls(**fields)
        except (ValueError, TypeError):
            return None
        return departure if all(isinstance(value, str) for value in asdict(departure).values()) else None


@dataclass(frozen=True, slots=True)
class Person:
    subject: str  # `issuer|sub`: the only claim that never means somebody else
    name: str
    email: str | None
    groups: frozenset[str]


class AccountDisabled(Exception):
    pass


def person_logs_in(request: Request, person: Person, table: GroupTable) -> str:
    """Returns the user of someone whom the provider vouches for, with the roles that the table gives.

    A user belongs to one identity at the provider for good. Names and addresses are only suggestions: they
    can be given to somebody else there, and must not open an account that exists here.
    """
    store: Store = request.app.state.store
    user = store.sessions.user_of_subject(person.subject)
    if user is None:
        user = _created(store, person, client_address(request))
    if user.disabled_s is not None:
        raise AccountDisabled(user.name)
    _apply(store, user, table.memberships(person.groups), Actor(user.name, None, client_address(request)))
    request.app.state.principals.forget()
    return user.name


def ensure_user(store: Store, name: str, *, administrator: bool = False) -> User:
    """Returns a user whom somebody else vouches for, added unless they exist."""
    with suppress(NotFound):
        return store.people.user(name)
    with suppress(Conflict):
        return store.people.add_user(name, administrator=administrator, actor=Actor(name))
    return store.people.user(name)


def identify_by_header(header: str) -> Identify:
    """Returns what recognises the user that a trusted proxy names in a header.

    A user is created when they are first named. Any other peer's header is ignored, as if it were absent.
    """
    known: set[str] = set()

    def identify(request: Request) -> Identity | None:
        if not from_trusted_proxy(request):
            return None
        names = request.headers.getlist(header)
        if not names:
            return None
        if len(names) > 1 or not is_user_name(names[0]):
            raise ProblemError(
                "invalid-parameter",
                f"header {header}: {', '.join(names)[:100]!r} is not one user's name; it takes up to 100 "
                "letters, digits and . _ @ -, starting with a letter or digit",
            )
        if request.method not in SAFE_METHODS:
            refuse_foreign_page(request)  # The proxy's own cookie comes with another site's request too.
        if names[0] not in known:
            store: Store = request.app.state.store
            ensure_user(store, names[0])
            if len(known) < _MOST_KNOWN:
                known.add(names[0])
        return Identity(names[0], Via.proxy)

    return identify


def _created(store: Store, person: Person, address: str) -> User:
    email = person.email if person.email and EMAIL.fullmatch(person.email) else None
    for name in _names(person.name):
        with suppress(Conflict):
            return store.people.add_user(
                name, email=email, subject=person.subject, actor=Actor(name, None, address)
            )
        user = store.sessions.user_of_subject(person.subject)
        if user is not None:
            return user  # Another request of theirs was first.
    raise Conflict(f"no name like {person.name[:100]!r} is free; ask an administrator to add the user")


def _names(suggested: str) -> Iterator[str]:
    text = _UNUSABLE.sub("-", suggested).lstrip("._@-")[:_LONGEST_SUGGESTION].rstrip("-") or "user"
    if is_user_name(text) and text not in _RESERVED:
        yield text
    yield from (f"{text}-{number}" for number in range(2, _NUMBERS))


def _apply(store: Store, user: User, memberships: Memberships, actor: Actor) -> None:
    if memberships.administrator not in (None, user.administrator):
        store.people.set_user(user.name, administrator=memberships.administrator, actor=actor)
    for project in sorted(memberships.managed):
        role = memberships.roles.get(project)
        try:
            if role is not None:
                store.projects.set_member(project, user.name, role, actor=actor)
            else:
                store.projects.remove_member(project, user.name, actor=actor)
        except NotFound as error:
            if role is not None:  # Otherwise they were no member: nothing to take away.
                _logger.warning("groups.yaml: %s; create it, or take it out of the table", error)
        except BadValue as error:
            _logger.warning("groups.yaml: %s", error)
