"""Browser sessions: opened at a login under a new id, recognised by their cookie, safe from other sites."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from fastapi import Request, Response

from api.addresses import client_address
from api.login import cookies
from api.principals import Identity, Via
from api.problems import ProblemError
from service.domain.access import Actor
from service.domain.people import SESSION_IDLE_S, SESSION_LASTS_S, OpenSession
from service.store import Store

CSRF_HEADER = "Stillhouse-CSRF"
"""What a change made with a cookie carries: another site can send the cookie, but not know this."""
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_OWN_PAGES = frozenset({"same-origin", "none"})
_MAX_AGENT = 200


def digest(secret: str) -> str:
    """Returns what is stored of a secret of 256 random bits."""
    return hashlib.sha256(secret.encode()).hexdigest()


def held_session(request: Request) -> OpenSession | None:
    """Returns the session of a request's cookie if it is still good; reads the database.

    A session that was opened with the installation's own token ends when that token is changed.
    """
    jar = cookies.jar_of(request)
    held = request.cookies.get(jar.session) if jar is not None else None
    if not held:
        return None
    store: Store = request.app.state.store
    return store.open_session(digest(held), SESSION_IDLE_S, own_token_sha256(request))


def identify_session(request: Request) -> Identity | None:
    """Recognises a request by its session's cookie.

    Raises:
        ProblemError: `csrf-failed` for a change without the session's own header.
    """
    found = held_session(request)
    if found is None:
        return None
    if request.method not in _SAFE_METHODS:
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
    """Refuses a change that a browser sends for the page of another site.

    Raises:
        ProblemError: `csrf-failed`.
    """
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in _OWN_PAGES:
        raise ProblemError("csrf-failed", "another site's page may not change anything here")


def log_in(
    request: Request, response: Response, jar: cookies.CookieJar, user: str, token_sha256: str | None = None
) -> None:
    """Opens a session under a new id and gives it to the browser; the one it held before ends.

    Args:
        request: what the login came with.
        response: the answer, which gets the cookie.
        jar: names of the cookies.
        user: who has proved who they are.
        token_sha256: hash of the token that they proved it with.
    """
    store: Store = request.app.state.store
    secret = secrets.token_urlsafe(32)
    address = client_address(request)
    before = request.cookies.get(jar.session)
    store.begin_session(
        digest(secret),
        user,
        csrf=secrets.token_urlsafe(32),
        lasting_s=SESSION_LASTS_S,
        idle_s=SESSION_IDLE_S,
        token_sha256=token_sha256,
        agent=request.headers.get("User-Agent", "")[:_MAX_AGENT] or None,
        replaces=digest(before) if before else None,
        actor=Actor(user, None, address or None),
    )
    cookies.put(response, jar, jar.session, secret, SESSION_LASTS_S)


def log_out(request: Request, response: Response, actor: Actor) -> None:
    """Ends the request's session, and makes the browser forget it."""
    jar = cookies.jar_of(request)
    held = request.cookies.get(jar.session) if jar is not None else None
    if jar is None or not held:
        return
    store: Store = request.app.state.store
    store.end_session(digest(held), actor)
    cookies.drop(response, jar, jar.session)


def own_token_sha256(request: Request) -> str | None:
    """Returns the hash of the installation's own token."""
    token = request.app.state.settings.token
    return digest(token.get_secret_value()) if token is not None else None
