"""Commands about who one is: login, logout, whoami."""

from __future__ import annotations

import re
import socket
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli.connection import client_errors, connected, read_settings
from service.cli.exits import ExitCode, Failure
from service.cli.output import Json, note, print_json, say
from service.domain.access import Scope

if TYPE_CHECKING:
    from service.client import Client

_UNUSABLE = re.compile(r"[^A-Za-z0-9 ._@-]+")


def login(
    token: Annotated[
        bool,
        typer.Option("--token", help="Paste a token, at a prompt or on standard input, instead of a code."),
    ] = False,
    scope: Annotated[
        Scope | None, typer.Option(help="Most that the new token may be used for; operate unless given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Log in to the server of STILLHOUSE_URL, and keep the token for later commands.

    Shows a code, which someone who is logged in approves on the server's page. STILLHOUSE_TOKEN, where it
    is set, goes before the token that is kept.
    """
    from service.client import Client, credentials

    settings = read_settings()
    url = str(settings.url).rstrip("/")
    if settings.token is not None:
        note("STILLHOUSE_TOKEN is set and goes before the token of this login; unset it to use that")
    if token:
        secret = _pasted()
    else:
        with client_errors(), Client(url) as client:
            secret = _by_code(client, scope, as_json=as_json)
    with client_errors(), Client(url, token=secret) as client:
        found = client.whoami()
    if found.via == "open":
        raise Failure(f"{url} does not ask who you are: no login is needed", ExitCode.conflict)
    path = credentials.save(credentials.Credentials(url, found.user, secret))
    if as_json:
        print_json({"url": url, "user": found.user, "scope": found.scope, "file": str(path)})
    else:
        say(f"logged in to {url} as {found.user}, scope {found.scope}")


def logout(as_json: Json = False) -> None:
    """Forget the token that is kept for the server of STILLHOUSE_URL; `stillhouse token revoke` ends it."""
    from service.client import credentials

    url = str(read_settings().url).rstrip("/")
    if not credentials.forget(url):
        raise Failure(f"no token is kept for {url}", ExitCode.not_found)
    if as_json:
        print_json({"url": url})
    else:
        say(f"logged out of {url}")


def whoami(as_json: Json = False) -> None:
    """Show who you are to the server, and what limits what you may do."""
    with connected() as client:
        found = client.whoami()
    if as_json:
        print_json(found)
        return
    say(f"user       {found.user}{' (administrator)' if found.administrator else ''}")
    say(f"through    {found.via}{f' {found.token_name}' if found.token_name else ''}")
    say(f"scope      {found.scope}")
    only = f"only {found.restricted_to}" if found.restricted_to else None
    roles = ", ".join(f"{project} ({role})" for project, role in sorted(found.roles.items()))
    say(f"projects   {only or roles or 'all' if found.administrator else only or roles or 'none'}")


def _pasted() -> str:
    if sys.stdin.isatty():
        secret: str = typer.prompt("Token", hide_input=True, err=True)
    else:
        secret = sys.stdin.readline()
    if not secret.strip():
        raise Failure("no token was given; paste one, or leave out --token", ExitCode.usage)
    return secret.strip()


def _by_code(client: Client, scope: Scope | None, *, as_json: bool) -> str:
    begun = client.begin_device_login(_machine(), scope)
    tell = note if as_json else say
    tell(f"open      {begun.verification_uri_complete}")
    tell(f"code      {begun.user_code}")
    tell(f"waiting for approval, at most {begun.expires_in / 60:.0f} min; Ctrl-C gives up")
    return client.await_device_login(begun)


def _machine() -> str:
    """Returns what this machine is called, in characters that a device may have in its name."""
    return _UNUSABLE.sub("-", f"login on {socket.gethostname()}")[:80]
