"""Who asks, and whether they may: one rule for each route, and the dependency that applies it.

Access is open on a service that listens on loopback without a token: whoever reaches it is its own user,
to whom everything is allowed. Otherwise it is closed: a request carries a bearer token, or is identified by
one of the application's `identities` (a session, a proxy). What is hidden from the sender answers as what is
missing.
"""

import difflib
import getpass
import hmac
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, RouteContext, iter_route_contexts
from pydantic import Field, SecretStr, TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool

from api.principals import Identity, Principals
from api.problems import ProblemError
from api.throttle import client_address
from service.config.document import MAX_PROBLEMS, MAX_SUGGESTIONS, Problem
from service.config.settings import Settings
from service.db.errors import NotFound, StoreError
from service.domain.access import Action, Actor, Principal, Scope, UserKind, Visibility, is_user_name, local
from service.store import Store
from service.store.experiments import Belonging
from service.store.people import Refused, secret_sha256

OWNER_HEADER = "Stillhouse-Owner"
MIN_TOKEN_LENGTH = 32
MAX_ID = 2**63 - 1  # Largest integer that both databases hold
RECHECK_S = 30.0  # Time between two looks at whether a stream's reader may still read it
FIRST_ADMINISTRATOR = "admin"  # User whom `STILLHOUSE_TOKEN` stands for

_TOKEN = re.compile(r"[\x21-\x7e]{20,200}")
_REALM = 'Bearer realm="stillhouse"'


class On(StrEnum):
    nothing = "nothing"  # The service; lists leave out what their reader does not see
    experiment = "experiment"
    experiments = "experiments"  # With those in the parameter `also`
    deleted = "deleted"  # One that may have been deleted
    run = "run"
    project = "project"
    study = "study"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a route needs; every route depends on the `apply` of one."""

    action: Action | None  # What the sender must be allowed to do; None = public, no credential is looked at
    on: On = On.nothing
    own_token: Callable[[Settings], SecretStr | None] | None = None
    """A token of the settings that opens this route and no other; None = there is none."""
    any_parameters: bool = False  # Whether query parameters that the route does not declare are let through

    async def apply(self, request: Request) -> None:
        """Identifies the sender as `request.state.caller`, and raises where the rule does not admit them."""
        await self.admit(request)
        if not self.any_parameters:
            refuse_unknown_parameters(request)

    async def admit(self, request: Request) -> None:
        if self.action is None:
            return
        settings: Settings = request.app.state.settings
        own = None if self.own_token is None else self.own_token(settings)
        if own is not None and bears(request, own):
            return
        caller = await authenticated(request)
        request.state.caller = caller
        if caller.principal.kind is not UserKind.local:
            await _apply(self, self.action, caller, request)


def _needs(action: Action | None, on: On = On.nothing, **more: Any) -> Any:
    return Depends(Rule(action, on, **more).apply)


PUBLIC = _needs(None)
PUBLIC_ANY_QUERY = _needs(None, any_parameters=True)
"""Public, with any parameters: the page's script reads its own, a provider and a prober add theirs."""
SIGNED_IN = _needs(Action.see)  # Whoever has a valid credential; lists show what they see
SUBMIT = _needs(Action.submit)
SEE = _needs(Action.see, On.experiment)
SEE_ALL = _needs(Action.see, On.experiments)
MANAGE = _needs(Action.manage_own, On.experiment)
MANAGE_DELETED = _needs(Action.manage_own, On.deleted)
ORGANISE = _needs(Action.organise, On.experiment)
SEE_RUN = _needs(Action.see, On.run)
SUBMIT_FROM_RUN = _needs(Action.submit, On.run)  # To the run's project
ORGANISE_RUN = _needs(Action.organise, On.run)
MANAGE_RUN = _needs(Action.manage_own, On.run)
SEE_STUDY = _needs(Action.see, On.study)
MANAGE_STUDY = _needs(Action.manage_own, On.study)
SEE_PROJECT = _needs(Action.see, On.project)
MANAGE_PROJECT = _needs(Action.manage_project, On.project)
ADMINISTER = _needs(Action.administer)
SCRAPE = _needs(Action.operate, own_token=lambda settings: settings.metrics_token)


@dataclass(frozen=True, slots=True)
class Caller:
    principal: Principal
    owner: str  # Name that they submit experiments under
    address: str | None = None

    @property
    def visible(self) -> Visibility:
        return self.principal.visibility

    @property
    def actor(self) -> Actor:
        return self.principal.actor(self.address)


def rule_of(route: RouteContext | APIRoute) -> Rule:
    """Returns the rule that a route depends on; LookupError if it has none, or several."""
    calls = (dependency.call for dependency in route.dependant.dependencies)
    rules = [owner for call in calls if isinstance(owner := getattr(call, "__self__", None), Rule)]
    if len(rules) != 1:
        raise LookupError(f"{route.path} ({route.name}) needs one rule of api.access, not {len(rules)}")
    return rules[0]


def refuse_unruled(app: FastAPI) -> None:
    for route in iter_route_contexts(app.routes):
        rule_of(route)


async def current_user(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


async def authenticated(request: Request) -> Caller:
    """Returns who sends a request; ProblemError says why they or the owner whom they name are refused."""
    state = request.app.state
    if not state.closed:
        name = _named_owner(request) or own_name()
        return Caller(local(name), name, client_address(request))
    principal = await _principal(request)
    named = _named_owner(request)
    if named not in (None, principal.user) and (reason := principal.lacks(Action.administer)):
        raise ProblemError(
            "forbidden",
            f"header {OWNER_HEADER}: only an administrator may submit as {named}: {reason}; or leave the "
            "header out",
        )
    return Caller(principal, named or principal.user, client_address(request))


async def _principal(request: Request) -> Principal:
    settings: Settings = request.app.state.settings
    principals: Principals = request.app.state.principals
    if "Authorization" in request.headers:
        if settings.token is not None and bears(request, settings.token):
            return _FIRST
        text = _bearer(request)
        try:
            return await principals.of_token(secret_sha256(text))
        except Refused as refusal:
            request.app.state.throttle.failed_bearer(request, text)
            raise _invalid_token(str(refusal)) from None
    for identify in request.app.state.identities:
        identity: Identity | None = await run_in_threadpool(identify, request)
        if identity is not None:
            request.state.identity = identity
            return await _identified(principals, identity)
    raise ProblemError(
        "unauthenticated",
        "this server requires a token; send Authorization: Bearer <token>, or log in at /login",
        headers={"WWW-Authenticate": _REALM},
    )


async def _identified(principals: Principals, identity: Identity) -> Principal:
    try:
        if identity.token_sha256 is not None:
            return await principals.of_token(identity.token_sha256)
        return _FIRST if identity.own_token else await principals.of_user(identity.user, identity.scope)
    except Refused as refusal:
        raise ProblemError("unauthenticated", str(refusal), headers={"WWW-Authenticate": _REALM}) from None


_FIRST = Principal(FIRST_ADMINISTRATOR, UserKind.person, Scope.admin, administrator=True)


def _bearer(request: Request) -> str:
    scheme, _, text = request.headers["Authorization"].partition(" ")
    if scheme.lower() != "bearer":
        raise _invalid_token("the Authorization header is of another scheme; send Bearer and a token")
    text = text.strip()
    if not _TOKEN.fullmatch(text):
        raise _invalid_token("what follows Bearer is not a token; copy it again, whole and without spaces")
    return text


def _invalid_token(detail: str) -> ProblemError:
    challenge = f'{_REALM}, error="invalid_token", error_description="{detail}"'
    return ProblemError("invalid-token", detail, headers={"WWW-Authenticate": challenge})


def bears(request: Request, token: SecretStr) -> bool:
    """Returns whether the request carries the token; takes as long whatever it carries."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    same = hmac.compare_digest(given.strip().encode(), token.get_secret_value().encode())
    return same and scheme.lower() == "bearer"


def _named_owner(request: Request) -> str | None:
    name = request.headers.get(OWNER_HEADER)
    if name is not None and not is_user_name(name):
        raise ProblemError(
            "invalid-parameter",
            f"header {OWNER_HEADER} takes up to 100 letters, digits and . _ @ -, starting with a letter "
            "or digit",
        )
    return name


@lru_cache(maxsize=1)
def own_name() -> str:
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return "local"
    return name if is_user_name(name) else "local"


async def _apply(rule: Rule, action: Action, caller: Caller, request: Request) -> None:
    principal, store = caller.principal, request.app.state.store
    if rule.on is On.nothing:
        refuse_unscoped(principal, action)
        return
    if action is Action.see and principal.visibility.projects is None:
        return
    kind = "experiment" if rule.on in (On.experiments, On.deleted) else str(rule.on)
    named: Sequence[Any]
    found: Mapping[Any, Belonging]
    if rule.on is On.project:
        named = [request.path_params["project"]]
        found = {project: Belonging(project, principal.user) for project in named}
    else:
        named = _ids(rule.on, request)  # None where they are not numbers: refused when parameters are read.
        found = await run_in_threadpool(_belongings, store, rule.on, named) if named else {}
    for name in named:
        belonging = found.get(name)
        if belonging is None or not principal.sees(belonging.project):
            raise NotFound(kind, name)
        wanted = principal.managing(belonging.owner) if action is Action.manage_own else action
        if reason := principal.lacks(wanted, *belonging):
            names = await run_in_threadpool(store.projects.maintainers, belonging.project)
            raise _forbidden(principal, reason, wanted, belonging, names)


def refuse_unscoped(principal: Principal, action: Action) -> None:
    """Raises `forbidden` where no project could allow it: the scope is too small, or it is administration."""
    if action is Action.see:
        return  # Every scope includes it, and lists show what is visible.
    # As if they had every role: what is still missing is the scope, or to be an administrator.
    widest = principal
    if action is Action.submit:
        widest = replace(principal, administrator=True, restricted_to=None)
    if reason := widest.lacks(action):
        raise _forbidden(widest, reason, action)


def refuse_submission(caller: Caller, project: str, store: Store) -> None:
    """Raises `forbidden` for who may not submit to a project, saying what is missing and who can grant it."""
    principal = caller.principal
    if reason := principal.lacks(Action.submit, project, caller.owner):
        belonging = Belonging(project, caller.owner)
        # A token for one project learns nothing of another, not even that it is there.
        maintainers = store.projects.maintainers(project) if principal.sees(project) else ()
        raise _forbidden(principal, reason, Action.submit, belonging, maintainers)


def _forbidden(
    principal: Principal,
    reason: str,
    action: Action,
    belonging: Belonging | None = None,
    maintainers: Sequence[str] = (),
) -> ProblemError:
    detail = f"{reason} (maintainers: {', '.join(maintainers)})" if maintainers else reason
    project, owner = belonging or (None, None)
    headers = None
    for scope in Scope:
        if not principal.scope.includes(scope) and replace(principal, scope=scope).may(
            action, project, owner
        ):
            headers = {"WWW-Authenticate": f'{_REALM}, error="insufficient_scope", scope="{scope}"'}
            detail = reason  # A maintainer could not help.
            break
    return ProblemError("forbidden", detail, headers=headers)


_ID = TypeAdapter(Annotated[int, Field(ge=1, le=MAX_ID)])
"""Reads a number as the routes do, so that no way of writing one gets past the rule."""


def _ids(on: On, request: Request) -> list[int]:
    """Returns the numbers of the objects that a request names, in order; none when one is not a number."""
    texts = [request.path_params[f"{on}_id" if on in (On.run, On.study) else "experiment_id"]]
    if on is On.experiments:
        texts += request.query_params.getlist("also")
    try:
        return [_ID.validate_python(text) for text in texts]
    except ValidationError:
        return []


def _belongings(store: Store, on: On, ids: Sequence[int]) -> dict[int, Belonging]:
    if on in (On.run, On.study):
        (id,) = ids
        found = (store.runs if on is On.run else store.studies).belonging(id)
        return {} if found is None else {id: found}
    if on is On.deleted:
        (id,) = ids
        if (deleted := store.removal.deleted_experiment(id)) is not None:
            return {id: Belonging(*deleted)}
    return store.experiments.belonging(ids)


def refuse_unknown_parameters(request: Request) -> None:
    """Raises `invalid-parameter` with the nearest known name: a misspelt filter is not ignored."""
    if not request.query_params:
        return
    known = sorted(set(query_names(request.scope["route"].dependant)))
    problems: list[Problem] = []
    for name in [name for name in request.query_params if name not in known][:MAX_PROBLEMS]:
        hint = "this operation takes " + (", ".join(known) or "none")
        if len(problems) < MAX_SUGGESTIONS and (close := difflib.get_close_matches(name[:100], known, n=1)):
            hint = f"did you mean '{close[0]}'?"
        problems.append(Problem("unknown-key", f"query.{name[:100]}", f"unknown parameter; {hint}"))
    if problems:
        raise ProblemError("invalid-parameter", str(problems[0]), errors=problems)


def query_names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for inner in dependant.dependencies:
        yield from query_names(inner)


async def while_permitted(
    request: Request, frames: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """Yields the frames of a stream until its reader may not read it, or does not see the same any more."""
    rule = rule_of(request.scope["route"])
    async with aclosing(frames):
        visible = request.state.caller.visible
        next_look_s = time.monotonic() + RECHECK_S
        async for frame in frames:
            yield frame
            if time.monotonic() < next_look_s:
                continue
            next_look_s = time.monotonic() + RECHECK_S
            try:
                await rule.admit(request)
            except (ProblemError, NotFound):
                return
            except StoreError:
                continue  # Unavailable: it is asked again at the next look.
            if request.state.caller.visible != visible:
                return
