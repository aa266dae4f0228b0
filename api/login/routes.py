"""Logging in and out, in a browser: the page, a pasted token, the provider; and who is logged in."""

import hmac
import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Path, Query, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse

from api.access import FIRST_ADMINISTRATOR, PUBLIC, PUBLIC_ANY_QUERY, SIGNED_IN
from api.bodies import PastedToken
from api.deps import CurrentUser, Operations, SettingsDep, StoreDep, ThrottleDep, given
from api.login import people, sessions
from api.principals import Identity, Via
from api.problems import ProblemError
from api.routes.pages import file
from api.throttle import LOGIN, OIDC, address_key, client_address
from service.domain.access import Action, UserKind
from service.domain.people import PUBLIC_ID_LENGTH, SESSION_IDLE_S, Session, Whoami
from service.domain.records import Items
from service.domain.serialization import Serializable
from service.store.people import Refused, secret_sha256

if TYPE_CHECKING:
    from api.login.oidc import Provider

_logger = logging.getLogger(__name__)

pages = Operations(include_in_schema=False)  # What a browser opens; not for programs
router = Operations(tags=["people"])

_NO_STORE = {"Cache-Control": "no-store"}


async def _no_store(response: Response) -> None:
    response.headers.update(_NO_STORE)


NO_STORE = Depends(_no_store)

SessionId = Annotated[
    str,
    Path(pattern=f"^[0-9a-f]{{{PUBLIC_ID_LENGTH}}}$", description="Id of the session, as the list has it."),
]


@dataclass(frozen=True, slots=True)
class LoginOptions(Serializable):
    """How one can log in here."""

    required: bool  # Whether requests must show whom they come from at all
    provider: str | None  # Host of the OpenID provider; null = none is set


@dataclass(frozen=True, slots=True)
class ListedSession(Session):
    """A session, and whether it is the one that asks."""

    current: bool  # Whether this request came with it


@pages.operation("GET /login", PUBLIC_ANY_QUERY)
def login_page() -> Response:
    """The login page; its script reads the parameters."""
    return file("login.html")


@pages.operation("GET /login/options", PUBLIC, None, NO_STORE)
def login_options(request: Request, settings: SettingsDep) -> LoginOptions:
    issuer = settings.oidc_issuer
    return LoginOptions(request.app.state.closed, urlsplit(issuer).hostname if issuer else None)


@pages.operation("POST /login/token", PUBLIC)
def login_with_token(
    request: Request, pasted: PastedToken, store: StoreDep, throttle: ThrottleDep
) -> Response:
    """Opens a session with a token, which caps what the session may do and ends it with itself."""
    sessions.refuse_foreign_page(request)
    jar = sessions.jar_for_login(request)
    address = address_key(request)
    throttle.refuse(LOGIN, address)
    sha256 = secret_sha256(pasted.token.strip())
    own = sessions.own_token_sha256(request)
    if own is not None and hmac.compare_digest(sha256, own):
        user = FIRST_ADMINISTRATOR
        people.ensure_user(store, user, administrator=True)
    else:
        try:
            user = store.people.principal_of_token(sha256).user
        except Refused as refusal:
            throttle.take(LOGIN, address)
            raise ProblemError("invalid-token", str(refusal)) from None
    answer = Response(status_code=204, headers=_NO_STORE)
    sessions.log_in(request, answer, jar, user, token_sha256=sha256)
    return answer


async def _with_provider(request: Request, throttle: ThrottleDep) -> "tuple[Provider, sessions.CookieJar]":
    """Returns the provider and the browser's cookies; counts a login."""
    provider: Provider | None = request.app.state.provider
    if provider is None:
        raise ProblemError("not-found", "no OpenID provider is set; log in with a token")
    jar = sessions.jar_for_login(request)
    throttle.count(OIDC, address_key(request))
    return provider, jar


WithProvider = Annotated["tuple[Provider, sessions.CookieJar]", Depends(_with_provider)]


@pages.operation("GET /login/oidc", PUBLIC_ANY_QUERY)
def login_with_provider(
    login: WithProvider, return_to: Annotated[str | None, Query(alias="return")] = None
) -> Response:
    """Sends the browser to the provider; back to the login page if the provider does not answer."""
    provider, jar = login
    back = sessions.safe_return(return_to)
    try:
        url, departure = provider.depart(back)
    except people.ProviderError as error:
        return _failed(back, error)
    answer = RedirectResponse(url, 303, _NO_STORE)
    jar.put(answer, jar.provider_login, departure.packed(), people.LOGIN_LASTS_S)
    return answer


@pages.operation("GET /login/oidc/callback", PUBLIC_ANY_QUERY)
def login_from_provider(request: Request, login: WithProvider) -> Response:
    """Opens a session for whom the provider vouches; a login is used once, whatever becomes of it."""
    provider, jar = login
    departure = people.Departure.unpacked(request.cookies.get(jar.provider_login, ""))
    if departure is None:
        return RedirectResponse(sessions.login_address("/", "provider-late"), 303, _NO_STORE)
    back = sessions.safe_return(departure.return_to)
    try:
        person = provider.arrive(departure, request.query_params)
        answer: Response = RedirectResponse(back, 303, _NO_STORE)
        user = people.person_logs_in(request, person, request.app.state.groups)
        sessions.log_in(request, answer, jar, user)
    except people.ProviderError as failure:
        answer = _failed(back, failure)
    except people.AccountDisabled:
        answer = RedirectResponse(sessions.login_address(back, "account-disabled"), 303, _NO_STORE)
    jar.drop(answer, jar.provider_login)
    return answer


def _failed(back: str, error: people.ProviderError) -> Response:
    _logger.warning("login through the provider: %s", error)
    return RedirectResponse(sessions.login_address(back, error.problem), 303, _NO_STORE)


@router.operation("POST /logout", SIGNED_IN, "End this session", response_class=JSONResponse)
def logout(request: Request, user: CurrentUser) -> Response:
    """Ends the session that the request came with; `provider` is where to end the one there, or null."""
    identity: Identity | None = getattr(request.state, "identity", None)
    provider: Provider | None = request.app.state.provider
    by_provider = identity is not None and identity.subject is not None and identity.token_sha256 is None
    where = provider.end_url() if provider is not None and by_provider else None
    answer = JSONResponse({"provider": where}, headers=_NO_STORE)
    sessions.log_out(request, answer, user.actor)
    return answer


@router.operation("GET /api/v1/whoami", SIGNED_IN, "Who sends this request", NO_STORE)
def whoami(request: Request, user: CurrentUser) -> Whoami:
    """The user, how they were recognised, and what limits what they may do."""
    principal = user.principal
    identity: Identity | None = getattr(request.state, "identity", None)
    via = "open" if principal.kind is UserKind.local else "token" if identity is None else str(identity.via)
    held = sessions.held_session(request) if via == Via.session else None
    return Whoami(
        user.owner,
        via,
        principal.scope,
        principal.administrator,
        {project: role for project, role in principal.roles.items() if principal.reaches(project)},
        principal.restricted_to,
        principal.token_name,
        held.csrf if held is not None else None,
    )


@router.operation(
    "GET /api/v1/sessions", SIGNED_IN, "Browsers that are logged in", NO_STORE, problems=["forbidden"]
)
def list_sessions(
    request: Request,
    user: CurrentUser,
    store: StoreDep,
    everyone: Annotated[bool, given("Those of all users; for administrators.")] = False,
) -> Items[ListedSession]:
    """One's own sessions, or everyone's; the last used first."""
    if everyone and (reason := user.principal.lacks(Action.administer)):
        raise ProblemError("forbidden", reason)
    identity: Identity | None = getattr(request.state, "identity", None)
    current = identity.session if identity is not None else None
    of = None if everyone else user.principal.user
    found = store.sessions.live(
        SESSION_IDLE_S, sessions.own_token_sha256(request), of, within=user.principal.restricted_to
    )
    return Items([ListedSession(**asdict(one), current=one.id == current) for one in found])


@router.operation("DELETE /api/v1/sessions/{session_id}", SIGNED_IN, "End a session", status_code=204)
def end_session(session_id: SessionId, request: Request, user: CurrentUser, store: StoreDep) -> None:
    """Ends one of one's own sessions, or as an administrator anyone's; its browser must log in again.

    A token cannot end a session that may do more than itself.
    """
    store.sessions.end_by_id(session_id, user.principal, client_address(request) or None)
