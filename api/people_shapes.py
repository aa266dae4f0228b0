"""Bodies of requests about users, tokens, projects, and what people add to experiments."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from service.db.errors import BadValue
from service.domain.access import NAME_PATTERN, USER_PATTERN, Role, Scope, UserKind
from service.domain.formats import seconds_of
from service.domain.people import LONGEST_NOTES, MOST_TAGS


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewUser(_Body):
    """A user to be added."""

    model_config = ConfigDict(json_schema_extra={"example": {"name": "ada", "email": "ada@example.org"}})

    name: str = Field(pattern=USER_PATTERN, description="Name, shown as the owner of their experiments.")
    kind: UserKind = Field(default=UserKind.person, description="person, or service for a service account.")
    email: str | None = Field(default=None, max_length=255, description="Where messages go.")
    administrator: bool = Field(default=False, description="Whether the user may do everything.")


class UserChange(_Body):
    """Changes to a user; fields that are left out stay."""

    model_config = ConfigDict(json_schema_extra={"example": {"disabled": True}})

    disabled: bool | None = Field(default=None, description="Refuse their tokens and sessions.")
    administrator: bool | None = Field(default=None, description="Whether the user may do everything.")
    email: str | None = Field(
        default=None, max_length=255, description="Where messages go; an empty text = nowhere."
    )


class TokenRequest(_Body):
    """A token to be created."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"name": "ci", "scope": "submit", "project": "nlp", "expires": "90d"}}
    )

    name: str = Field(min_length=1, max_length=100, description="Name for people.")
    scope: Scope = Field(description="What it may be used for; each includes those before it.")
    user: str | None = Field(
        default=None, pattern=USER_PATTERN, description="User that it stands for; null = the sender."
    )
    project: str | None = Field(
        default=None, pattern=NAME_PATTERN, description="Only project that it is for; null = all."
    )
    expires: str | None = Field(
        default=None, max_length=100, description="When it ends, from now: 12h, 90d or 8w; null = never."
    )

    @property
    def lasts_s(self) -> float | None:
        """Seconds until it ends; None = never.

        Raises:
            BadValue: `expires` is not a length of time.
        """
        try:
            return None if self.expires is None else seconds_of(self.expires)
        except ValueError as error:
            raise BadValue("expires", str(error)) from None


class NewProject(_Body):
    """A project to be created."""

    model_config = ConfigDict(json_schema_extra={"example": {"name": "nlp", "title": "Language models"}})

    name: str = Field(pattern=NAME_PATTERN, description="Name, which specs have as `project`.")
    title: str = Field(default="", description="Title for people.")
    visible_to_all: bool = Field(default=False, description="Whether every user may see its experiments.")
    notes: str = Field(default="", description="Notes of people.")


class ProjectChange(_Body):
    """What is to change of a project; what is left out stays."""

    model_config = ConfigDict(json_schema_extra={"example": {"visible_to_all": True}})

    title: str | None = Field(default=None, description="Title for people.")
    visible_to_all: bool | None = Field(
        default=None, description="Whether every user may see its experiments."
    )
    notes: str | None = Field(default=None, description="Notes of people.")


class Archived(_Body):
    """Whether something is archived."""

    model_config = ConfigDict(json_schema_extra={"example": {"archived": True}})

    archived: bool = Field(strict=True, description="true = archive it; false = take it back.")


class Membership(_Body):
    """A user's role in a project."""

    model_config = ConfigDict(json_schema_extra={"example": {"role": "member"}})

    role: Role = Field(description="Each includes those before it.")


class TagChange(_Body):
    """Tags to be added and taken away."""

    model_config = ConfigDict(json_schema_extra={"example": {"add": ["baseline"], "remove": []}})

    add: list[str] = Field(default=[], max_length=MOST_TAGS, description="Tags that it shall have.")
    remove: list[str] = Field(default=[], max_length=MOST_TAGS, description="Tags that it shall not have.")


class Notes(_Body):
    """Notes of an experiment."""

    model_config = ConfigDict(json_schema_extra={"example": {"notes": "diverges above 3e-4"}})

    notes: str = Field(max_length=LONGEST_NOTES, description="The whole text; empty = none.")
