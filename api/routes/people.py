"""Users and service accounts, their tokens, and the audit log."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from api.access import ADMINISTER, MAX_ID, SIGNED_IN, SUBMIT
from api.deps import CurrentUser, StoreDep
from api.export import MEDIA_TYPES, guarded
from api.people_shapes import NewUser, TokenRequest, UserChange
from api.problems import ProblemError, declared
from service.db.errors import NotFound
from service.domain.access import Action
from service.domain.formats import TableFormat
from service.domain.people import AuditPage, AuditRow, NewToken, Token, User
from service.domain.records import Items
from service.domain.serialization import to_json

router = APIRouter(prefix="/api/v1", tags=["people"])

_BODY = ("invalid-body", "malformed-request", "body-too-large", "storage-full")
_CHANGE = declared(*_BODY, "not-found", "conflict", "forbidden")

UserName = Annotated[str, Path(max_length=100, description="Name of the user.", examples=["ada"])]
TokenId = Annotated[int, Path(ge=1, le=MAX_ID, description="Number of the token.", examples=[3])]
Since = Annotated[float | None, Query(ge=0, description="At this time or later, Unix seconds.")]
Until = Annotated[float | None, Query(ge=0, description="Before this time, Unix seconds.")]
ActorName = Annotated[str | None, Query(max_length=100, description="By this user.", examples=["ada"])]
ActionName = Annotated[
    str | None,
    Query(
        max_length=100,
        description="This action, or all of one kind.",
        examples=["token", "experiment.cancelled"],
    ),
]
ObjectName = Annotated[
    str | None,
    Query(
        alias="object",
        max_length=200,
        description="Done to this: a kind and a name or number.",
        examples=["experiment:17", "project:nlp", "user"],
    ),
]


def forget_access(request: Request) -> None:
    """Lets what was changed take effect at once: principals and projects are read again."""
    request.app.state.principals.forget()
    request.app.state.projects.forget()


def _administers(user: CurrentUser) -> bool:
    return user.principal.may(Action.administer)


# -- Users -----------------------------------------------------------------------------------------


@router.get("/users", dependencies=[ADMINISTER], responses=declared("forbidden"), summary="List the users")
def list_users(store: StoreDep) -> Items[User]:
    """Everyone, by name, disabled users included."""
    return Items(store.users())


@router.post("/users", dependencies=[ADMINISTER], status_code=201, responses=_CHANGE, summary="Add a user")
def add_user(body: NewUser, request: Request, store: StoreDep, user: CurrentUser) -> User:
    """Add a person or a service account, who becomes a member of the project `default`."""
    added = store.add_user(
        body.name,
        kind=body.kind,
        email=body.email,
        administrator=body.administrator,
        actor=user.actor,
    )
    forget_access(request)
    return added


@router.patch("/users/{name}", dependencies=[ADMINISTER], responses=_CHANGE, summary="Change a user")
def change_user(
    name: UserName, body: UserChange, request: Request, store: StoreDep, user: CurrentUser
) -> User:
    """Disable or enable a user, make them an administrator, or change their address."""
    changed = store.set_user(
        name,
        disabled=body.disabled,
        administrator=body.administrator,
        email=body.email,
        actor=user.actor,
    )
    forget_access(request)
    return changed


# -- Tokens ----------------------------------------------------------------------------------------


@router.get("/tokens", dependencies=[SIGNED_IN], responses=declared("forbidden"), summary="List tokens")
def list_tokens(
    store: StoreDep,
    user: CurrentUser,
    of: Annotated[
        str | None,
        Query(alias="user", max_length=100, description="Tokens of this user; unset = the sender's."),
    ] = None,
    everyone: Annotated[bool, Query(description="Tokens of all users; for administrators.")] = False,
) -> Items[Token]:
    """The newest first, revoked ones included; no secrets, which are not stored.

    A token that is only for one project lists those that are, too.
    """
    wanted = None if everyone else of or user.owner
    if wanted != user.principal.user and (reason := user.principal.lacks(Action.administer)):
        raise ProblemError("forbidden", reason)
    return Items([token for token in store.tokens(wanted) if user.principal.reaches(token.project)])


@router.post("/tokens", dependencies=[SUBMIT], status_code=201, responses=_CHANGE, summary="Create a token")
def create_token(body: TokenRequest, store: StoreDep, user: CurrentUser) -> NewToken:
    """The answer has the secret, this once. A token can do no more than the one that it was created with."""
    wanted = body.user or user.owner
    if reason := user.principal.lacks_for_token(wanted, body.scope, body.project):
        raise ProblemError("forbidden", reason)
    if body.project is not None and not user.principal.sees(body.project):
        raise NotFound("project", body.project)
    return store.create_token(
        wanted,
        name=body.name,
        scope=body.scope,
        project=body.project,
        lasts_s=body.lasts_s,
        actor=user.actor,
    )


@router.delete("/tokens/{token_id}", dependencies=[SUBMIT], responses=_CHANGE, summary="Revoke a token")
def revoke_token(token_id: TokenId, request: Request, store: StoreDep, user: CurrentUser) -> Token:
    """It stops working at once; one that was revoked before stays as it is, which is not an error.

    Subscriptions that were made with it end. A token cannot revoke one that may do more than itself.
    """
    token, principal = store.token(token_id), user.principal
    if not principal.reaches(token.project) or not (token.user == principal.user or _administers(user)):
        raise NotFound("token", token_id)
    if reason := principal.lacks_for_token(token.user, token.scope, token.project):
        raise ProblemError("forbidden", reason)
    revoked = store.revoke_token(token_id, actor=user.actor)
    forget_access(request)
    return revoked


# -- Audit log -------------------------------------------------------------------------------------


@router.get(
    "/audit", dependencies=[ADMINISTER], responses=declared("forbidden"), summary="Read the audit log"
)
def list_audit(
    store: StoreDep,
    since_s: Since = None,
    until_s: Until = None,
    actor: ActorName = None,
    action: ActionName = None,
    object: ObjectName = None,
    after: Annotated[int, Query(ge=0, le=MAX_ID, description="Rows after this id.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="Most rows in the answer.")] = 500,
) -> AuditPage:
    """Who changed what, the oldest first."""
    kind, id = _object(object)
    return store.audit(
        after=after,
        limit=limit,
        since_s=since_s,
        until_s=until_s,
        actor=actor,
        action=action,
        object_kind=kind,
        object_id=id,
    )


@router.get(
    "/audit/export", dependencies=[ADMINISTER],
    response_class=StreamingResponse,
    responses={
        200: {"description": "One row per change, the oldest first; streamed.",
              "content": {MEDIA_TYPES[form]: {} for form in (TableFormat.jsonl, TableFormat.csv)}},
        **declared("forbidden"),
    },
    summary="Export the audit log",
)  # fmt: skip
def export_audit(
    store: StoreDep,
    format: Annotated[Literal["jsonl", "csv"], Query(description="Format of the table.")] = "jsonl",
    since_s: Since = None,
    until_s: Until = None,
    actor: ActorName = None,
    action: ActionName = None,
    object: ObjectName = None,
) -> Response:
    """The rows that `GET /audit` with these parameters lists, as a file."""
    kind, id = _object(object)
    rows = store.audit_rows(
        since_s=since_s, until_s=until_s, actor=actor, action=action, object_kind=kind, object_id=id
    )
    form = TableFormat(format)
    return StreamingResponse(
        _csv(rows) if form is TableFormat.csv else (to_json(row).encode() + b"\n" for row in rows),
        media_type=MEDIA_TYPES[form],
        headers={"Content-Disposition": f'attachment; filename="audit.{format}"'},
    )


def _object(text: str | None) -> tuple[str | None, str | None]:
    """Returns kind and name of `experiment:17`, or of a kind alone."""
    kind, _, id = (text or "").partition(":")
    return kind or None, id or None


def _csv(rows: Iterator[AuditRow]) -> Iterator[bytes]:
    text = io.StringIO()
    writer = csv.writer(text)
    names = list(AuditRow.__dataclass_fields__)
    writer.writerow(names)
    for row in rows:
        values = [getattr(row, name) for name in names]
        writer.writerow(
            [guarded(orjson.dumps(value).decode() if isinstance(value, dict) else value) for value in values]
        )
        if text.tell() > 1 << 16:
            yield _taken(text)
    yield _taken(text)


def _taken(text: io.StringIO) -> bytes:
    content = text.getvalue().encode()
    text.seek(0)
    text.truncate()
    return content
