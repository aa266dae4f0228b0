"""Calls about people: users, tokens, projects, the audit log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from service.client.wire import Wire, api_error, given, read, reading
from service.domain.people import AuditPage, AuditRow, NewToken, Project, ProjectDetail, Token, User
from service.domain.shares import ProjectUse
from service.specs.project_limits import ProjectLimits


class PeopleCalls(Wire):
    """The part of the client that manages users, tokens and projects."""

    def users(self) -> list[User]:
        """All users, by name."""
        return self._items(User, "/users", {})

    def add_user(
        self, name: str, *, kind: str = "person", email: str | None = None, administrator: bool = False
    ) -> User:
        """Add a person or a service account."""
        body = {"name": name, "kind": kind, "email": email, "administrator": administrator}
        return read(User, self._call("POST", "/api/v1/users", repeat=False, json=body))

    def change_user(
        self,
        name: str,
        *,
        disabled: bool | None = None,
        administrator: bool | None = None,
        email: str | None = None,
    ) -> User:
        """Change a user; None leaves a field as it is."""
        body = given(disabled=disabled, administrator=administrator, email=email)
        return read(User, self._call("PATCH", f"/api/v1/users/{name}", repeat=True, json=body))

    def tokens(self, *, user: str | None = None, everyone: bool = False) -> list[Token]:
        """The tokens of a user, of everyone, or one's own."""
        return self._items(Token, "/tokens", given(user=user, everyone=everyone or None))

    def create_token(
        self,
        name: str,
        *,
        scope: str,
        user: str | None = None,
        project: str | None = None,
        expires: str | None = None,
    ) -> NewToken:
        """Create a token; the answer has its secret, this once.

        Args:
            name: for people.
            scope: read, submit, operate or admin.
            user: whom it stands for; None = oneself.
            project: only project that it is for; None = all.
            expires: when it ends, from now, such as 90d; None = never.
        """
        body = {"name": name, "scope": scope, "user": user, "project": project, "expires": expires}
        return read(NewToken, self._call("POST", "/api/v1/tokens", repeat=False, json=body))

    def revoke_token(self, id: int) -> Token:
        """End a token."""
        return read(Token, self._call("DELETE", f"/api/v1/tokens/{id}", repeat=True))

    def projects(self) -> list[Project]:
        """The projects that one sees, by name."""
        return self._items(Project, "/projects", {})

    def project(self, name: str) -> ProjectDetail:
        """One project with its members."""
        return self._get(ProjectDetail, f"/projects/{name}")

    def create_project(
        self, name: str, *, title: str = "", visible_to_all: bool = False, notes: str = ""
    ) -> ProjectDetail:
        """Create a project without members."""
        body = {"name": name, "title": title, "visible_to_all": visible_to_all, "notes": notes}
        return read(ProjectDetail, self._call("POST", "/api/v1/projects", repeat=False, json=body))

    def change_project(
        self,
        name: str,
        *,
        title: str | None = None,
        visible_to_all: bool | None = None,
        notes: str | None = None,
    ) -> ProjectDetail:
        """Change a project; None leaves a field as it is."""
        body = given(title=title, visible_to_all=visible_to_all, notes=notes)
        return self._changed("PATCH", f"/projects/{name}", body)

    def project_limits(self, name: str) -> ProjectLimits:
        """What a project may count on, and what limits it."""
        answer = self._call("GET", f"/api/v1/projects/{name}/limits", repeat=True)
        return ProjectLimits.model_validate_json(answer)

    def set_project_limits(self, name: str, limits: ProjectLimits) -> ProjectLimits:
        """Replace a project's limits."""
        body = limits.model_dump(mode="json")
        answer = self._call("PUT", f"/api/v1/projects/{name}/limits", repeat=True, json=body)
        return ProjectLimits.model_validate_json(answer)

    def project_use(self, name: str, month: str | None = None) -> ProjectUse:
        """What a project has used in a month; None = the present one."""
        place = f"/api/v1/projects/{name}/usage"
        return read(ProjectUse, self._call("GET", place, repeat=True, params=given(month=month)))

    def archive_project(self, name: str, archived: bool = True) -> ProjectDetail:
        """Archive a project, or take it back."""
        return self._changed("PUT", f"/projects/{name}/archive", {"archived": archived})

    def set_member(self, project: str, user: str, role: str) -> ProjectDetail:
        """Give a user a role in a project."""
        return self._changed("PUT", f"/projects/{project}/members/{user}", {"role": role})

    def remove_member(self, project: str, user: str) -> ProjectDetail:
        """Take a user's role in a project away."""
        answer = self._call("DELETE", f"/api/v1/projects/{project}/members/{user}", repeat=False)
        return read(ProjectDetail, answer)

    def audit(self, **chosen: Any) -> Iterator[AuditRow]:
        """All rows of the audit log that the parameters of `GET /audit` choose, page by page."""
        after: int | None = 0
        while after is not None:
            params = given(after=after, limit=1000, **chosen)
            page = read(AuditPage, self._call("GET", "/api/v1/audit", repeat=True, params=params))
            yield from page.items
            after = page.next_after

    def export_audit(self, format: Literal["jsonl", "csv"], **chosen: Any) -> Iterator[bytes]:
        """The audit log as a file, as it comes."""
        params = given(format=format, **chosen)
        with reading(self.url), self._http.stream("GET", "/api/v1/audit/export", params=params) as answer:
            if answer.status_code != 200:
                raise api_error(answer.status_code, answer.read())
            yield from answer.iter_bytes()

    def _changed(self, method: str, place: str, body: dict[str, Any]) -> ProjectDetail:
        return read(ProjectDetail, self._call(method, f"/api/v1{place}", repeat=True, json=body))
