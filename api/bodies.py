"""Bodies of requests; the example of each is the one in the OpenAPI document."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.db.errors import BadValue
from service.domain.access import NAME_PATTERN, USER_PATTERN, Role, Scope, UserKind
from service.domain.events import Topic
from service.domain.formats import seconds_of
from service.domain.people import LONGEST_NOTES, LONGEST_RUN_NAME, MOST_TAGS
from service.domain.records import LONGEST_VIEW_NAME, LONGEST_VIEW_QUERY, ViewKind
from service.notifications.subscribing import CHANNELS
from service.output.bounded import LONGEST_TEXT, MOST_TEXTS
from service.specs.fields import EXPERIMENT_NAME

_CHANNELS = "; ".join(f"`{channel.name}`: {channel.described}" for channel in CHANNELS.values())


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewUser(_Body, json_schema_extra={"example": {"name": "ada", "email": "ada@example.org"}}):
    """A user to be added."""

    name: str = Field(pattern=USER_PATTERN, description="Name, shown as the owner of their experiments.")
    kind: UserKind = Field(default=UserKind.person, description="person, or service for a service account.")
    email: str | None = Field(default=None, max_length=255, description="Where messages go.")
    administrator: bool = Field(default=False, description="Whether the user may do everything.")


class UserChange(_Body, json_schema_extra={"example": {"disabled": True}}):
    """Changes to a user; fields that are left out stay."""

    disabled: bool | None = Field(default=None, description="Refuse their tokens and sessions.")
    administrator: bool | None = Field(default=None, description="Whether the user may do everything.")
    email: str | None = Field(
        default=None, max_length=255, description="Where messages go; an empty text = nowhere."
    )


class TokenRequest(
    _Body,
    json_schema_extra={"example": {"name": "ci", "scope": "submit", "project": "nlp", "expires": "90d"}},
):
    """A token to be created."""

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
        """Seconds until it ends, None = never; raises BadValue where `expires` is not a length of time."""
        try:
            return None if self.expires is None else seconds_of(self.expires)
        except ValueError as error:
            raise BadValue("expires", str(error)) from None


class Continuation(_Body, json_schema_extra={"example": {"epochs": 2}}):
    """How much longer to train; one of the two."""

    epochs: float | None = Field(default=None, gt=0.0, le=10_000, description="In epochs.")
    steps: int | None = Field(default=None, ge=1, description="In optimizer updates.")


class Retraining(_Body, json_schema_extra={"example": {"on": "all"}}):
    """What to train on."""

    on: Literal["all"] = Field(description="all = the training and the validation part.")


class NewProject(_Body, json_schema_extra={"example": {"name": "nlp", "title": "Language models"}}):
    """A project to be created."""

    name: str = Field(pattern=NAME_PATTERN, description="Name, which specs have as `project`.")
    title: str = Field(default="", description="Title for people.")
    visible_to_all: bool = Field(default=False, description="Whether every user may see its experiments.")
    notes: str = Field(default="", description="Notes of people.")


class ProjectChange(_Body, json_schema_extra={"example": {"visible_to_all": True}}):
    """What is to change of a project; what is left out stays."""

    title: str | None = Field(default=None, description="Title for people.")
    visible_to_all: bool | None = Field(
        default=None, description="Whether every user may see its experiments."
    )
    notes: str | None = Field(default=None, description="Notes of people.")


class Archived(_Body, json_schema_extra={"example": {"archived": True}}):
    """Whether something is archived."""

    archived: bool = Field(strict=True, description="true = archive it; false = take it back.")


class Membership(_Body, json_schema_extra={"example": {"role": "member"}}):
    """A user's role in a project."""

    role: Role = Field(description="Each includes those before it.")


class TagChange(_Body, json_schema_extra={"example": {"add": ["baseline"], "remove": []}}):
    """Tags to be added and taken away."""

    add: list[str] = Field(default=[], max_length=MOST_TAGS, description="Tags that it shall have.")
    remove: list[str] = Field(default=[], max_length=MOST_TAGS, description="Tags that it shall not have.")


class RunChange(TagChange, json_schema_extra={"example": {"starred": True, "add": ["baseline"]}}):
    """Changes to what people add to a run; fields that are left out stay."""

    name: str | None = Field(default=None, max_length=LONGEST_RUN_NAME, description="Name; empty = none.")
    starred: bool | None = Field(default=None, description="Whether it is starred.")
    notes: str | None = Field(default=None, max_length=LONGEST_NOTES, description="Notes; empty = none.")


class RunIds(_Body, json_schema_extra={"example": {"ids": [40, 41]}}):
    """Runs of one experiment."""

    ids: list[Annotated[int, Field(ge=1, le=2**63 - 1)]] = Field(
        min_length=1, max_length=1000, description="Numbers of the runs."
    )


class RunsChange(RunChange, RunIds, json_schema_extra={"example": {"ids": [40, 41], "starred": True}}):
    """The same changes to several runs."""


class NewName(_Body, json_schema_extra={"example": {"name": "precision by batch"}}):
    """Another name of an experiment."""

    name: str = Field(pattern=EXPERIMENT_NAME, description="As in a spec, which keeps the name it has.")


class Notes(_Body, json_schema_extra={"example": {"notes": "diverges above 3e-4"}}):
    """Notes of an experiment."""

    notes: str = Field(max_length=LONGEST_NOTES, description="The whole text; empty = none.")


class Priority(_Body, json_schema_extra={"example": {"priority": 80}}):
    """A new place among others."""

    priority: int = Field(ge=0, le=100, strict=True, description="0 to 100; higher runs first.")


class Decision(_Body, json_schema_extra={"example": {"approve": True}}):
    """What becomes of a device login."""

    approve: bool = Field(strict=True, description="true lets the device in; false turns it away.")


class PastedToken(_Body):
    """A token to open a session with."""

    token: str = Field(min_length=1, max_length=1_000, description="The token, as it was shown once.")


class NewView(
    _Body,
    json_schema_extra={
        "example": {
            "name": "failed this week",
            "query": "filter=owner+%3D+%27ada%27&state=failed&order_by=ended_s+desc",
            "project": "nlp",
            "shared": True,
        }
    },
):
    """A view to be saved."""

    name: str = Field(min_length=1, max_length=LONGEST_VIEW_NAME, description="Name for people.")
    query: str = Field(
        max_length=LONGEST_VIEW_QUERY,
        description="What is shown, as the query of the page's address: filter, state, order_by and columns; "
        "of a dashboard experiments (a filter), filter (of runs) and panel, repeated.",
    )
    kind: ViewKind = Field(default=ViewKind.list, description="list or dashboard.")
    project: str | None = Field(
        default=None, pattern=NAME_PATTERN, description="Project that it is meant for; null = none."
    )
    shared: bool = Field(default=False, description="Whether whoever sees the project sees the view.")


class Wanted(
    _Body,
    json_schema_extra={
        "example": {
            "channel": "webhook",
            "target": "https://hooks.example.com/stillhouse",
            "topics": ["failure", "budget"],
            "project": "nlp",
        }
    },
):
    """A subscription to be made."""

    channel: str = Field(max_length=50, description=f"How to tell. {_CHANNELS}.")
    target: str = Field(max_length=2000, description="Address in the channel.")
    topics: list[Topic] = Field(min_length=1, max_length=len(Topic), description="What to tell.")
    project: str | None = Field(
        default=None,
        pattern=NAME_PATTERN,
        description="All experiments of this project; null = one's own, in every project.",
    )


class TypedTexts(_Body, json_schema_extra={"example": {"texts": ["The tea was superb."]}}):
    """Texts for a run's model."""

    texts: list[Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT)]] = Field(
        min_length=1, max_length=MOST_TEXTS, description="One example each."
    )
    shared: dict[str, Annotated[str, Field(max_length=LONGEST_TEXT)]] = Field(
        default_factory=dict, max_length=8, description="Fields that all of them have in common."
    )


class Pause(_Body, json_schema_extra={"example": {"paused": True}}):
    """Whether a subscription is paused."""

    paused: bool = Field(description="true = send nothing; false = send again.")
