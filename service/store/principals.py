"""Whom a request comes from: tokens and users, with all that decides about what they may do."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from sqlalchemy import Connection

from service.db import principal_statements, share_statements
from service.domain.access import Principal, Scope
from service.specs.project_limits import ProjectLimits
from service.store.base import StorePart


class Refused(Exception):
    """A token or user is not accepted; the message says why in one line, and names no user."""


class Principals(StorePart):
    def principal_of_token(self, sha256: str) -> Principal:
        """Raises `Refused` when the token is unknown, expired or revoked, or its user is disabled."""
        now = self.clock()
        with self.database.read() as connection:
            row = connection.execute(principal_statements.token_by_hash(sha256)).one_or_none()
            if row is None:
                raise Refused("no such token; create one with: stillhouse token create")
            if row.revoked_s is not None:
                raise Refused("the token was revoked; create another with: stillhouse token create")
            if row.expires_s is not None and row.expires_s <= now:
                ended = datetime.fromtimestamp(row.expires_s, UTC)
                raise Refused(
                    f"the token expired on {ended:%Y-%m-%d at %H:%M} UTC; create another with: "
                    "stillhouse token create"
                )
            principal = _principal(connection, row.user, row.scope)
        return replace(principal, restricted_to=row.project, token_id=row.id, token_name=row.name)

    def principal_of_user(self, user: str, scope: Scope = Scope.admin) -> Principal:
        """A user who has proved their name."""
        with self.database.read() as connection:
            return _principal(connection, user, scope)

    def maintainers(self, project: str) -> list[str]:
        """Who can grant roles in a project."""
        with self.database.read() as connection:
            return list(connection.execute(principal_statements.maintainers_of(project)).scalars())

    def limits_of_projects(self) -> dict[str, ProjectLimits | None]:
        """Limits of each project, by name; None = it is archived."""
        with self.database.read() as connection:
            return {
                row.name: None if row.archived else ProjectLimits.model_validate(row.settings)
                for row in connection.execute(principal_statements.PROJECTS)
            }

    def queued_runs_of(self, project: str, owner: str) -> int:
        """How many runs of a user wait in a project."""
        with self.database.read() as connection:
            return int(connection.execute(share_statements.queued_runs_of(project, owner)).scalar_one())


def _principal(connection: Connection, user: str, scope: Scope) -> Principal:
    row = connection.execute(principal_statements.user_by_name(user)).one_or_none()
    if row is None:
        raise Refused("the account does not exist; ask an administrator to add it")
    if row.disabled_s is not None:
        raise Refused("the account is disabled; ask an administrator to enable it")
    return Principal(
        user,
        row.kind,
        scope,
        {row.project: row.role for row in connection.execute(principal_statements.roles_of(user))},
        frozenset(connection.execute(principal_statements.OPEN_PROJECTS).scalars()),
        administrator=bool(row.administrator),
    )
