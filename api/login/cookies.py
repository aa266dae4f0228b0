"""Cookies of browser sessions: their names, and when a browser may hold one.

Over https the name begins with `__Host-`: the browser then guarantees that this host set the cookie, over
TLS, for the whole host. Browsers refuse that name over plain http, except where they count loopback as
secure, and not all do. On loopback the cookie therefore has a plain name with the port in it, because
cookies of one host are shared by all of its ports. Over plain http from anywhere else there are no sessions.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request, Response

from api.guard import LOOPBACK_NAMES
from api.problems import ProblemError
from service.config.settings import Settings


@dataclass(frozen=True, slots=True)
class CookieJar:
    """The cookies of one kind of connection."""

    session: str
    """Name of the cookie that holds a session."""
    provider_login: str
    """Name of the cookie that holds a login at an OpenID provider until it comes back."""
    secure: bool


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
    """Returns the cookies of a browser that wants to log in.

    Raises:
        ProblemError: `insecure-login` where a session could be read on the network.
    """
    jar = jar_of(request)
    if jar is None:
        raise ProblemError(
            "insecure-login",
            "browser sessions need https: put TLS in front of the server and set STILLHOUSE_URL to its "
            "https address",
        )
    return jar


def put(response: Response, jar: CookieJar, name: str, value: str, max_age_s: float) -> None:
    """Sets a cookie."""
    response.set_cookie(
        name, value, max_age=int(max_age_s), path="/", secure=jar.secure, httponly=True, samesite="lax"
    )


def drop(response: Response, jar: CookieJar, name: str) -> None:
    """Removes a cookie; the attributes are those that it was set with, or the browser keeps it."""
    response.delete_cookie(name, path="/", secure=jar.secure, httponly=True, samesite="lax")
