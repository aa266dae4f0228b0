"""The interactive documentation at `/docs`, from assets that are installed with the package."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from api.access import PUBLIC
from api.problems import ProblemError

router = APIRouter(include_in_schema=False)

_ASSETS = files("fastapi_offline") / "static"
_TYPES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
_START = """\
window.ui = SwaggerUIBundle({
  url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true, displayRequestDuration: true,
  presets: [SwaggerUIBundle.presets.apis], layout: "BaseLayout", validatorUrl: null,
});
"""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Swagger UI writes style attributes; scripts still come from this server alone."""


@router.get("/docs", dependencies=[PUBLIC])
async def documentation() -> HTMLResponse:
    """The OpenAPI document, to read and to try."""
    return HTMLResponse(
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Stillhouse API</title>'
        '<meta name="viewport" content="width=device-width">'
        '<link rel="stylesheet" href="/docs/swagger-ui.css"></head><body><div id="swagger-ui"></div>'
        '<script src="/docs/swagger-ui-bundle.js"></script><script src="/docs/start.js"></script>'
        "</body></html>",
        headers={"Content-Security-Policy": _POLICY},
    )


@router.get("/docs/start.js", dependencies=[PUBLIC])
async def start_documentation() -> Response:
    """What starts Swagger UI; a file of its own, because the policy allows no inline script."""
    return Response(_START, media_type="text/javascript")


@router.get("/docs/{name}", dependencies=[PUBLIC])
def documentation_asset(name: str) -> Response:
    """One of Swagger UI's files."""
    if name not in _TYPES:
        raise ProblemError("not-found", "the documentation has no such file")
    content = (_ASSETS / name).read_bytes()
    return Response(content, media_type=_TYPES[name], headers={"Cache-Control": "private, max-age=86400"})
