"""Saved views of the list of experiments, and dashboards: one's own, and those shared with projects."""

from typing import Annotated

from fastapi import Path

from api.access import MAX_ID, SIGNED_IN, SUBMIT
from api.bodies import NewView
from api.deps import CurrentUser, Operations, StoreDep, given
from api.problems import ProblemError
from service.db.errors import NotFound
from service.domain.access import Action
from service.domain.records import Items, View, ViewKind

router = Operations(prefix="/api/v1", tags=["experiments"])

ViewId = Annotated[int, Path(ge=1, le=MAX_ID, description="Number of the view.", examples=[3])]


@router.operation("GET /views", SIGNED_IN, "List saved views")
def list_views(
    store: StoreDep,
    user: CurrentUser,
    kind: Annotated[ViewKind, given("Views of the list of experiments, or dashboards.")] = ViewKind.list,
) -> Items[View]:
    """Your own, and those of others that are shared with a project that you see, by name."""
    found = store.views.visible(user.principal.user, user.visible, kind)
    return Items([view for view in found if user.principal.reaches(view.project)])


@router.operation("POST /views", SUBMIT, "Save a view", problems=["not-found", "conflict"], status_code=201)
def save_view(wanted: NewView, store: StoreDep, user: CurrentUser) -> View:
    """Save what a page shows under a name; a view of yours with this kind and name is replaced.

    To share it takes the role of a member in the project.
    """
    principal = user.principal
    if wanted.project is not None and not principal.sees(wanted.project):
        raise NotFound("project", wanted.project)
    reason = principal.lacks(Action.share, wanted.project)
    if reason and (not principal.reaches(wanted.project) or (wanted.shared and wanted.project is not None)):
        raise ProblemError("forbidden", reason)
    return store.views.save(principal.user, **dict(wanted), within=principal.restricted_to, actor=user.actor)


@router.operation("DELETE /views/{view_id}", SUBMIT, "Delete a saved view", status_code=204)
def delete_view(view_id: ViewId, store: StoreDep, user: CurrentUser) -> None:
    """Its owner may, and of a shared one also the maintainers of its project."""
    view = store.views.get(view_id)
    if not user.principal.reaches(view.project):
        raise NotFound("view", view_id)
    if view.owner != user.principal.user:
        if not view.shared or view.project is None or not user.principal.sees(view.project):
            raise NotFound("view", view_id)
        if user.principal.lacks(Action.manage_project, view.project):
            raise ProblemError(
                "forbidden",
                f"view {view_id} belongs to {view.owner}; they or a maintainer of project {view.project} can "
                "delete it",
            )
    store.views.delete(view_id, actor=user.actor)
