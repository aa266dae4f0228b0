"""Who asks, and whether they may: one rule for each route, and the dependency that applies it.

Access is open on a service that listens on loopback without a token: whoever reaches it is its own user,
to whom everything is allowed. Otherwise it is closed: a request carries a bearer token, or is identified by
one of the application's `identities` (a session, a proxy). What is hidden from the sender answers as what is
missing.
"""

from __future__ import annotations

import getpass
import hmac
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Annotated

from fastapi import FastAPI, Request
from fastapi.routing import iter_route_contexts
from pydantic import Field, SecretStr, TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool

from api.addresses import client_address
from api.identity import Identity
from api.principals import Principals
from api.problems import ProblemError
from service.config.settings import Settings
from service.db.errors import NotFound, StoreError
from service.domain.access import (
    Action,
    Actor,
    Principal,
    Scope,
    UserKind,
    Visibility,
    is_user_name,
    local,
)
from service.store import Store
from service.store.people import Refused
from service.store.reading import Belonging

OWNER_HEADER = "Stillhouse-Owner"
MIN_TOKEN_LENGTH = 32
MAX_ID = 2**63 - 1
"""Largest integer that both databases hold."""
RECHECK_S = 30.0
"""Time between two looks at whether a stream's reader may still read it."""
FIRST_ADMINISTRATOR = "admin"
"""User whom `STILLHOUSE_TOKEN` stands for."""

_TOKEN = re.compile(r"[\x21-\x7e]{20,200}")
_REALM = 'Bearer realm="stillhouse"'


class On(StrEnum):
    """What a rule is about: which object a request names."""

    nothing = "nothing"
    """The service; lists leave out what their reader does not see."""
    experiment = "experiment"
    """The experiment in the path."""
    experiments = "experiments"
    """The experiment in the path and those in the parameter `also`."""
    deleted = "deleted"
    """The experiment in the path, which may have been deleted."""
    run = "run"
    """The run in the path."""
    project = "project"
    """The project in the path."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a route needs."""

    action: Action | None
    """What the sender must be allowed to do; None = public, no credential is looked at."""
    on: On = On.nothing
    own_token: Callable[[Settings], SecretStr | None] | None = None
    """A token of the settings that opens this route and no other; None = there is none."""


PUBLIC = Rule(None)
SIGNED_IN = Rule(Action.see)
"""Whoever has a valid credential; lists show what they see."""
_SUBMIT = Rule(Action.submit)
_SEE, _STEER = Rule(Action.see, On.experiment), Rule(Action.steer_own, On.experiment)
_ORGANISE = Rule(Action.organise, On.experiment)
_ADMINISTER, _MANAGE = Rule(Action.administer), Rule(Action.manage_project, On.project)
_SEE_ALL = Rule(Action.see, On.experiments)
_SEE_RUN, _STEER_RUN = Rule(Action.see, On.run), Rule(Action.steer_own, On.run)

RULES: Mapping[str, Rule] = {
    # Experiments
    "submit_experiment": _SUBMIT,
    "list_experiments": SIGNED_IN,
    "list_deleted_experiments": SIGNED_IN,
    "get_experiment": _SEE,
    "delete_experiment": _STEER,
    "cancel_experiment": _STEER,
    "pause_experiment": _STEER,
    "resume_experiment": _STEER,
    "retry_experiment": _STEER,
    "set_experiment_priority": _STEER,
    "get_experiment_spec": _SEE,
    "list_experiment_runs": _SEE,
    "list_events": _SEE,
    "get_ledger": _SEE,
    "stream_experiment": _SEE,
    "stream_changes": SIGNED_IN,
    "export_experiment": _SEE,
    # Answers
    "compare_experiment": _SEE_ALL,
    "score_experiment": _SEE_ALL,
    "frontier_experiment": _SEE_ALL,
    "effects_experiment": _SEE_ALL,
    "recommend_experiment": _SEE_ALL,
    "speedup_experiment": _SEE_ALL,
    "report_experiment": _SEE_ALL,
    "list_figures": _SEE_ALL,
    "get_figure": _SEE_ALL,
    # Runs
    "list_runs": SIGNED_IN,
    "export_runs": SIGNED_IN,
    "get_run": _SEE_RUN,
    "cancel_run": _STEER_RUN,
    "retry_run": _STEER_RUN,
    "get_points": _SEE_RUN,
    "get_measurements": _SEE_RUN,
    "get_run_ledger": _SEE_RUN,
    "get_summary": _SEE_RUN,
    "get_attempts": _SEE_RUN,
    "get_logs": _SEE_RUN,
    "get_model": _SEE_RUN,
    "get_model_card": _SEE_RUN,
    "get_run_config": _SEE_RUN,
    "list_checkpoints": _SEE_RUN,
    "get_trace": _SEE_RUN,
    "get_kernel_trace": _SEE_RUN,
    "get_predictions": _SEE_RUN,
    "stream_run": _SEE_RUN,
    "restore_experiment": Rule(Action.steer_own, On.deleted),
    "tag_experiment": _ORGANISE,
    "annotate_experiment": _ORGANISE,
    "archive_experiment": _ORGANISE,
    # People and projects
    "list_users": _ADMINISTER,
    "add_user": _ADMINISTER,
    "change_user": _ADMINISTER,
    "list_tokens": SIGNED_IN,  # Their own; those of others as an administrator.
    "create_token": _SUBMIT,
    "revoke_token": _SUBMIT,
    "list_audit": _ADMINISTER,
    "export_audit": _ADMINISTER,
    "list_projects": SIGNED_IN,
    "create_project": _ADMINISTER,
    "get_project": Rule(Action.see, On.project),
    "get_project_limits": Rule(Action.see, On.project),
    "get_project_usage": Rule(Action.see, On.project),
    "set_project_limits": _MANAGE,  # Most fields as an administrator only.
    "change_project": _MANAGE,
    "archive_project": _MANAGE,
    "set_member": _MANAGE,
    "remove_member": _MANAGE,
    # Notices: their own alone
    "list_subscriptions": SIGNED_IN,
    "add_subscription": _SUBMIT,
    "remove_subscription": _SUBMIT,
    "test_subscription": _SUBMIT,
    "list_deliveries": SIGNED_IN,
    # Saved views: their own, and those of projects that they see
    "list_views": SIGNED_IN,
    "save_view": _SUBMIT,
    "delete_view": _SUBMIT,
    # Queue and specs
    "get_queue": SIGNED_IN,
    "list_hardware": SIGNED_IN,
    "get_cluster": SIGNED_IN,
    "list_held_devices": SIGNED_IN,
    "list_shares": SIGNED_IN,
    "get_spec_schema": SIGNED_IN,
    "list_examples": SIGNED_IN,
    "validate_spec": _SUBMIT,
    "preview_spec": _SUBMIT,
    # The service itself
    "healthz": PUBLIC,
    "readyz": SIGNED_IN,
    "metrics": Rule(Action.operate, own_token=lambda settings: settings.metrics_token),
    # Logging in
    "login_page": PUBLIC,
    "login_options": PUBLIC,
    "login_with_token": PUBLIC,
    "login_with_provider": PUBLIC,
    "login_from_provider": PUBLIC,
    "device_code": PUBLIC,
    "device_token": PUBLIC,
    "device_page": PUBLIC,
    "logout": SIGNED_IN,
    "whoami": SIGNED_IN,
    "list_sessions": SIGNED_IN,
    "end_session": SIGNED_IN,
    "describe_device_login": SIGNED_IN,
    "decide_device_login": SIGNED_IN,
    # Static files and texts, the same for every installation
    "openapi_document": PUBLIC,
    "explain_problem": PUBLIC,
    "documentation": PUBLIC,
    "start_documentation": PUBLIC,
    "documentation_asset": PUBLIC,
    "page": PUBLIC,
    "static": PUBLIC,
    "plotly_script": PUBLIC,
}
"""The rule of every operation, by the name of its endpoint; a route without one is refused at the start."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request."""

    principal: Principal
    owner: str
    """Name that they submit experiments under."""
    address: str | None = None
    """Network address that they sent it from."""

    @property
    def visible(self) -> Visibility:
        """What lists show them."""
        return self.principal.visibility

    @property
    def actor(self) -> Actor:
        """Them, as the author of a change."""
        return self.principal.actor(self.address)


def refuse_unruled(app: FastAPI) -> None:
    """Checks that every route has a rule.

    Raises:
        LookupError: naming the routes without one, or with that of another.
    """
    names = Counter(str(context.name) for context in iter_route_contexts(app.routes))
    if missing := sorted(names.keys() - RULES.keys()):
        raise LookupError(f"routes without a rule in api.access.RULES: {', '.join(missing)}")
    shared = sorted(name for name, count in names.items() if count > 1 and RULES[name] is not PUBLIC)
    if shared:
        raise LookupError(f"routes that share the rule of another by their name: {', '.join(shared)}")


async def authorised(request: Request) -> None:
    """Finds out who sends a request, and whether the route's rule lets them; `request.state.caller` is them.

    Raises:
        ProblemError: `unauthenticated` or `invalid-token`; `forbidden` for what they see and may not do.
        NotFound: the object is missing, or they do not see it.
    """
    rule = RULES[request.scope["route"].name]
    if rule.action is None:
        return
    settings: Settings = request.app.state.settings
    if rule.own_token is not None and (own := rule.own_token(settings)) is not None and bears(request, own):
        return
    caller = await authenticated(request)
    request.state.caller = caller
    if caller.principal.kind is not UserKind.local:
        await _apply(rule, rule.action, caller, request)


async def current_user(request: Request) -> Caller:
    """Returns who sent a request that `authorised` let through."""
    caller: Caller = request.state.caller
    return caller


async def authenticated(request: Request) -> Caller:
    """Returns who sends a request.

    Raises:
        ProblemError: `unauthenticated` without a credential, `invalid-token` for one that is not accepted,
            `invalid-parameter` for an owner that is no name, `forbidden` for one that the sender is not.
    """
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
            return await principals.of_token(text)
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
            found = await principals.of_token_hash(identity.token_sha256)
        elif identity.own_token:
            found = _FIRST
        else:
            found = await principals.of_user(identity.user, identity.scope)
    except Refused as refusal:
        raise ProblemError("unauthenticated", str(refusal), headers={"WWW-Authenticate": _REALM}) from None
    return found


_FIRST = Principal(FIRST_ADMINISTRATOR, UserKind.person, Scope.admin, administrator=True)


def _bearer(request: Request) -> str:
    """Returns the token that a request carries, in the form of a token."""
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
    """Returns the name of the operating system's user that the service runs as, or `local`."""
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
    if rule.on is On.project:
        project = request.path_params["project"]
        if not principal.sees(project):
            raise NotFound("project", project)
        if reason := principal.lacks(action, project):
            names = await run_in_threadpool(store.maintainers, project)
            raise _forbidden(principal, reason, action, Belonging(project, principal.user), names)
        return
    ids = _ids(rule.on, request)
    if not ids:
        return  # Not numbers: refused when the parameters are read.
    found = await run_in_threadpool(_belongings, store, rule.on, ids)
    kind = "run" if rule.on is On.run else "experiment"
    for id in ids:
        belonging = found.get(id)
        if belonging is None or not principal.sees(belonging.project):
            raise NotFound(kind, id)
        wanted = principal.steering(belonging.owner) if action is Action.steer_own else action
        if reason := principal.lacks(wanted, *belonging):
            names = await run_in_threadpool(store.maintainers, belonging.project)
            raise _forbidden(principal, reason, wanted, belonging, names)


def refuse_unscoped(principal: Principal, action: Action) -> None:
    """Checks whether an action can be allowed at all, before it is known in which project it is.

    Raises:
        ProblemError: `forbidden`: the scope is too small, or the action is for administrators.
    """
    if action is Action.see:
        return  # Every scope includes it, and lists show what is visible.
    # As if they had every role: what is still missing is the scope, or to be an administrator.
    widest = principal
    if action is Action.submit:
        widest = replace(principal, administrator=True, restricted_to=None)
    if reason := widest.lacks(action):
        raise _forbidden(widest, reason, action)


def refuse_submission(caller: Caller, project: str, store: Store) -> None:
    """Checks whether someone may submit to a project that they see.

    Raises:
        ProblemError: `forbidden`, saying what is missing and who can grant it.
    """
    principal = caller.principal
    if reason := principal.lacks(Action.submit, project, caller.owner):
        belonging = Belonging(project, caller.owner)
        # A token for one project learns nothing of another, not even that it is there.
        maintainers = store.maintainers(project) if principal.sees(project) else ()
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
    if on is On.run:
        texts: Iterable[str] = [request.path_params["run_id"]]
    else:
        texts = [request.path_params["experiment_id"]]
        if on is On.experiments:
            texts = [*texts, *request.query_params.getlist("also")]
    try:
        return [_ID.validate_python(text) for text in texts]
    except ValidationError:
        return []


def _belongings(store: Store, on: On, ids: Sequence[int]) -> dict[int, Belonging]:
    if on is On.run:
        (id,) = ids
        found = store.belonging_of_run(id)
        return {} if found is None else {id: found}
    if on is On.deleted:
        (id,) = ids
        if (deleted := store.deleted_experiment(id)) is not None:
            return {id: Belonging(*deleted)}
    return store.belonging_of_experiments(ids)


async def while_permitted(
    request: Request, frames: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """Yields the frames of a stream until its reader may not read it, or does not see the same any more."""
    async with aclosing(frames):
        visible = request.state.caller.visible
        next_look_s = time.monotonic() + RECHECK_S
        async for frame in frames:
            yield frame
            if time.monotonic() < next_look_s:
                continue
            next_look_s = time.monotonic() + RECHECK_S
            try:
                await authorised(request)
            except (ProblemError, NotFound):
                return
            except StoreError:
                continue  # Unavailable: it is asked again at the next look.
            if request.state.caller.visible != visible:
                return
