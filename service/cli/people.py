"""Commands about people: login, users, tokens and the audit log."""

from __future__ import annotations

import re
import socket
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from service.cli.connection import Client, CommandGroup, client_errors, connected, read_settings
from service.cli.terminal import (
    Answer,
    ExitCode,
    Failure,
    Json,
    argument,
    json_text,
    note,
    option,
    print_json,
    print_rows,
    say,
)
from service.domain.access import Scope

if TYPE_CHECKING:
    from service.domain.people import AuditRow

user = CommandGroup(no_args_is_help=True, help="Add, list, disable and enable users.")
token = CommandGroup(no_args_is_help=True, help="Create, list and revoke tokens.")

UserName = Annotated[str, typer.Argument(metavar="USER", help="Name of the user.")]

_UNUSABLE = re.compile(r"[^A-Za-z0-9 ._@-]+")


def seconds(text: str) -> float:
    from service.domain.formats import seconds_of

    try:
        return seconds_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def length_of_time(text: str) -> str:
    seconds(text)
    return text


# -- Login -------------------------------------------------------------------------------------


def login(
    token: bool = option(False, "Paste a token, at a prompt or on standard input, instead of a code."),
    scope: Scope | None = option(None, "Most that the new token may be used for; operate unless given."),
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
        terminal = sys.stdin.isatty()
        pasted = typer.prompt("Token", hide_input=True, err=True) if terminal else sys.stdin.readline()
        if not (secret := str(pasted).strip()):
            raise Failure("no token was given; paste one, or leave out --token")
    else:
        with client_errors(), Client(url) as client:
            secret = _by_code(client, scope, as_json=as_json)
    with client_errors(), Client(url, token=secret) as client:
        me = client.whoami()
    if me.via == "open":
        raise Failure(f"{url} does not ask who you are: no login is needed", ExitCode.conflict)
    path = credentials.save(credentials.Credentials(url, me.user, secret))
    Answer(
        {"url": url, "user": me.user, "scope": me.scope, "file": str(path)},
        f"logged in to {url} as {me.user}, scope {me.scope}",
    ).print(as_json=as_json)


def logout() -> Answer:
    """Forget the token that is kept for the server of STILLHOUSE_URL; `stillhouse token revoke` ends it."""
    from service.client import credentials

    url = str(read_settings().url).rstrip("/")
    if not credentials.forget(url):
        raise Failure(f"no token is kept for {url}", ExitCode.not_found)
    return Answer({"url": url}, f"logged out of {url}")


def whoami(client: Client) -> Answer:
    """Show who you are to the server, and what limits what you may do."""
    me = client.whoami()
    only = f"only {me.restricted_to}" if me.restricted_to else None
    roles = ", ".join(f"{project} ({role})" for project, role in sorted(me.roles.items()))
    return Answer(
        me,
        f"user       {me.user}{' (administrator)' if me.administrator else ''}",
        f"through    {me.via}{f' {me.token_name}' if me.token_name else ''}",
        f"scope      {me.scope}",
        f"projects   {only or roles or ('all' if me.administrator else 'none')}",
    )


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
    client: Client,
    name: UserName,
    email: str | None = option(None, "Where messages go."),
    admin: bool = option(False, "Let them do everything."),
    service: bool = option(False, "A service account, such as of a CI system."),
) -> Answer:
    """Add a user, who becomes a member of the project default."""
    kind = "service" if service else "person"
    added = client.add_user(name, kind=kind, email=email, administrator=admin)
    to_do = f"stillhouse token create --user {name} --name NAME --scope submit"
    return Answer(added, f"added {name}; next: {to_do}")


@user.command("list")
def list_users(client: Client) -> Answer:
    """List all users."""
    from service.domain.formats import clock

    users = client.users()
    rows = []
    for each in users:
        role = "administrator" if each.administrator else None
        state = None if each.disabled_s is None else "disabled"
        rows.append((each.name, each.kind, role, each.email, clock(each.created_s), state))
    headings = ("name", "kind", "role", "e-mail", "added", "state")
    return Answer({"items": users}, lambda: print_rows(headings, rows))


@user.command("disable")
def disable_user(client: Client, name: UserName) -> Answer:
    """Refuse a user's tokens and sessions; what they submitted stays and runs."""
    return Answer(client.change_user(name, disabled=True), f"user {name} is disabled")


@user.command("enable")
def enable_user(client: Client, name: UserName) -> Answer:
    """Accept a disabled user's tokens again."""
    return Answer(client.change_user(name, disabled=False), f"user {name} is enabled")


# -- Tokens ----------------------------------------------------------------------------------------


@token.command("create")
def create_token(
    client: Client,
    name: str = option(..., "Name for people, such as the machine that it is on."),
    scope: Scope = option(Scope.submit, "What it may be used for; each includes those before it."),
    of: str | None = option(None, "Whom it stands for; default: you.", "--user", metavar="USER"),
    only: str | None = option(None, "Only project that it is for.", "--project", metavar="PROJECT"),
    expires: str | None = option(
        None, "When it ends: 12h, 90d, 8w; default: never.", parser=length_of_time, metavar="AGE"
    ),
) -> Answer:
    """Create a token; it is shown only once."""
    made = client.create_token(name, scope=scope.value, user=of, project=only, expires=expires)
    about = f"token {made.id} of {made.user}, scope {made.scope}; it is not shown again"
    use = "use it as STILLHOUSE_TOKEN, or in Authorization: Bearer"
    return Answer(made, made.secret, partial(note, about), partial(note, use))


@token.command("list")
def list_tokens(
    client: Client,
    of: str | None = option(None, "Of this user; default: you.", "--user", metavar="USER"),
    everyone: bool = option(False, "Of all users.", "--all"),
) -> Answer:
    """List tokens, the newest first; their secrets are not stored."""
    from service.domain.formats import clock

    tokens = client.tokens(user=of, everyone=everyone)
    rows = []
    for each in tokens:
        state = "never expires"
        if each.revoked_s is not None:
            state = "revoked"
        elif each.expires_s is not None:
            state = f"{'expired' if each.expires_s <= time.time() else 'until'} {clock(each.expires_s)}"
        used = "never" if each.last_used_s is None else clock(each.last_used_s)
        project = each.project or "all"
        rows.append((each.id, each.user, each.name, each.scope, project, each.prefix, state, used))
    headings = ("id", "user", "name", "scope", "project", "begins", "state", "last used")
    return Answer({"items": tokens}, lambda: print_rows(headings, rows, right=("id",)))


@token.command("revoke")
def revoke_token(
    client: Client,
    id: int = argument(..., "Number of the token.", metavar="NUMBER", min=1),
) -> Answer:
    """End a token at once."""
    revoked = client.revoke_token(id)
    return Answer(revoked, f"token {id} ({revoked.name} of {revoked.user}) is revoked")


# -- Audit log -------------------------------------------------------------------------------------


def audit(
    since: str = option("7d", "How far back: 12h, 7d, 8w.", parser=length_of_time, metavar="AGE"),
    actor: str | None = option(None, "By this user.", metavar="USER"),
    action: str | None = option(None, "An action, or a kind: token.revoke, token."),
    object: str | None = option(None, "What was changed: experiment:17, project:nlp, user."),
    export: Literal["jsonl", "csv"] | None = option(
        None, "Write the rows to standard output in this format."
    ),
    as_json: Json = False,
) -> None:
    """Show who changed what, with which token, from where, the oldest first."""
    chosen = {"since_s": time.time() - seconds(since), "actor": actor, "action": action, "object": object}
    with connected() as client:
        if export is not None:
            sys.stdout.buffer.writelines(client.export_audit(export, **chosen))
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

    sources = (f"token {row.token_id}" if row.token_id is not None else None, row.address)
    source = ", ".join(filter(None, sources))
    who = f"{row.actor} ({source})" if source else row.actor
    before, after = row.before or {}, row.after or {}
    changes = []
    for name in dict.fromkeys([*before, *after]):
        old, new = json_text(before.get(name)), json_text(after.get(name))
        if row.before is None or row.after is None:
            changes.append(f"{name}={new if row.before is None else old}")
        else:
            changes.append(f"{name} {old} -> {new}")
    return f"{clock(row.at_s)}  {who}  {row.action} {row.object_id}  {', '.join(changes)}".rstrip()
