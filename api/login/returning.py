"""Where people go after a login: back to where they came from, on this server and nowhere else."""

from __future__ import annotations

from urllib.parse import quote, urlsplit

from fastapi import Request
from fastapi.responses import RedirectResponse, Response

from api.problems import ProblemError

HOME = "/"
_LONGEST = 2_000


def safe_return(path: str | None) -> str:
    r"""Returns a path of this server to go to; `/` for anything that could lead elsewhere.

    Browsers read `//host`, `/\host` and control characters between slashes as the beginning of another
    host's address.
    """
    if not path or len(path) > _LONGEST or not path.startswith("/") or path.startswith("//"):
        return HOME
    if "\\" in path or any(ord(character) < 0x21 or ord(character) == 0x7F for character in path):
        return HOME
    try:
        parts = urlsplit(path)
    except ValueError:
        return HOME
    if parts.scheme or parts.netloc or parts.path.startswith("/login"):
        return HOME
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
