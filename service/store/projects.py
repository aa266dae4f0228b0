"""Projects, and who is what in them."""

import re
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, func, select, update

from service.config.document import Problem
from service.db import schema, statements
from service.db.errors import BadValue, Conflict, NotFound
from service.domain.access import DEFAULT_PROJECT, LOCAL_ACTOR, NAME_PATTERN, Actor, Role
from service.domain.people import LONGEST_NOTES, Member, Project, ProjectDetail
from service.domain.shares import BudgetUse, Month, ProjectUse, Spending, UserUse, month_named, month_of
from service.domain.states import TERMINAL_EXPERIMENT_STATES, RunState
from service.specs.project_limits import ProjectLimits, limit_problems
from service.store.audit import note_change
from service.store.base import StorePart, records, storable, transaction
from service.store.people import read_project, read_user

_d, _x, _p, _m = schema.placements.c, schema.experiments.c, schema.projects.c, schema.members.c
_u, _r = schema.users.c, schema.runs.c

LONGEST_TITLE = 200  # Characters of a project's title at most
_NAME = re.compile(NAME_PATTERN)
_SUBMIT_IN_TURN = sa.text("SELECT pg_advisory_xact_lock(7305420, hashtext(:user))")

_until = sa.case(
    (_d.released_s < bindparam("now", type_=schema.Real), _d.released_s),
    else_=bindparam("now", type_=schema.Real),
)
_from = sa.case((_d.placed_s > bindparam("start"), _d.placed_s), else_=bindparam("start", type_=schema.Real))
_hours = (_until - _from) / 3600.0
_of_project = (
    _x.project == bindparam("project"),
    _d.placed_s < bindparam("now", type_=schema.Real),
    sa.or_(_d.released_s.is_(None), _d.released_s > bindparam("start", type_=schema.Real)),
)
_spent = (
    func.sum(_hours * _d.price_usd_per_hour).label("usd"),
    func.sum(_hours * _d.power_w / 1000.0).label("kwh"),
    func.sum(_hours * _d.devices).label("device_hours"),
)
_SPENT = (
    select(*_spent)
    .join_from(schema.placements, schema.experiments, _x.id == _d.experiment_id)
    .where(*_of_project)
)
"""What a project's devices took from `start` to `now`, of deleted experiments as well."""
_SPENT_BY_USERS = _SPENT.add_columns(_x.owner).group_by(_x.owner).order_by(sa.desc("usd"), _x.owner)
"""The same by user, the most first."""


class Projects(StorePart):
    def all(self) -> list[Project]:
        """All projects, by name, archived ones included."""
        return self.read_records(Project, select(schema.projects).order_by(_p.name))

    def get(self, name: str) -> ProjectDetail:
        with self.database.read() as connection:
            return _detail(connection, name)

    @transaction
    def create(
        self,
        connection: Connection,
        name: str,
        *,
        title: str = "",
        visible_to_all: bool = False,
        notes: str = "",
        actor: Actor = LOCAL_ACTOR,
    ) -> ProjectDetail:
        if not _NAME.fullmatch(name):
            raise BadValue(
                "name",
                f"{name[:100]!r} is not a project's name; use up to 63 lower-case letters, digits and . _ -, "
                "starting with a letter or digit",
            )
        _check_texts(title, notes)
        now = self.clock()
        new = Project(name, storable(title), visible_to_all, storable(notes), None, now, {})
        keep = statements.insert_or_keep(connection, schema.projects, ("name",))
        if connection.execute(keep.values(asdict(new)).returning(_p.name)).scalar() is None:
            raise Conflict(f"project {name} exists already; choose another name")
        note_change(connection, actor, "project.create", name, now, after=_shown(new))
        return _detail(connection, name)

    def set(
        self,
        name: str,
        *,
        title: str | None = None,
        visible_to_all: bool | None = None,
        notes: str | None = None,
        actor: Actor = LOCAL_ACTOR,
    ) -> ProjectDetail:
        """Changes a project; None leaves a field as it is."""
        _check_texts(title or "", notes or "")
        given = {"title": title, "visible_to_all": visible_to_all, "notes": notes}
        values = {
            field: storable(value) if isinstance(value, str) else value
            for field, value in given.items()
            if value is not None
        }
        return self._change(name, "set", values, actor)

    def limits(self, name: str) -> ProjectLimits:
        with self.database.read() as connection:
            return ProjectLimits.model_validate(read_project(connection, name).settings)

    @transaction
    def set_limits(
        self,
        connection: Connection,
        name: str,
        limits: ProjectLimits,
        *,
        fields: Collection[str] | None = None,
        actor: Actor = LOCAL_ACTOR,
    ) -> ProjectLimits:
        """Replaces the limits of a project, or only these `fields` of them.

        Raises:
            Conflict: it is archived.
            BadValue: hardware is unknown, or a ceiling is below what is guaranteed or in use.
        """
        catalogue, now = self.settings.catalogue(), self.clock()
        before = read_project(connection, name, lock=True)
        if before.archived_s is not None:
            raise Conflict(
                f"project {name} is archived; restore it first: stillhouse project archive {name} --undo"
            )
        new = limits
        if fields is not None:
            changed = {field: getattr(limits, field) for field in fields}
            new = ProjectLimits.model_validate(before.settings).model_copy(update=changed)
        held_by = (
            select(_d.hardware, func.sum(_d.devices).label("devices"))
            .join(schema.experiments, _x.id == _d.experiment_id)
            .where(_x.project == name, _d.released_s.is_(None))
            .group_by(_d.hardware)
        )
        held = {row.hardware: row.devices for row in connection.execute(held_by)}
        for problem in limit_problems(new, catalogue, held):
            raise BadValue(problem.path, problem.message)
        settings = new.model_dump(mode="json", exclude_defaults=True)
        if settings != before.settings:
            connection.execute(update(schema.projects).where(_p.name == name).values(settings=settings))
            had = ProjectLimits.model_validate(before.settings).model_dump(mode="json")
            has = new.model_dump(mode="json")
            note_change(connection, actor, "project.limits", name, now, before=had, after=has)
        return new

    def spent(self, project: str) -> Spending:
        """What a project has used in this calendar month."""
        with self.database.read() as connection:
            return spent_of(connection, project, self.database_time(connection))

    def use(self, project: str, month: str | None = None) -> ProjectUse:
        """What a project has used in a month, by user, and how far its budgets are used.

        `month` is such as `2026-11` (ValueError if it is not); None = the present one.
        """
        with self.database.read() as connection:
            limits = ProjectLimits.model_validate(read_project(connection, project).settings)
            now_s = self.database_time(connection)
            wanted = month_of(now_s) if month is None else month_named(month)
            until_s = min(max(now_s, wanted.start_s), wanted.end_s)
            values = {"project": project, "start": wanted.start_s, "now": until_s}
            rows = connection.execute(_SPENT_BY_USERS, values).all()
            used = spent_of(connection, project, until_s, wanted)
        passed = max(until_s - wanted.start_s, 1.0) / (wanted.end_s - wanted.start_s)
        budgets = [
            BudgetUse(unit, most, amount, most - amount, amount / passed)
            for unit, most in limits.budgets.limited().items()
            for amount in [getattr(used, unit)]
        ]
        users = [UserUse(row.owner, Spending(row.usd, row.kwh, row.device_hours)) for row in rows]
        return ProjectUse(project, wanted.name, used, budgets, users)

    def archive(self, name: str, archived: bool = True, *, actor: Actor = LOCAL_ACTOR) -> ProjectDetail:
        """Archives a project, or takes it back: an archived one accepts no new experiments.

        What was submitted before stays visible, and runs.
        """
        if archived and name == DEFAULT_PROJECT:
            raise Conflict(f"project {name} is that of specs without one; it cannot be archived")
        now = self.clock()
        return self._change(
            name, "archive" if archived else "unarchive", {"archived_s": now if archived else None}, actor
        )

    @transaction
    def _change(
        self, connection: Connection, name: str, verb: str, values: dict[str, Any], actor: Actor
    ) -> ProjectDetail:
        now = self.clock()
        before = read_project(connection, name, lock=True)
        is_archived = before.archived_s is not None
        if "archived_s" in values and is_archived == (values["archived_s"] is not None):
            return _detail(connection, name)  # It stays archived since when it was.
        if any(getattr(before, field) != value for field, value in values.items()):
            connection.execute(update(schema.projects).where(_p.name == name).values(**values))
            after = read_project(connection, name)
            note_change(
                connection, actor, f"project.{verb}", name, now, before=_shown(before), after=_shown(after)
            )
        return _detail(connection, name)

    @transaction
    def set_member(
        self, connection: Connection, project: str, user: str, role: Role, *, actor: Actor = LOCAL_ACTOR
    ) -> ProjectDetail:
        now = self.clock()
        read_project(connection, project, lock=True)
        read_user(connection, user)
        role_of = select(_m.role).where(_m.project == project, _m.user == user)
        had: Role | None = connection.execute(role_of).scalar()
        if had is not role:
            connection.execute(
                statements.insert_or_replace(connection, schema.members, ("project", "user")),
                {"project": project, "user": user, "role": role},
            )
            before = None if had is None else {"members": {user: had}}
            after = {"members": {user: role}}
            note_change(connection, actor, "project.member_set", project, now, before=before, after=after)
        return _detail(connection, project)

    @transaction
    def remove_member(
        self, connection: Connection, project: str, user: str, *, actor: Actor = LOCAL_ACTOR
    ) -> ProjectDetail:
        now = self.clock()
        read_project(connection, project, lock=True)
        role_of = select(_m.role).where(_m.project == project, _m.user == user)
        had: Role | None = connection.execute(role_of).scalar()
        if had is None:
            raise NotFound(f"member of project {project}", user)
        connection.execute(sa.delete(schema.members).where(_m.project == project, _m.user == user))
        before = {"members": {user: had}}
        note_change(connection, actor, "project.member_remove", project, now, before=before)
        return _detail(connection, project)

    def maintainers(self, project: str) -> list[str]:
        maintainers_of = (
            select(_m.user)
            .join(schema.users, _u.name == _m.user)
            .where(_m.project == project, _m.role == Role.maintainer, _u.disabled_s.is_(None))
            .order_by(_m.user)
        )
        return [row.user for row in self.read(maintainers_of)]

    def all_limits(self) -> dict[str, ProjectLimits | None]:
        """Limits of each project, by name; None = it is archived."""
        return {
            row.name: None if row.archived_s is not None else ProjectLimits.model_validate(row.settings)
            for row in self.read(select(_p.name, _p.archived_s, _p.settings))
        }

    def queued_runs_of(self, project: str, owner: str) -> int:
        ((count,),) = self.read(_queued_runs_of(project, owner))
        return int(count)


def refused_projects(connection: Connection, names: Collection[str]) -> dict[str, Problem]:
    """Why experiments cannot be submitted to projects, by name, where they cannot.

    On PostgreSQL the projects stay as they are until the transaction ends.
    """
    others = set(names) - {DEFAULT_PROJECT}  # It exists, and cannot be archived.
    if not others:
        return {}
    archived_of = select(_p.name, _p.archived_s).where(_p.name.in_(sorted(others))).with_for_update(read=True)
    archived: dict[str, float | None] = {row.name: row.archived_s for row in connection.execute(archived_of)}
    refused: dict[str, Problem] = {}
    for name in others:
        if name not in archived:
            message = f"there is no project {name}; list them with: stillhouse project list"
            refused[name] = Problem("unknown-project", "project", message)
        elif archived[name] is not None:
            message = f"project {name} is archived; name another, or have a maintainer take it back"
            refused[name] = Problem("archived-project", "project", message)
    return refused


def count_queued_in_turn(connection: Connection, project: str, owner: str) -> int:
    """How many runs of a user wait in a project; on PostgreSQL, who queues more waits for the commit."""
    if connection.dialect.name == "postgresql":
        connection.execute(_SUBMIT_IN_TURN, {"user": f"{project} {owner}"})
    return int(connection.execute(_queued_runs_of(project, owner)).scalar_one())


def _queued_runs_of(project: str, owner: str) -> sa.Select[Any]:
    return (
        select(func.count())
        .select_from(schema.runs)
        .join(schema.experiments, _x.id == _r.experiment_id)
        .where(
            _x.project == project,
            _x.owner == owner,
            _x.state.not_in(sorted(TERMINAL_EXPERIMENT_STATES)),
            _r.state == RunState.queued,
        )
    )


def spent_of(connection: Connection, project: str, until_s: float, month: Month | None = None) -> Spending:
    """What a project has used in a calendar month, by default that of `until_s`, until then."""
    start_s = (month or month_of(until_s)).start_s
    values = {"project": project, "start": start_s, "now": until_s}
    row = connection.execute(_SPENT, values).one()
    return Spending(row.usd or 0.0, row.kwh or 0.0, row.device_hours or 0.0)


def _detail(connection: Connection, name: str) -> ProjectDetail:
    project = read_project(connection, name)
    members = select(schema.members).where(_m.project == name).order_by(_m.user)
    return ProjectDetail(**asdict(project), members=records(connection, Member, members))


def _check_texts(title: str, notes: str) -> None:
    if len(title) > LONGEST_TITLE:
        raise BadValue("title", f"it has {len(title):,} characters; at most {LONGEST_TITLE} are kept")
    if len(notes) > LONGEST_NOTES:
        raise BadValue("notes", f"they have {len(notes):,} characters; at most {LONGEST_NOTES:,} are kept")


def _shown(project: Project) -> dict[str, Any]:
    return {name: value for name, value in asdict(project).items() if name not in ("name", "created_s")}
