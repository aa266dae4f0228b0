"""Who may do what: users have a role in each project, and the scope of a token narrows it. Pure.

Both must allow an action. The role: a viewer sees, a member also submits and manages their own, a maintainer
manages everything in the project and its members, an administrator may do everything. The scope: `read` only
looks, `submit` also submits and manages the user's own, `operate` also does what the role allows with others'
experiments and the queue, `admin` also administers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

DEFAULT_PROJECT: Final = "default"
"""Project of experiments whose spec names none. It always exists, and every new user is a member of it."""
DEFAULT_POOL: Final = "default"
TOKEN_PREFIX: Final = "sth_"  # Begins every token, so that scanners of code find one that was published
NAME_PATTERN: Final = r"^[a-z0-9][a-z0-9._-]{0,62}$"  # Of projects and pools
USER_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$"


class _Ranked(StrEnum):
    def includes(self, other: _Ranked) -> bool:
        order = list(type(self))
        return order.index(self) >= order.index(type(self)(other))


class Scope(_Ranked):
    """What a token may be used for; each includes those before it."""

    read = "read"
    submit = "submit"
    operate = "operate"
    admin = "admin"


class Role(_Ranked):
    """What a user is in a project; each includes those before it."""

    viewer = "viewer"
    member = "member"
    maintainer = "maintainer"


class UserKind(StrEnum):
    """What stands behind a user's name."""

    person = "person"
    service = "service"
    local = "local"  # Anyone who reaches a service that listens on loopback and asks for no token


class Action(StrEnum):
    see = "see"
    submit = "submit"
    manage_own = "manage_own"  # Cancel, pause, resume, retry and delete what the user submitted
    manage_any = "manage_any"  # The same with what others submitted, and priorities
    organise = "organise"  # Tags, notes and archive; those of others' experiments as `manage_any`
    share = "share"  # Views of lists, for everyone in a project
    manage_project = "manage_project"  # Members, quotas and settings of a project
    operate = "operate"  # The queue and the cluster as a whole
    administer = "administer"  # Users, tokens of others, projects, the audit log


@dataclass(frozen=True, slots=True)
class _Rule:
    scope: Scope
    role: Role | None  # Role in the project; None = the user is an administrator
    verb: str


_RULES: Final[Mapping[Action, _Rule]] = {
    Action.see: _Rule(Scope.read, Role.viewer, "seeing it"),
    Action.submit: _Rule(Scope.submit, Role.member, "submitting"),
    Action.manage_own: _Rule(Scope.submit, Role.member, "managing your own experiments"),
    Action.manage_any: _Rule(Scope.operate, Role.maintainer, "managing others' experiments"),
    Action.organise: _Rule(Scope.submit, Role.member, "changing tags, notes and archive"),
    Action.share: _Rule(Scope.submit, Role.member, "sharing a view"),
    Action.manage_project: _Rule(Scope.operate, Role.maintainer, "managing the project"),
    Action.operate: _Rule(Scope.operate, None, "operating the service"),
    Action.administer: _Rule(Scope.admin, None, "administration"),
}


@dataclass(frozen=True, slots=True)
class Visibility:
    """Projects whose experiments someone may see; None = all."""

    projects: frozenset[str] | None

    def includes(self, project: str) -> bool:
        return self.projects is None or project in self.projects


EVERYTHING: Final = Visibility(None)


@dataclass(frozen=True, slots=True)
class Actor:
    """Author of a change, for events and the audit log."""

    user: str
    token_id: int | None = None  # Token of the request; None = none, or a session
    address: str | None = None  # Network address of the request; None = not over the network


LOCAL_ACTOR: Final = Actor("local")  # Code that works with the store directly


@dataclass(frozen=True, slots=True)
class Principal:
    """Who sent a request; an administrator may do everything within the scope."""

    user: str
    kind: UserKind
    scope: Scope  # Most that their token or session may be used for
    roles: Mapping[str, Role] = field(default_factory=dict)  # By project
    open_projects: frozenset[str] = frozenset()  # Those that every user may see
    restricted_to: str | None = None  # Only project of their token; None = all
    token_id: int | None = None  # None = a session, or the local user
    token_name: str | None = None
    administrator: bool = False

    def sees(self, project: str) -> bool:
        return self.visibility.includes(project)

    def reaches(self, project: str | None) -> bool:
        """Whether their token covers a project; None = no project in particular."""
        return self.restricted_to in (None, project)

    @property
    def visibility(self) -> Visibility:
        everything = self.administrator or self.kind is UserKind.local
        if self.restricted_to is not None:
            mine = everything or self.restricted_to in self.roles or self.restricted_to in self.open_projects
            return Visibility(frozenset({self.restricted_to}) if mine else frozenset())
        return EVERYTHING if everything else Visibility(frozenset(self.roles) | self.open_projects)

    def may(self, action: Action, project: str | None = None, owner: str | None = None) -> bool:
        """`project` None = none in particular; `owner` None = no one's experiment."""
        return self.lacks(action, project, owner) is None

    def managing(self, owner: str) -> Action:
        return Action.manage_own if owner == self.user else Action.manage_any

    def lacks(self, action: Action, project: str | None = None, owner: str | None = None) -> str | None:
        """Returns what is missing for an action, and who can grant it, in one line."""
        if self.kind is UserKind.local:
            return None
        if action is Action.organise and owner not in (None, self.user):
            action = Action.manage_any
        rule = _RULES[action]
        if not self.scope.includes(rule.scope):
            create = (
                f"create one with `stillhouse token create --scope {rule.scope}`, or ask an administrator"
            )
            fix = "an administrator can create one" if rule.scope is Scope.admin else create
            has = f"this one has scope {self.scope}"
            return f"{rule.verb} needs a token with scope {rule.scope}, and {has}; {fix}"
        if self.restricted_to is not None and project != self.restricted_to:
            return (
                f"this token is only for project {self.restricted_to}; "
                "create one without --project, or for the other project"
            )
        if action is Action.manage_own and owner not in (None, self.user):
            where = f"project {project}" if project else "its project"
            return (
                f"this experiment belongs to {owner}; "
                f"its owner, a maintainer of {where} or an administrator can do this"
            )
        if self.administrator:
            return None
        if rule.role is None:
            return f"{rule.verb} needs an administrator; ask one"
        if action is Action.see and project in self.open_projects:
            return None
        role = None if project is None else self.roles.get(project)
        if role is None or not role.includes(rule.role):
            has = f"you are {role}" if role else "you are not a member"
            where = f"project {project}" if project else "the project"
            return (
                f"{rule.verb} needs role {rule.role} in {where}, and {has}; "
                "a maintainer of the project or an administrator can grant it"
            )
        return None

    def lacks_for_token(self, user: str, scope: Scope, project: str | None) -> str | None:
        """Returns why they may not create or revoke a token, which may do no more than theirs."""
        if self.kind is UserKind.local:
            return None
        if not self.scope.includes(Scope.submit):
            return f"managing tokens needs scope submit, and this token has scope {self.scope}"
        if not self.scope.includes(scope):
            return (
                f"this token has scope {self.scope} and cannot create or revoke one of scope {scope}; "
                "log in instead"
            )
        if not self.reaches(project):
            return f"this token is only for project {self.restricted_to}, and so are those that it creates"
        return None if user == self.user else self.lacks(Action.administer)

    def actor(self, address: str | None = None) -> Actor:
        return Actor(self.user, self.token_id, address)


def local(user: str = "local") -> Principal:
    # The one person on loopback: everything is allowed.
    return Principal(user, UserKind.local, Scope.admin, administrator=True)


def is_user_name(text: str) -> bool:
    return re.fullmatch(USER_PATTERN, text) is not None
