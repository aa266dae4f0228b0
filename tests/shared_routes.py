"""Routes that all applications of a test process share.

FastAPI prepares the routes of each application again, which takes half a second; they hold no state.
"""

from __future__ import annotations

from functools import cache

from fastapi import FastAPI
from starlette.routing import BaseRoute

from api import app as assembly
from api import openapi

_include_routes = assembly.include_routes


@cache
def _routes() -> list[BaseRoute]:
    app = FastAPI(**openapi.DESCRIPTION)
    _include_routes(app)
    return app.router.routes


def share_routes() -> None:
    """Lets every further `create_app` of this process use the same routes."""
    assembly.include_routes = lambda app: app.router.routes.extend(_routes())
