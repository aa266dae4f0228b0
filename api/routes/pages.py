"""What browsers load: the web application, the script of plotly, the interactive documentation."""

import gzip
import hashlib
import importlib.metadata
import mimetypes
import posixpath
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final

from fastapi import Header, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from api.access import PUBLIC, PUBLIC_ANY_QUERY
from api.deps import Operations, SettingsDep, given
from api.guard import CONTENT_SECURITY_POLICY, takes_gzip
from api.problems import ProblemError

router = Operations(include_in_schema=False)

_FOLDER: Final = Path(__file__).parent.parent / "static"
_FILES: Final[Mapping[str, Path]] = {
    str(path.relative_to(_FOLDER)): path for path in _FOLDER.rglob("*") if path.is_file()
}
"""What may be asked for, by name: nothing outside the folder, whatever the name."""
_TYPES: Final = {".js": "text/javascript", ".svg": "image/svg+xml"}
"""Where the table of the operating system may say something else."""

_IMPORTED: Final = re.compile(r'^(?:import|export|\}).*?"(\.{1,2}/[^"]+)";', re.MULTILINE)
_ROUTE: Final = re.compile(r'^route\(\s*"([^"]+)",\s*\(\) =>\s*import\("\./([^"]+)"', re.MULTILINE)


def application(module: str | None = None, tab: str | None = None) -> Response:
    """Returns the application, with what the page of a module and its tab import, to be loaded at once."""
    of_tab = "" if module is None or tab is None else posixpath.join(posixpath.dirname(module), f"{tab}.js")
    names = ["app.js", *(name for name in (module, of_tab) if name in _FILES)] if module else []
    modules = dict.fromkeys(one for name in names for one in _imports(name))
    links = "".join(f'<link rel="modulepreload" href="/static/{one}">\n' for one in modules)
    html = _FILES["index.html"].read_text(encoding="utf-8").replace("<script ", f"{links}<script ", 1)
    return HTMLResponse(html, headers={"Cache-Control": "no-cache"})


@lru_cache(maxsize=256)
def _imports(name: str) -> tuple[str, ...]:
    """A module and all that it imports statically."""
    found, left = {name: None}, [name]
    while left:
        of = left.pop()
        for path in _IMPORTED.findall(_FILES[of].read_text(encoding="utf-8")):
            one = posixpath.normpath(posixpath.join(posixpath.dirname(of), path))
            if one not in found:
                found[one] = None
                left.append(one)
    return tuple(found)


def missing_page() -> Response:
    """The application, which says that this page does not exist."""
    answer = application()
    answer.status_code = 404
    return answer


def paths() -> Iterator[tuple[str, str]]:
    """Yields the paths of the pages that `app.js` routes, such as `/runs/{id}/{tab}`, with their modules."""
    for pattern, module in _ROUTE.findall(_FILES["app.js"].read_text(encoding="utf-8")):
        path = re.sub(r":(\w+)", r"{\1}", pattern)
        if path.endswith("?"):
            yield path[: path.rindex("/")], module
        yield path.removesuffix("?"), module


_EMBEDDED: Final = "/embed"
"""Path of the pages that others may show in a frame, as far as the settings allow it."""


def _route(path: str, module: str) -> None:
    @router.operation(f"GET {path}", PUBLIC_ANY_QUERY)
    def page(request: Request, settings: SettingsDep) -> Response:
        answer = application(module, request.path_params.get("tab"))
        if path.startswith(_EMBEDDED) and settings.embed_origins:
            answer.headers["Content-Security-Policy"] = f"{CONTENT_SECURITY_POLICY}{settings.embed_origins}"
        return answer


for _path, _module in paths():
    _route(_path, _module)


# Before all other static files, whose route takes any name.
PLOTLY = "/static/vendor/plotly.min.js"
_PLOTLY: Final = Path(str(files("plotly") / "package_data" / "plotly.min.js"))


@router.operation(f"GET {PLOTLY}", PUBLIC)
def plotly_script(
    v: Annotated[str | None, given("Version of the package.", max_length=100)] = None,
    accept_encoding: Annotated[str, Header()] = "",
) -> Response:
    """Plotly's script; without its version, the way to it."""
    version = importlib.metadata.version("plotly")
    if v != version:
        return RedirectResponse(f"{PLOTLY}?v={version}", headers={"Cache-Control": "no-cache"})
    answer = _sent(_PLOTLY, compressed=takes_gzip(accept_encoding))
    answer.headers["Cache-Control"] = "public, max-age=31536000, immutable"
    return answer


@router.operation("GET /static/{name:path}", PUBLIC_ANY_QUERY)
def static(
    name: str,
    if_none_match: Annotated[str | None, Header()] = None,
    accept_encoding: Annotated[str, Header()] = "",
) -> Response:
    """One of the application's files."""
    return file(name, if_none_match, compressed=takes_gzip(accept_encoding))


def file(name: str, known: str | None = None, *, compressed: bool = False) -> Response:
    """Returns one of the application's files, or that it is still the `known` one (If-None-Match)."""
    path = _FILES.get(name)
    if path is None:
        raise ProblemError("not-found", "the web page has no such file")
    return _sent(path, known, compressed=compressed)


def _sent(path: Path, known: str | None = None, *, compressed: bool) -> Response:
    content, tag = _read(path, path.stat().st_mtime_ns, compressed)
    headers = {"Cache-Control": "no-cache", "ETag": tag, "Vary": "Accept-Encoding"}
    if known == tag:
        return Response(status_code=304, headers=headers)
    kind = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    if compressed:
        headers["Content-Encoding"] = "gzip"
    return Response(content, media_type=kind, headers=headers)


@lru_cache(maxsize=256)
def _read(path: Path, changed_ns: int, compressed: bool) -> tuple[bytes, str]:
    """Content, as it is sent, and entity tag of a file as it was changed last."""
    content = path.read_bytes()
    if compressed:
        content = gzip.compress(content, mtime=0)
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'


_ASSETS = files("fastapi_offline") / "static"
_SWAGGER_TYPES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
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


@router.operation("GET /docs", PUBLIC)
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


@router.operation("GET /docs/start.js", PUBLIC)
async def start_documentation() -> Response:
    """What starts Swagger UI; a file of its own, because the policy allows no inline script."""
    return Response(_START, media_type="text/javascript")


@router.operation("GET /docs/{name}", PUBLIC)
def documentation_asset(name: str) -> Response:
    """One of Swagger UI's files."""
    if name not in _SWAGGER_TYPES:
        raise ProblemError("not-found", "the documentation has no such file")
    content = (_ASSETS / name).read_bytes()
    return Response(
        content, media_type=_SWAGGER_TYPES[name], headers={"Cache-Control": "private, max-age=86400"}
    )
