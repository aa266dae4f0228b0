"""The web application: files that read the API like any other client, and the shell that pages start in."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Header
from fastapi.responses import Response

from api.access import PUBLIC_PAGE
from api.compression import takes_gzip
from api.problems import ProblemError

router = APIRouter(include_in_schema=False)

_FOLDER: Final = Path(__file__).parent.parent / "static"
_FILES: Final[Mapping[str, Path]] = {
    str(path.relative_to(_FOLDER)): path for path in _FOLDER.rglob("*") if path.is_file()
}
"""What may be asked for, by name: nothing outside the folder, whatever the name."""
_TYPES: Final = {".js": "text/javascript", ".svg": "image/svg+xml"}
"""Where the table of the operating system may say something else."""


def page() -> Response:
    """The shell, in which the page of the address is drawn."""
    return file("index.html")


def paths() -> Iterator[str]:
    """Yields the paths of the pages that `app.js` routes, such as `/runs/{id}/{tab}`."""
    source = _FILES["app.js"].read_text(encoding="utf-8")
    for pattern in re.findall(r'^route\("([^"]+)"', source, re.MULTILINE):
        path = re.sub(r":(\w+)", r"{\1}", pattern)
        if path.endswith("?"):
            yield path[: path.rindex("/")]
        yield path.removesuffix("?")


for _path in paths():
    router.add_api_route(_path, page, methods=["GET"], dependencies=[PUBLIC_PAGE])


@router.get("/static/{name:path}", dependencies=[PUBLIC_PAGE])
def static(
    name: str,
    if_none_match: Annotated[str | None, Header()] = None,
    accept_encoding: Annotated[str, Header()] = "",
) -> Response:
    """One of the application's files."""
    return file(name, if_none_match, compressed=takes_gzip(accept_encoding))


def file(name: str, known: str | None = None, *, compressed: bool = False) -> Response:
    """Returns one of the application's files, or that it has not changed.

    Args:
        name: relative path in `api/static`.
        known: value of If-None-Match.
        compressed: whether it may be sent with gzip.

    Raises:
        ProblemError: `not-found` for any other name.
    """
    path = _FILES.get(name)
    if path is None:
        raise ProblemError("not-found", "the web page has no such file")
    changed_ns = path.stat().st_mtime_ns
    content, tag = _read(path, changed_ns, compressed)
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
