"""Commands about people: login, users, tokens and the audit log."""

from __future__ import annotations

import re
import socket
import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from service.cli.connection import client_errors, connected, read_settings
from service.cli.terminal import ExitCode, Failure, Json, answer, json_text, note, print_json, print_rows, say
from service.domain.access import Scope

if TYPE_CHECKING:
    from service.client import Client
    from service.domain.people import AuditRow

user = typer.Typer(no_args_is_help=True, help="Add, list, disable and enable users.")
token = typer.Typer(no_args_is_help=True, help="Create, list and revoke tokens.")

UserName = Annotated[str, typer.Argument(metavar="USER", help="Name of the user.")]


_UNUSABLE = re.compile(r"[^A-Za-z0-9 ._@-]+")


def seconds(text: str) -> float:
    """Reads a length of time such as 90d."""
    from service.domain.formats import seconds_of

    try:
        return seconds_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def length_of_time(text: str) -> str:
    """Checks a length of time such as 90d."""
    seconds(text)
    return text


# -- Login -------------------------------------------------------------------------------------


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

    Shows a code, which someone who is logged in approves on the server's page. STILLHOUSE_TOKEN, if set,
    takes precedence over the stored token.
    """
    from service.client import Client, credentials

    settings = read_settings()
    url = str(settings.url).rstrip("/")
    if settings.token is not None:
        note("STILLHOUSE_TOKEN is set and takes precedence over this login; unset it to use the new token")
    if token:
        secret = _pasted()
    else:
        with client_errors(), Client(url) as client:
            secret = _by_code(client, scope, as_json=as_json)
    with client_errors(), Client(url, token=secret) as client:
        me = client.whoami()
    if me.via == "open":
        raise Failure(f"{url} does not ask who you are: no login is needed", ExitCode.conflict)
    path = credentials.save(credentials.Credentials(url, me.user, secret))
    answer(
        {"url": url, "user": me.user, "scope": me.scope, "file": str(path)},
        as_json,
        f"logged in to {url} as {me.user}, scope {me.scope}",
    )


def logout(as_json: Json = False) -> None:
    """Forget the token that is kept for the server of STILLHOUSE_URL; `stillhouse token revoke` ends it."""
    from service.client import credentials

    url = str(read_settings().url).rstrip("/")
    if not credentials.forget(url):
        raise Failure(f"no token is kept for {url}", ExitCode.not_found)
    answer({"url": url}, as_json, f"logged out of {url}")


def whoami(as_json: Json = False) -> None:
    """Show who you are to the server, and what limits what you may do."""
    with connected() as client:
        me = client.whoami()
    if as_json:
        print_json(me)
        return
    say(f"user       {me.user}{' (administrator)' if me.administrator else ''}")
    say(f"through    {me.via}{f' {me.token_name}' if me.token_name else ''}")
    say(f"scope      {me.scope}")
    only = f"only {me.restricted_to}" if me.restricted_to else None
    roles = ", ".join(f"{project} ({role})" for project, role in sorted(me.roles.items()))
    say(f"projects   {only or roles or 'all' if me.administrator else only or roles or 'none'}")


def _pasted() -> str:
    if sys.stdin.isatty():
        secret: str = typer.prompt("Token", hide_input=True, err=True)
    else:
        secret = sys.stdin.readline()
    if not secret.strip():
        raise Failure("no token was given; paste one, or leave out --token", ExitCode.usage)
    return secret.strip()


def _by_code(client: Client, scope: Scope | None, *, as_json: bool) -> str:
    machine = _UNUSABLE.sub("-", f"login on {socket.gethostname()}")[:80]
    begun = client.begin_device_login(machine, scope)
    show = note if as_json else say
    show(f"open      {begun.verification_uri_complete}")
    show(f"code      {begun.user_code}")
    show(f"waiting for approval, at most {begun.expires_in / 60:.0f} min; Ctrl-C gives up")
    return client.await_device_login(begun)


# -- Users -----------------------------------------------------------------------------------------


@user.command("add")
def add_user(
    name: UserName,
    email: Annotated[str | None, typer.Option(help="Where messages go.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="Let them do everything.")] = False,
    service: Annotated[
        bool, typer.Option("--service", help="A service account, such as of a CI system.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Add a user, who becomes a member of the project default."""
    with connected() as client:
        added = client.add_user(
            name, kind="service" if service else "person", email=email, administrator=admin
        )
    answer(
        added,
        as_json,
        f"added {name}; next: stillhouse token create --user {name} --name NAME --scope submit",
    )


@user.command("list")
def list_users(as_json: Json = False) -> None:
    """List all users."""
    with connected() as client:
        users = client.users()
    if as_json:
        print_json({"items": users})
        return
    from service.domain.formats import clock

    rows = [
        (
            each.name,
            str(each.kind),
            "administrator" if each.administrator else "",
            each.email or "",
            clock(each.created_s),
            "" if each.disabled_s is None else "disabled",
        )
        for each in users
    ]
    print_rows(("name", "kind", "role", "e-mail", "added", "state"), rows)


@user.command("disable")
def disable_user(name: UserName, as_json: Json = False) -> None:
    """Refuse a user's tokens and sessions; what they submitted stays and runs."""
    _set_disabled(name, True, as_json)


@user.command("enable")
def enable_user(name: UserName, as_json: Json = False) -> None:
    """Accept a disabled user's tokens again."""
    _set_disabled(name, False, as_json)


def _set_disabled(name: str, disabled: bool, as_json: bool) -> None:
    with connected() as client:
        changed = client.change_user(name, disabled=disabled)
    answer(changed, as_json, f"user {name} is {'disabled' if disabled else 'enabled'}")


# -- Tokens ----------------------------------------------------------------------------------------


@token.command("create")
def create_token(
    name: Annotated[str, typer.Option(help="Name for people, such as the machine that it is on.")],
    scope: Annotated[
        Scope, typer.Option(help="What it may be used for; each includes those before it.")
    ] = Scope.submit,
    of: Annotated[
        str | None, typer.Option("--user", metavar="USER", help="Whom it stands for; default: you.")
    ] = None,
    only: Annotated[
        str | None, typer.Option("--project", metavar="PROJECT", help="Only project that it is for.")
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(
            parser=length_of_time, metavar="AGE", help="When it ends: 12h, 90d, 8w; default: never."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create a token; it is shown only once."""
    with connected() as client:
        made = client.create_token(name, scope=scope.value, user=of, project=only, expires=expires)
    if as_json:
        print_json(made)
        return
    say(made.secret)
    note(f"token {made.id} of {made.user}, scope {made.scope}; it is not shown again")
    note("use it as STILLHOUSE_TOKEN, or in Authorization: Bearer")


@token.command("list")
def list_tokens(
    of: Annotated[
        str | None, typer.Option("--user", metavar="USER", help="Of this user; default: you.")
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Of all users.")] = False,
    as_json: Json = False,
) -> None:
    """List tokens, the newest first; their secrets are not stored."""
    with connected() as client:
        tokens = client.tokens(user=of, everyone=everyone)
    if as_json:
        print_json({"items": tokens})
        return
    from service.domain.formats import clock

    rows = []
    for each in tokens:
        state = "never expires"
        if each.revoked_s is not None:
            state = "revoked"
        elif each.expires_s is not None:
            state = f"{'expired' if each.expires_s <= time.time() else 'until'} {clock(each.expires_s)}"
        used = "never" if each.last_used_s is None else clock(each.last_used_s)
        project = each.project or "all"
        rows.append((str(each.id), each.user, each.name, str(each.scope), project, each.prefix, state, used))
    headings = ("id", "user", "name", "scope", "project", "begins", "state", "last used")
    print_rows(headings, rows, right=("id",))


@token.command("revoke")
def revoke_token(
    id: Annotated[int, typer.Argument(metavar="NUMBER", min=1, help="Number of the token.")],
    as_json: Json = False,
) -> None:
    """End a token at once."""
    with connected() as client:
        revoked = client.revoke_token(id)
    answer(revoked, as_json, f"token {id} ({revoked.name} of {revoked.user}) is revoked")


# -- Audit log -------------------------------------------------------------------------------------


def audit(
    since: Annotated[
        str, typer.Option(parser=length_of_time, metavar="AGE", help="How far back: 12h, 7d, 8w.")
    ] = "7d",
    actor: Annotated[str | None, typer.Option(metavar="USER", help="By this user.")] = None,
    action: Annotated[str | None, typer.Option(help="An action, or a kind: token.revoke, token.")] = None,
    object: Annotated[
        str | None, typer.Option(help="What was changed: experiment:17, project:nlp, user.")
    ] = None,
    export: Annotated[
        Literal["jsonl", "csv"] | None, typer.Option(help="Write the rows to standard output in this format.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show who changed what, with which token, from where, the oldest first."""
    chosen = {
        "since_s": time.time() - seconds(since), "actor": actor, "action": action, "object": object,
    }  # fmt: skip
    with connected() as client:
        if export is not None:
            for chunk in client.export_audit(export, **chosen):
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
            return
        rows = list(client.audit(**chosen))
    if as_json:
        print_json({"items": rows})
        return
    for row in rows:
        say(_audit_line(row))
    if not rows:
        note(f"no changes in the last {since}")


def _audit_line(row: AuditRow) -> str:
    from service.domain.formats import clock

    source = ", ".join(
        filter(None, (f"token {row.token_id}" if row.token_id is not None else "", row.address or ""))
    )
    who = f"{row.actor} ({source})" if source else row.actor
    names = dict.fromkeys([*(row.before or {}), *(row.after or {})])
    changes = []
    for name in names:
        old, new = (json_text((side or {}).get(name)) for side in (row.before, row.after))
        if row.before is None:
            changes.append(f"{name}={new}")
        elif row.after is None:
            changes.append(f"{name}={old}")
        else:
            changes.append(f"{name} {old} -> {new}")
    return f"{clock(row.at_s)}  {who}  {row.action} {row.object_id}  {', '.join(changes)}".rstrip()
