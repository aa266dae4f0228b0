"""Plotly's script for the web page, from the installed package, under an address that tells its version.

The script has 5 MB, so it goes out compressed to whoever takes that, and is asked for once per version.
"""

from __future__ import annotations

import functools
import gzip
import importlib.metadata
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.responses import RedirectResponse, Response

from api.access import PUBLIC
from api.compression import takes_gzip

router = APIRouter(include_in_schema=False)

PLOTLY = "/static/vendor/plotly.min.js"


@router.get(PLOTLY, dependencies=[PUBLIC])
def plotly_script(
    v: Annotated[str | None, Query(max_length=100, description="Version of the package.")] = None,
    accept_encoding: Annotated[str, Header()] = "",
) -> Response:
    """Plotly's script; without its version, the way to it."""
    version = importlib.metadata.version("plotly")
    if v != version:
        return RedirectResponse(f"{PLOTLY}?v={version}", headers={"Cache-Control": "no-cache"})
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
    if takes_gzip(accept_encoding):
        return Response(
            _compressed(), media_type="text/javascript", headers=headers | {"Content-Encoding": "gzip"}
        )
    return Response(_script(), media_type="text/javascript", headers=headers)


def _script() -> bytes:
    return (files("plotly") / "package_data" / "plotly.min.js").read_bytes()


@functools.cache
def _compressed() -> bytes:
    """The script as 1.5 MB, which the process keeps from the first time on."""
    return gzip.compress(_script(), compresslevel=6, mtime=0)
