"""Serve the application with uvicorn, on loopback unless a token guards it."""

from __future__ import annotations

import ipaddress
import logging
import socket

import uvicorn

from api.access import MIN_TOKEN_LENGTH
from api.app import create_app
from api.connection import BoundedProtocol
from api.login import refuse_invalid
from service.config.process import freeze_loaded
from service.config.settings import Settings

_logger = logging.getLogger(__name__)
_BACKLOG = 512
_SHUTDOWN_S = 3
_IDLE_S = 10  # Longest pause between two requests of a connection; longer than common clients keep one unused


class UnsafeAddress(ValueError):
    """The settings would let others in; the message says what to set."""


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends live streams before it waits for connections to end."""
        application = self.config.loaded_app
        while not hasattr(application, "state") and hasattr(application, "app"):
            application = application.app
        application.state.streams.close()
        await super().shutdown(sockets)


def serve(settings: Settings, *, listener: socket.socket | None = None) -> None:
    """Runs the API in this process until SIGINT or SIGTERM, on the `listener` or the settings' address."""
    refuse_unsafe(settings)
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        backlog=_BACKLOG,
        access_log=False,
        log_config=None,
        server_header=False,
        lifespan="on",
        ws="none",
        proxy_headers=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        timeout_keep_alive=_IDLE_S,
        http=BoundedProtocol,
    )
    freeze_loaded()
    _Server(config).run(sockets=[listener] if listener is not None else None)


def refuse_unsafe(settings: Settings) -> None:
    """Raises UnsafeAddress, or ValueError for provider and proxy, in one line that says what to set."""
    token = settings.token.get_secret_value() if settings.token is not None else None
    if token is not None and (
        len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()
    ):
        raise UnsafeAddress(
            f"STILLHOUSE_TOKEN needs {MIN_TOKEN_LENGTH} or more printable ASCII characters; make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    refuse_invalid(settings)
    if not settings.asks_who() and not is_loopback(settings.host):
        raise UnsafeAddress(
            f"refusing to listen on {settings.host} without a token: set STILLHOUSE_TOKEN to "
            f"{MIN_TOKEN_LENGTH} or more random characters, or STILLHOUSE_HOST to 127.0.0.1"
        )


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
