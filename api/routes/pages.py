"""The web page: static files that read the API like any other client."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

from api.problems import ProblemError

router = APIRouter(include_in_schema=False)

_FILES = Path(__file__).parent.parent / "static"
_TYPES = {
    "index.html": "text/html",
    "login.html": "text/html",
    "device.html": "text/html",
    "page.css": "text/css",
    "session.js": "text/javascript",
    "login.js": "text/javascript",
    "device.js": "text/javascript",
    "account.js": "text/javascript",
    "page.js": "text/javascript",
    "chart.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


@router.get("/")
def page() -> Response:
    """The web page."""
    return file("index.html")


@router.get("/static/{name}")
def static(name: str) -> Response:
    """One of the page's files."""
    return file(name)


def file(name: str) -> Response:
    """Returns one of the page's files.

    Raises:
        ProblemError: `not-found` for any other name.
    """
    if name not in _TYPES:
        raise ProblemError("not-found", "the web page has no such file")
    content = (_FILES / name).read_bytes()
    return Response(content, media_type=_TYPES[name], headers={"Cache-Control": "no-cache"})
