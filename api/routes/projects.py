"""Projects and their members."""

from typing import Annotated

from fastapi import Path

from api.access import ADMINISTER, MANAGE_PROJECT, SEE_PROJECT, SIGNED_IN
from api.bodies import Archived, Membership, NewProject, ProjectChange
from api.deps import CurrentUser, Operations, StoreDep, given
from api.problems import ProblemError
from api.routes.people import CHANGES_ACCESS, UserName
from service.domain.access import Action
from service.domain.people import Project, ProjectDetail
from service.domain.records import Items
from service.domain.shares import ProjectUse
from service.specs.project_limits import SET_BY_MAINTAINERS, ProjectLimits

router = Operations(prefix="/api/v1/projects", tags=["projects"])

ProjectName = Annotated[str, Path(max_length=100, description="Name of the project.", examples=["nlp"])]
Month = Annotated[
    str | None,
    given(
        "Calendar month in UTC; unset = the present one.",
        "2026-11",
        pattern=r"^[12][0-9]{3}-(0[1-9]|1[0-2])$",
    ),
]


@router.operation("GET", SIGNED_IN, "List the projects")
def list_projects(store: StoreDep, user: CurrentUser) -> Items[Project]:
    """Those that the sender sees, by name, archived ones included."""
    return Items([project for project in store.projects.all() if user.principal.sees(project.name)])


@router.operation("POST", ADMINISTER, "Create a project", CHANGES_ACCESS, status_code=201)
def create_project(body: NewProject, store: StoreDep, user: CurrentUser) -> ProjectDetail:
    """It has no members yet."""
    return store.projects.create(**dict(body), actor=user.actor)


@router.operation("GET /{project}", SEE_PROJECT, "Get a project")
def get_project(project: ProjectName, store: StoreDep) -> ProjectDetail:
    """One project with its members."""
    return store.projects.get(project)


@router.operation("PATCH /{project}", MANAGE_PROJECT, "Change a project", CHANGES_ACCESS)
def change_project(
    project: ProjectName, body: ProjectChange, store: StoreDep, user: CurrentUser
) -> ProjectDetail:
    """Change its title, its notes, or who sees it."""
    return store.projects.set(project, **dict(body), actor=user.actor)


@router.operation("GET /{project}/limits", SEE_PROJECT, "Get a project's limits")
def get_project_limits(project: ProjectName, store: StoreDep) -> ProjectLimits:
    """Weight, guaranteed devices, ceilings, priorities by role, and caps on a user's runs."""
    return store.projects.limits(project)


@router.operation("PUT /{project}/limits", MANAGE_PROJECT, "Set a project's limits", CHANGES_ACCESS)
def set_project_limits(
    project: ProjectName, body: ProjectLimits, store: StoreDep, user: CurrentUser
) -> ProjectLimits:
    """Replace them all. A maintainer may change the priorities, an administrator everything."""
    administers = user.principal.may(Action.operate, project)
    if not administers:
        before = store.projects.limits(project)
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
    return store.projects.set_limits(project, body, fields=fields, actor=user.actor)


@router.operation("GET /{project}/usage", SEE_PROJECT, "Get what a project has used in a month")
def get_project_usage(project: ProjectName, store: StoreDep, month: Month = None) -> ProjectUse:
    """Price, energy and time of the devices that its experiments held, by user, next to its budgets.

    Lost work counts, and so do deleted experiments. Energy is that of the rated power.
    """
    return store.projects.use(project, month)


@router.operation("PUT /{project}/archive", MANAGE_PROJECT, "Archive a project", CHANGES_ACCESS)
def archive_project(
    project: ProjectName, body: Archived, store: StoreDep, user: CurrentUser
) -> ProjectDetail:
    """An archived project accepts no new experiments; those that it has stay visible, and run."""
    return store.projects.archive(project, body.archived, actor=user.actor)


@router.operation(
    "PUT /{project}/members/{name}", MANAGE_PROJECT, "Give a user a role in a project", CHANGES_ACCESS
)
def set_member(
    project: ProjectName, name: UserName, body: Membership, store: StoreDep, user: CurrentUser
) -> ProjectDetail:
    """Add a member, or change the role of one."""
    return store.projects.set_member(project, name, body.role, actor=user.actor)


@router.operation(
    "DELETE /{project}/members/{name}", MANAGE_PROJECT, "Remove a user from a project", CHANGES_ACCESS
)
def remove_member(project: ProjectName, name: UserName, store: StoreDep, user: CurrentUser) -> ProjectDetail:
    """What they submitted stays in the project."""
    return store.projects.remove_member(project, name, actor=user.actor)
