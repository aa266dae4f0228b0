"""Device logins (RFC 8628): a command line shows a code, and someone who is logged in lets it in.

The two endpoints for devices speak OAuth: forms in, JSON with `error` out. The two for people are part of the
API.
"""

import re
import secrets
from typing import Annotated
from urllib.parse import parse_qs, quote

from fastapi import Path, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from api.access import PUBLIC_ANY_QUERY, SIGNED_IN, Caller
from api.bodies import Decision
from api.deps import CurrentUser, Operations, SettingsDep, StoreDep, ThrottleDep
from api.guard import LOOPBACK_NAMES
from api.login.people import ensure_user
from api.login.routes import NO_STORE
from api.problems import ProblemError
from api.routes.pages import file
from api.throttle import DEVICE_CODE, DEVICE_POLL, USER_CODE, Throttle, address_key, client_address
from service.db.errors import Conflict, NotFound
from service.domain.access import Actor, Scope, UserKind
from service.domain.people import DEVICE_TOKEN_LASTS_S, GRANT_LASTS_S, GRANT_POLL_EVERY_S, DeviceGrant
from service.store import Store
from service.store.people import secret_sha256
from service.store.sessions import Approval, Polled

_ALPHABET = "BCDFGHJKLMNPQRSTVWXZ"  # No vowels, so no words; no digits, which look like other characters
_LENGTH = 8


def new_user_code() -> str:
    """Returns a code of 34 random bits, `WDJB-MJHT` for instance."""
    letters = "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))
    return f"{letters[:4]}-{letters[4:]}"


def normalised(text: str) -> str:
    """Returns a code as it is stored, however it was typed; another text when it is none."""
    letters = "".join(text.upper().split()).replace("-", "")
    return f"{letters[:4]}-{letters[4:]}"


GRANT_TYPE = "urn:ietf:params:oauth:grant-type:device_code"

oauth = Operations(include_in_schema=False)  # What devices use, and the page for people
router = Operations(tags=["people"])

_NO_STORE = {"Cache-Control": "no-store", "Pragma": "no-cache"}
_LONGEST_FORM = 4_096
_MOST_FIELDS = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,79}")

UserCode = Annotated[
    str,
    Path(min_length=1, max_length=20, description="Code that the device shows.", examples=["WDJB-MJHT"]),
]


@oauth.operation("POST /device/code", PUBLIC_ANY_QUERY)
async def device_code(
    request: Request, store: StoreDep, settings: SettingsDep, throttle: ThrottleDep
) -> Response:
    """Begins a device login: codes for the device and for the person, and where that person goes."""
    throttle.count(DEVICE_CODE, address_key(request))
    form = await _form(request)
    name = form.get("name", "a command line")
    if not _NAME.fullmatch(name):
        return _error("invalid_request", f"name: {name[:80]!r}: up to 80 letters, digits, spaces and . _ @ -")
    try:
        scope = Scope(form.get("scope", Scope.operate))
    except ValueError:
        return _error("invalid_scope", f"scope: {form['scope'][:40]!r}: {', '.join(Scope)}")
    device_secret = secrets.token_urlsafe(32)
    grant = await run_in_threadpool(
        store.sessions.begin_device_login,
        secret_sha256(device_secret),
        new_user_code(),
        name,
        scope,
        client_address(request) or None,
    )
    # An address of this machine may be another's to the asker, who has found the server by the request's.
    known = request.base_url if (settings.url.host or "").strip("[]") in LOOPBACK_NAMES else settings.url
    page = f"{str(known).rstrip('/')}/device"
    return JSONResponse(
        {
            "device_code": device_secret,
            "user_code": grant.user_code,
            "verification_uri": page,
            "verification_uri_complete": f"{page}?user_code={quote(grant.user_code)}",
            "expires_in": int(GRANT_LASTS_S),
            "interval": int(GRANT_POLL_EVERY_S),
        },
        headers=_NO_STORE,
    )


@oauth.operation("POST /device/token", PUBLIC_ANY_QUERY)
async def device_token(request: Request, store: StoreDep, throttle: ThrottleDep) -> Response:
    """Gives an approved device its token, once; until then, says why there is none yet."""
    throttle.count(DEVICE_POLL, address_key(request))
    form = await _form(request)
    if form.get("grant_type") != GRANT_TYPE:
        return _error("unsupported_grant_type", f"grant_type must be {GRANT_TYPE}")
    if not form.get("device_code"):
        return _error("invalid_request", "device_code is missing")
    device_sha256 = secret_sha256(form["device_code"])
    polled = await run_in_threadpool(store.sessions.poll_device_login, device_sha256)
    if isinstance(polled, Polled):
        return _error(str(polled), _WHY[polled])
    try:
        token = await run_in_threadpool(
            store.people.create_token,
            polled.user,
            name=polled.name,
            scope=polled.scope,
            project=polled.project,
            lasts_s=polled.lasts_s,
            device_sha256=device_sha256,
            actor=Actor(polled.user, None, client_address(request) or None),
        )
    except (Conflict, NotFound) as error:  # Disabled or demoted since the approval.
        return _error(str(Polled.denied), str(error))
    return JSONResponse(
        {
            "access_token": token.secret,
            "token_type": "Bearer",
            "expires_in": int(polled.lasts_s),
            "scope": str(token.scope),
        },
        headers=_NO_STORE,
    )


_WHY = {
    Polled.pending: "the login is not approved yet; ask again after the interval",
    Polled.too_fast: "too many requests; wait 5 s longer between two of them",
    Polled.denied: "the login was denied",
    Polled.expired: "the code has expired; begin again",
}


@oauth.operation("GET /device", PUBLIC_ANY_QUERY)
def device_page() -> Response:
    """The page on which a device login is approved; its script reads the code."""
    return file("device.html")


@router.operation(
    "GET /api/v1/device-logins/{user_code}",
    SIGNED_IN,
    "A device that asks to be let in",
    NO_STORE,
    problems=["too-many-requests"],
)
def describe_device_login(
    user_code: UserCode, request: Request, user: CurrentUser, store: StoreDep
) -> DeviceGrant:
    """What asks, from where, for what; only while it waits for a decision."""
    return _pending(request, user, store, normalised(user_code))


@router.operation(
    "POST /api/v1/device-logins/{user_code}/decision",
    SIGNED_IN,
    "Let a device in, or turn it away",
    problems=["too-many-requests"],
    status_code=204,
)
def decide_device_login(
    user_code: UserCode, decision: Decision, request: Request, user: CurrentUser, store: StoreDep
) -> None:
    """The device gets a token of the user who approves, for at most what they may do themselves."""
    principal = user.principal
    code = normalised(user_code)
    grant = _pending(request, user, store, code)
    approval = None
    if decision.approve:
        end_s = grant.created_s + DEVICE_TOKEN_LASTS_S
        if principal.token_id is not None:
            own_end_s = store.people.token(principal.token_id).expires_s
            end_s = end_s if own_end_s is None else min(end_s, own_end_s)
        # STILLHOUSE_TOKEN and an open service stand for users who may not have been added yet.
        owner = ensure_user(store, principal.user, administrator=principal.kind is not UserKind.local)
        scope = grant.scope if principal.scope.includes(grant.scope) else principal.scope
        if scope is Scope.admin and not owner.administrator:
            scope = Scope.operate
        approval = Approval(principal.user, scope, principal.restricted_to, end_s)
    store.sessions.decide_device_login(code, approval, principal.actor(client_address(request) or None))


def _pending(request: Request, user: Caller, store: Store, code: str) -> DeviceGrant:
    """Returns what a code names; wrong codes are counted by address and by user."""
    throttle: Throttle = request.app.state.throttle
    keys = (address_key(request), f"user {user.principal.user}")
    for key in keys:
        throttle.refuse(USER_CODE, key)
    try:
        return store.sessions.pending_device_login(code)
    except NotFound as error:
        for key in keys:
            throttle.take(USER_CODE, key)
        raise ProblemError(
            "not-found", "no device with this code is waiting: it may have expired; begin again"
        ) from error


async def _form(request: Request) -> dict[str, str]:
    body = await request.body()
    if len(body) > _LONGEST_FORM:
        raise ProblemError("body-too-large", f"the form has more than {_LONGEST_FORM:,} bytes")
    try:
        fields = parse_qs(body.decode("ascii"), max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise ProblemError(
            "malformed-request", "the body is not a form (application/x-www-form-urlencoded)"
        ) from None
    return {name: values[0] for name, values in fields.items()}


def _error(error: str, description: str) -> Response:
    return JSONResponse({"error": error, "error_description": description}, 400, headers=_NO_STORE)
