"""Browser sessions: opened at a login under a new id, recognised by their cookie, safe from other sites.

After a login people go back to where they came from, on this server and nowhere else.

Over https the name begins with `__Host-`: the browser then guarantees that this host set the cookie, over
TLS, for the whole host. Browsers refuse that name over plain http, except where they count loopback as
secure, and not all do. On loopback the cookie therefore has a plain name with the port in it, because
cookies of one host are shared by all of its ports. Over plain http from anywhere else there are no sessions.
"""

import hmac
import secrets
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from fastapi import Request, Response
from fastapi.responses import RedirectResponse

from api.guard import LOOPBACK_NAMES, SAFE_METHODS
from api.principals import Identity, Via
from api.problems import ProblemError
from api.throttle import client_address
from service.config.settings import Settings
from service.domain.access import Actor
from service.domain.people import SESSION_IDLE_S, SESSION_LASTS_S, OpenSession
from service.store import Store
from service.store.people import secret_sha256

CSRF_HEADER = "Stillhouse-CSRF"  # Another site can send the cookie with a change, but not know this
_OWN_PAGES = frozenset({"same-origin", "none"})
_MAX_AGENT = 200
_HOME = "/"
_LONGEST_PATH = 2_000


@dataclass(frozen=True, slots=True)
class CookieJar:
    session: str
    provider_login: str  # Name of the cookie that holds a login at an OpenID provider until it comes back
    secure: bool

    def put(self, response: Response, name: str, value: str, max_age_s: float) -> None:
        response.set_cookie(
            name, value, max_age=int(max_age_s), path="/", secure=self.secure, httponly=True, samesite="lax"
        )

    def drop(self, response: Response, name: str) -> None:
        """Removes a cookie; the attributes are those that it was set with, or the browser keeps it."""
        response.delete_cookie(name, path="/", secure=self.secure, httponly=True, samesite="lax")


def jar_of(request: Request) -> CookieJar | None:
    """Returns the cookies that a request's browser may hold; None over plain http from another machine."""
    settings: Settings = request.app.state.settings
    url = request.url
    if (url.hostname or "").lower() in LOOPBACK_NAMES:
        port = url.port or 80
        return CookieJar(f"stillhouse-{port}", f"stillhouse-{port}-provider", secure=False)
    if settings.url.scheme == "https":
        return CookieJar("__Host-stillhouse", "__Host-stillhouse-provider", secure=True)
    return None


def jar_for_login(request: Request) -> CookieJar:
    """Returns the cookies of a browser that wants to log in, or raises `insecure-login`."""
    jar = jar_of(request)
    if jar is None:
        raise ProblemError(
            "insecure-login",
            "browser sessions need https: put TLS in front of the server and set STILLHOUSE_URL to its "
            "https address",
        )
    return jar


def held_session(request: Request) -> OpenSession | None:
    """Returns the session of a request's cookie if it is still good; reads the database.

    A session that was opened with the installation's own token ends when that token is changed.
    """
    jar = jar_of(request)
    held = request.cookies.get(jar.session) if jar is not None else None
    if not held:
        return None
    store: Store = request.app.state.store
    return store.sessions.open(secret_sha256(held), SESSION_IDLE_S, own_token_sha256(request))


def identify_session(request: Request) -> Identity | None:
    """Recognises a request by its session's cookie; `csrf-failed` for a change without `CSRF_HEADER`."""
    found = held_session(request)
    if found is None:
        return None
    if request.method not in SAFE_METHODS:
        refuse_foreign_page(request)
        given = request.headers.get(CSRF_HEADER, "")
        if not hmac.compare_digest(given.encode("latin-1", "replace"), found.csrf.encode()):
            raise ProblemError(
                "csrf-failed",
                f"a change with a session's cookie needs its {CSRF_HEADER} header, which GET /api/v1/whoami "
                "gives; programs send Authorization: Bearer <token> instead",
            )
    own = found.token_sha256 is not None and found.token_sha256 == own_token_sha256(request)
    return Identity(
        found.session.user,
        Via.session,
        token_sha256=None if own else found.token_sha256,
        own_token=own,
        subject=found.subject,
        session=found.session.id,
    )


def refuse_foreign_page(request: Request) -> None:
    """Raises `csrf-failed` for a change that a browser sends for the page of another site."""
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in _OWN_PAGES:
        raise ProblemError("csrf-failed", "another site's page may not change anything here")


def log_in(
    request: Request, response: Response, jar: CookieJar, user: str, token_sha256: str | None = None
) -> None:
    """Opens a session under a new id and gives it to the browser; the one it held before ends.

    `token_sha256` is the hash of the token with which the user has proved who they are, if it was one.
    """
    store: Store = request.app.state.store
    secret = secrets.token_urlsafe(32)
    address = client_address(request)
    before = request.cookies.get(jar.session)
    store.sessions.begin(
        secret_sha256(secret),
        user,
        csrf=secrets.token_urlsafe(32),
        lasting_s=SESSION_LASTS_S,
        idle_s=SESSION_IDLE_S,
        token_sha256=token_sha256,
        agent=request.headers.get("User-Agent", "")[:_MAX_AGENT] or None,
        replaces=secret_sha256(before) if before else None,
        actor=Actor(user, None, address or None),
    )
    jar.put(response, jar.session, secret, SESSION_LASTS_S)


def log_out(request: Request, response: Response, actor: Actor) -> None:
    jar = jar_of(request)
    held = request.cookies.get(jar.session) if jar is not None else None
    if jar is None or not held:
        return
    store: Store = request.app.state.store
    store.sessions.end(secret_sha256(held), actor)
    jar.drop(response, jar.session)


def own_token_sha256(request: Request) -> str | None:
    token = request.app.state.settings.token
    return secret_sha256(token.get_secret_value()) if token is not None else None


def safe_return(path: str | None) -> str:
    r"""Returns a path of this server to go to; `/` for anything that could lead elsewhere.

    Browsers read `//host`, `/\host` and control characters between slashes as the beginning of another
    host's address.
    """
    if not path or len(path) > _LONGEST_PATH or not path.startswith("/") or path.startswith("//"):
        return _HOME
    if "\\" in path or any(ord(character) < 0x21 or ord(character) == 0x7F for character in path):
        return _HOME
    try:
        parts = urlsplit(path)
    except ValueError:
        return _HOME
    if parts.scheme or parts.netloc or parts.path.startswith("/login"):
        return _HOME
    return path


def login_instead(request: Request, error: ProblemError) -> Response | None:
    """Returns a redirection to the login page for a person who opens a page; None for a program's request."""
    if error.kind.status != 401 or request.method not in ("GET", "HEAD"):
        return None
    if request.headers.get("Sec-Fetch-Mode") != "navigate" or "Authorization" in request.headers:
        return None
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(login_address(here), 303, {"Cache-Control": "no-store"})


def login_address(return_to: str, problem: str | None = None) -> str:
    address = f"/login?return={quote(return_to, safe='')}"
    return address if problem is None else f"{address}&problem={problem}"
