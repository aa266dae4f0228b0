"""Users and service accounts, their tokens, and the audit log."""

from collections.abc import AsyncIterator, Generator, Iterator
from typing import Annotated, Any, Literal

import orjson
from fastapi import Depends, Path, Request, Response

from api.access import ADMINISTER, MAX_ID, SIGNED_IN, SUBMIT
from api.bodies import NewUser, TokenRequest, UserChange
from api.deps import TEXT, CurrentUser, Download, Operations, StoreDep, given
from api.export import MEDIA_TYPES, csv_chunks
from api.problems import ProblemError
from service.db.errors import NotFound
from service.domain.access import Action
from service.domain.formats import TableFormat
from service.domain.people import AuditPage, AuditRow, NewToken, Token, User
from service.domain.records import Items
from service.domain.serialization import to_json

router = Operations(prefix="/api/v1", tags=["people"])

UserName = Annotated[str, Path(max_length=100, description="Name of the user.", examples=["ada"])]
TokenId = Annotated[int, Path(ge=1, le=MAX_ID, description="Number of the token.", examples=[3])]


async def _forget(request: Request) -> AsyncIterator[None]:
    yield
    request.app.state.principals.forget()
    request.app.state.intake.projects.forget()


CHANGES_ACCESS = Depends(_forget, scope="function")
"""Lets what a route changes take effect at once: principals and projects are read again."""


@router.operation("GET /users", ADMINISTER, "List the users")
def list_users(store: StoreDep) -> Items[User]:
    """Everyone, by name, disabled users included."""
    return Items(store.people.users())


@router.operation("POST /users", ADMINISTER, "Add a user", CHANGES_ACCESS, status_code=201)
def add_user(body: NewUser, store: StoreDep, user: CurrentUser) -> User:
    """Add a person or a service account, who becomes a member of the project `default`."""
    return store.people.add_user(**dict(body), actor=user.actor)


@router.operation("PATCH /users/{name}", ADMINISTER, "Change a user", CHANGES_ACCESS)
def change_user(name: UserName, body: UserChange, store: StoreDep, user: CurrentUser) -> User:
    """Disable or enable a user, make them an administrator, or change their address."""
    return store.people.set_user(name, **dict(body), actor=user.actor)


@router.operation("GET /tokens", SIGNED_IN, "List tokens", problems=["forbidden"])
def list_tokens(
    store: StoreDep,
    user: CurrentUser,
    of: Annotated[
        str | None, given("Tokens of this user; unset = the sender's.", alias="user", max_length=100)
    ] = None,
    everyone: Annotated[bool, given("Tokens of all users; for administrators.")] = False,
) -> Items[Token]:
    """The newest first, revoked ones included; no secrets, which are not stored.

    A token that is only for one project lists those that are, too.
    """
    wanted = None if everyone else of or user.owner
    if wanted != user.principal.user and (reason := user.principal.lacks(Action.administer)):
        raise ProblemError("forbidden", reason)
    return Items([token for token in store.people.tokens(wanted) if user.principal.reaches(token.project)])


@router.operation(
    "POST /tokens", SUBMIT, "Create a token", problems=["not-found", "conflict"], status_code=201
)
def create_token(body: TokenRequest, store: StoreDep, user: CurrentUser) -> NewToken:
    """The answer has the secret, this once. A token can do no more than the one that it was created with."""
    wanted = body.user or user.owner
    if reason := user.principal.lacks_for_token(wanted, body.scope, body.project):
        raise ProblemError("forbidden", reason)
    if body.project is not None and not user.principal.sees(body.project):
        raise NotFound("project", body.project)
    return store.people.create_token(
        wanted, name=body.name, scope=body.scope, project=body.project, lasts_s=body.lasts_s, actor=user.actor
    )


@router.operation("DELETE /tokens/{token_id}", SUBMIT, "Revoke a token", CHANGES_ACCESS)
def revoke_token(token_id: TokenId, store: StoreDep, user: CurrentUser) -> Token:
    """It stops working at once; one that was revoked before stays as it is, which is not an error.

    Subscriptions that were made with it end. A token cannot revoke one that may do more than itself.
    """
    token, principal = store.people.token(token_id), user.principal
    if not principal.reaches(token.project) or not (
        token.user == principal.user or principal.may(Action.administer)
    ):
        raise NotFound("token", token_id)
    if reason := principal.lacks_for_token(token.user, token.scope, token.project):
        raise ProblemError("forbidden", reason)
    return store.people.revoke_token(token_id, actor=user.actor)


async def _chosen_rows(
    since_s: Annotated[float | None, given("At this time or later, Unix seconds.", ge=0)] = None,
    until_s: Annotated[float | None, given("Before this time, Unix seconds.", ge=0)] = None,
    actor: Annotated[str | None, given("By this user.", "ada", max_length=100)] = None,
    action: Annotated[
        str | None, given("This action, or all of one kind.", "token", "experiment.cancelled", max_length=100)
    ] = None,
    object: Annotated[
        str | None,
        given(
            "Done to this: a kind and a name or number.",
            "experiment:17",
            "project:nlp",
            "user",
            max_length=200,
        ),
    ] = None,
) -> dict[str, Any]:
    kind, _, id = (object or "").partition(":")
    return {
        "since_s": since_s,
        "until_s": until_s,
        "actor": actor,
        "action": action,
        "object_kind": kind or None,
        "object_id": id or None,
    }


ChosenRows = Annotated[dict[str, Any], Depends(_chosen_rows)]


@router.operation("GET /audit", ADMINISTER, "Read the audit log")
def list_audit(
    store: StoreDep,
    chosen: ChosenRows,
    after: Annotated[int, given("Rows after this id, in the order.", ge=0, le=MAX_ID)] = 0,
    newest_first: Annotated[bool, given("From the newest row back.")] = False,
    limit: Annotated[int, given("Most rows in the answer.", ge=1, le=1000)] = 500,
) -> AuditPage:
    """Who changed what, the oldest first unless `newest_first`."""
    return store.audit.page(after=after, newest_first=newest_first, limit=limit, **chosen)


@router.operation(
    "GET /audit/export",
    ADMINISTER,
    "Export the audit log",
    sends={MEDIA_TYPES[form]: TEXT for form in (TableFormat.jsonl, TableFormat.csv)},
    described="One row per change, the oldest first; streamed.",
)
def export_audit(
    store: StoreDep,
    chosen: ChosenRows,
    format: Annotated[Literal["jsonl", "csv"], given("Format of the table.")] = "jsonl",
) -> Response:
    """The rows that `GET /audit` with these parameters lists, as a file."""
    rows = store.audit.rows(**chosen)
    form = TableFormat(format)
    lines = _csv(rows) if form is TableFormat.csv else (to_json(row).encode() + b"\n" for row in rows)
    return Download(lines, MEDIA_TYPES[form], f"audit.{format}")


def _csv(rows: Iterator[AuditRow]) -> Generator[bytes]:
    names = list(AuditRow.__dataclass_fields__)
    values = ([getattr(row, name) for name in names] for row in rows)
    texts = (
        [orjson.dumps(value).decode() if isinstance(value, dict) else value for value in row]
        for row in values
    )
    return csv_chunks(names, texts)
