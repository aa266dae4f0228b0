"""The table that turns groups of an OpenID provider into roles: `<data_dir>/groups.yaml`.

    claim: groups
    groups:
      nlp-team: {projects: {nlp: member}}
      leads: {projects: {nlp: maintainer, vision: maintainer}}
      platform: {administrator: true}

It is applied at every login, to the projects that it names and to no other membership.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from service.config.document import SpecError, parse
from service.domain.access import NAME_PATTERN, Role

FILE_NAME = "groups.yaml"


class GroupTerms(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    projects: Mapping[str, Role] = Field(default_factory=dict)
    """Role by project."""
    administrator: bool = Field(default=False, strict=True)
    """Whether they administer the installation."""

    @field_validator("projects")
    @classmethod
    def _names(cls, value: Mapping[str, Role]) -> Mapping[str, Role]:
        for name in value:
            if not re.fullmatch(NAME_PATTERN, name):
                raise ValueError(f"'{name}' cannot be the name of a project: use a-z, 0-9 and . _ -")
        return value


@dataclass(frozen=True, slots=True)
class Memberships:
    roles: Mapping[str, Role]  # Role by project, for projects in which a group of theirs has one
    managed: frozenset[str]  # Projects that the table decides about; a role in one not in `roles` ends
    administrator: bool | None  # None = the table names no group of administrators, and decides nothing


class GroupTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    claim: str = Field(default="groups", min_length=1, max_length=200)
    """Claim of the ID token, or of the provider's user information, that lists a user's groups."""
    groups: Mapping[str, GroupTerms] = Field(default_factory=dict)
    """What members of each group are."""

    def memberships(self, groups: Collection[str]) -> Memberships:
        """Returns the roles of a user in these groups: per project, the highest that any of them gives."""
        roles: dict[str, Role] = {}
        mine = [terms for name, terms in self.groups.items() if name in groups]
        for terms in mine:
            for project, role in terms.projects.items():
                if project not in roles or role.includes(roles[project]):
                    roles[project] = role
        managed = frozenset(project for terms in self.groups.values() for project in terms.projects)
        decides = any(terms.administrator for terms in self.groups.values())
        return Memberships(roles, managed, any(terms.administrator for terms in mine) if decides else None)


def group_table(data_dir: Path) -> GroupTable:
    path = data_dir / FILE_NAME
    if not path.exists():
        return GroupTable()
    try:
        return GroupTable.model_validate(parse(path.read_bytes()))
    except SpecError as error:
        raise ValueError(f"{path}: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{path}: {field}: {message} (got {first['input']!r:.80})") from None
