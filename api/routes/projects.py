"""Projects and their members."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from api.access import ADMINISTER, MANAGE, SEE_PROJECT, SIGNED_IN
from api.deps import CurrentUser, StoreDep
from api.people_shapes import Archived, Membership, NewProject, ProjectChange
from api.problems import ProblemError, declared
from api.routes.people import UserName, forget_access
from service.domain.access import Action
from service.domain.people import Project, ProjectDetail
from service.domain.records import Items
from service.domain.shares import ProjectUse
from service.specs.project_limits import SET_BY_MAINTAINERS, ProjectLimits

router = APIRouter(prefix="/api/v1/projects", tags=["projects"])

_SEE = declared("not-found")
_CHANGE = declared(
    "invalid-body",
    "malformed-request",
    "body-too-large",
    "storage-full",
    "not-found",
    "conflict",
    "forbidden",
)

ProjectName = Annotated[str, Path(max_length=100, description="Name of the project.", examples=["nlp"])]
Month = Annotated[
    str | None,
    Query(
        pattern=r"^[12][0-9]{3}-(0[1-9]|1[0-2])$",
        description="Calendar month in UTC; unset = the present one.",
        examples=["2026-11"],
    ),
]


@router.get("", dependencies=[SIGNED_IN], summary="List the projects", responses=declared())
def list_projects(store: StoreDep, user: CurrentUser) -> Items[Project]:
    """Those that the sender sees, by name, archived ones included."""
    return Items([project for project in store.projects() if user.principal.sees(project.name)])


@router.post("", dependencies=[ADMINISTER], status_code=201, responses=_CHANGE, summary="Create a project")
def create_project(body: NewProject, request: Request, store: StoreDep, user: CurrentUser) -> ProjectDetail:
    """It has no members yet."""
    created = store.create_project(
        body.name,
        title=body.title,
        visible_to_all=body.visible_to_all,
        notes=body.notes,
        actor=user.actor,
    )
    forget_access(request)
    return created


@router.get("/{project}", dependencies=[SEE_PROJECT], responses=_SEE, summary="Get a project")
def get_project(project: ProjectName, store: StoreDep) -> ProjectDetail:
    """One project with its members."""
    return store.project(project)


@router.patch("/{project}", dependencies=[MANAGE], responses=_CHANGE, summary="Change a project")
def change_project(
    project: ProjectName, body: ProjectChange, request: Request, store: StoreDep, user: CurrentUser
) -> ProjectDetail:
    """Change its title, its notes, or who sees it."""
    changed = store.set_project(
        project,
        title=body.title,
        visible_to_all=body.visible_to_all,
        notes=body.notes,
        actor=user.actor,
    )
    forget_access(request)
    return changed


@router.get("/{project}/limits", dependencies=[SEE_PROJECT], responses=_SEE, summary="Get a project's limits")
def get_project_limits(project: ProjectName, store: StoreDep) -> ProjectLimits:
    """Weight, guaranteed devices, ceilings, priorities by role, and caps on a user's runs."""
    return store.project_limits(project)


@router.put("/{project}/limits", dependencies=[MANAGE], responses=_CHANGE, summary="Set a project's limits")
def set_project_limits(
    project: ProjectName, body: ProjectLimits, request: Request, store: StoreDep, user: CurrentUser
) -> ProjectLimits:
    """Replace them all. A maintainer may change the priorities, an administrator everything."""
    administers = user.principal.may(Action.operate, project)
    if not administers:
        before = store.project_limits(project)
        theirs = [
            name
            for name in ProjectLimits.model_fields
            if name not in SET_BY_MAINTAINERS and getattr(body, name) != getattr(before, name)
        ]
        if theirs:
            raise ProblemError(
                "forbidden",
                f"{', '.join(theirs)}: only an administrator sets this for project {project}; a maintainer "
                f"sets {', '.join(sorted(SET_BY_MAINTAINERS))}",
            )
    fields = None if administers else SET_BY_MAINTAINERS
    changed = store.set_project_limits(project, body, fields=fields, actor=user.actor)
    forget_access(request)
    return changed


@router.get(
    "/{project}/usage",
    dependencies=[SEE_PROJECT],
    responses=_SEE,
    summary="Get what a project has used in a month",
)
def get_project_usage(project: ProjectName, store: StoreDep, month: Month = None) -> ProjectUse:
    """Price, energy and time of the devices that its experiments held, by user, next to its budgets.

    Lost work counts, and so do deleted experiments. Energy is that of the rated power.
    """
    return store.project_use(project, month)


@router.put("/{project}/archive", dependencies=[MANAGE], responses=_CHANGE, summary="Archive a project")
def archive_project(
    project: ProjectName, body: Archived, request: Request, store: StoreDep, user: CurrentUser
) -> ProjectDetail:
    """An archived project accepts no new experiments; those that it has stay visible, and run."""
    changed = store.archive_project(project, body.archived, actor=user.actor)
    forget_access(request)
    return changed


@router.put(
    "/{project}/members/{name}",
    dependencies=[MANAGE],
    responses=_CHANGE,
    summary="Give a user a role in a project",
)
def set_member(
    project: ProjectName,
    name: UserName,
    body: Membership,
    request: Request,
    store: StoreDep,
    user: CurrentUser,
) -> ProjectDetail:
    """Add a member, or change the role of one."""
    changed = store.set_member(project, name, body.role, actor=user.actor)
    forget_access(request)
    return changed


@router.delete(
    "/{project}/members/{name}",
    dependencies=[MANAGE],
    responses=_CHANGE,
    summary="Remove a user from a project",
)
def remove_member(
    project: ProjectName, name: UserName, request: Request, store: StoreDep, user: CurrentUser
) -> ProjectDetail:
    """What they submitted stays in the project."""
    changed = store.remove_member(project, name, actor=user.actor)
    forget_access(request)
    return changed
