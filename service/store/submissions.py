"""Experiments come in: one transaction each, or one for many that come at the same time."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, bindparam, select, update

from service.config.document import Problem, SpecError
from service.config.hardware import find
from service.config.settings import Settings
from service.db import schema, statements
from service.db.clock import database_time
from service.db.engine import Database
from service.db.errors import IdempotencyMismatch, ReplayOfDeleted, StoreError, StoreOutage
from service.db.listing import SPEC_COLUMNS
from service.domain.access import Actor
from service.domain.events import EventKind
from service.domain.grid import Point
from service.domain.records import SUMMARY_FIELDS, Experiment
from service.domain.states import ExperimentState, RunState
from service.specs.experiment import ExperimentSpec, Refusal, RunPlan, cell_of
from service.specs.models import referenced_runs
from service.specs.project_limits import queue_cap_problem
from service.specs.reuse import Reuse, config_sha256
from service.store.base import (
    Clocks,
    NewEvent,
    StorePart,
    announce,
    insert_events,
    lock_for_attempt,
    read_experiment,
    records,
    storable,
    transaction,
)
from service.store.projects import count_queued_in_turn, refused_projects

_r = schema.runs.c

_NOTHING_REUSED = Reuse()
_REUSED_COLUMNS = (
    "implementation", "global_batch_size", "step", "total_steps", "checkpoint", "checkpoint_step",
    *SUMMARY_FIELDS, *schema.NEIGHBOUR_COLUMNS,
)  # fmt: skip
"""Columns of `runs` that a reused run takes over."""


@dataclass(frozen=True, slots=True)
class NewExperiment:
    """A submission, checked and not stored yet."""

    spec: ExperimentSpec
    plans: Sequence[RunPlan]  # From `spec.runs()`
    spec_text: str  # As submitted, kept verbatim
    owner: str
    idempotency_key: str | None = None  # The same key with the same text answers the same experiment
    reuse: Reuse = _NOTHING_REUSED
    """Runs that take the figures of others; one whose source is gone meanwhile is trained."""
    actor: Actor | None = None  # Who sent it; None = the owner
    most_queued: int | None = None  # Most queued runs that the owner may have in the project; None = no limit


@dataclass(frozen=True, slots=True)
class Keyed:
    owner: str
    key: str
    body_sha256: str


def body_sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


@dataclass(frozen=True, slots=True)
class ExperimentRows:
    """A submission as rows without ids."""

    new: NewExperiment
    actor: Actor
    body_sha256: str
    experiment: dict[str, Any]
    canonical: str
    cells: list[dict[str, Any]]
    runs: list[dict[str, Any]]
    references: set[int]


_INITIAL = {
    **dict.fromkeys(Experiment.__dataclass_fields__),
    "state": ExperimentState.queued,
    "attempt": 0,
    "event_count": 1,
    "not_before_s": 0.0,
    "tags": "",
    "notes": "",
}
_INITIAL_RUN = {
    "state": RunState.queued,
    "attempt": 0,
    "own_failures": 0,
    "infrastructure_failures": 0,
    "not_before_s": 0.0,
    "step": 0,
    "first_attempt": 1,
}

Answer = tuple[Experiment, bool] | BaseException  # What `submit` returns, or what it raises


class Submissions(StorePart):
    def __init__(self, database: Database, settings: Settings, clocks: Clocks) -> None:
        super().__init__(database, settings, clocks)
        self._catalogue = settings.catalogue()

    def submit(self, new: NewExperiment) -> tuple[Experiment, bool]:
        """Stores an experiment with all its runs, or nothing.

        Returns:
            The experiment, and True when it was created, False when it was replayed.

        Raises:
            IdempotencyMismatch: the owner used the key for another text.
            ReplayOfDeleted: the owner used the key for an experiment that has been deleted.
            SpecError: its project does not exist or is archived, or too many runs would be queued.
        """
        (answer,) = self.submit_many([new])
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def submit_many(self, experiments: Sequence[NewExperiment]) -> list[Answer]:
        """Stores several experiments in one transaction; each is answered as `submit` answers it.

        An exception in the list is what `submit` would have raised for that experiment alone; the others
        are stored. On `StoreOutage` nothing is stored.
        """
        answers: dict[int, Answer] = {}
        group: dict[int, ExperimentRows] = {}
        for position, new in enumerate(experiments):
            try:
                group[position] = self.rows(new)
            except Exception as error:  # Whatever is wrong with one, the others are stored.
                answers[position] = error
        if group:
            answers.update(zip(group, self._store(list(group.values())), strict=True))
        return [answers[position] for position in range(len(experiments))]

    def replays(self, requests: Sequence[Keyed]) -> list[Experiment | StoreError | None]:
        """Answers to requests whose keys were used before; None where the key is new.

        An answer is the earlier experiment, or the error that `submit` raises for the key.
        """
        if not requests:
            return []
        with self.database.read() as connection:
            keepers = _keepers(connection, {(request.owner, request.key) for request in requests})
            experiments = _experiments_of(connection, keepers.values())
        pairs = ((request, keepers.get((request.owner, request.key))) for request in requests)
        return [
            None if keeper is None else _replay(keeper, experiments, request.body_sha256)
            for request, keeper in pairs
        ]

    def rows(self, new: NewExperiment) -> ExperimentRows:
        spec = new.spec
        now = self.clock()
        canonical = spec.canonical_json()
        cells: list[dict[str, Any]] = []
        typed: dict[str, dict[str, Any]] = {}
        runs: list[dict[str, Any]] = []
        references: set[int] = set()
        for plan in new.plans:
            if plan.cell not in typed:
                if plan.refusal is None:
                    references |= referenced_runs(plan.spec)
                cells.append(
                    {
                        "cell": plan.cell,
                        "canonical": canonical if plan.spec == spec else plan.spec.canonical_json(),
                        "refusal": plan.refusal and storable(plan.refusal.reason),
                    }
                )
                typed[plan.cell] = self._typed_columns(plan.spec, plan.refusal)
            runs.append(
                {
                    **_INITIAL_RUN,
                    **typed[plan.cell],
                    "index": plan.index,
                    "cell": plan.cell,
                    "seed": plan.seed,
                    "repeat": plan.repeat,
                    "point": plan.point,
                }
            )
        owner, key, actor = new.owner, new.idempotency_key, new.actor
        return ExperimentRows(
            new=replace(new, owner=storable(owner), idempotency_key=None if key is None else storable(key)),
            actor=Actor(storable(owner if actor is None else actor.user)),
            body_sha256=body_sha256(new.spec_text.encode("utf-8", "surrogatepass")),
            experiment={
                **_INITIAL,
                "name": spec.name,
                "owner": storable(owner),
                "priority": spec.queue.priority,
                "project": spec.project,
                "pool": spec.pool,
                "spec_sha256": hashlib.sha256(canonical.encode()).hexdigest(),
                "run_count": len(runs),
                "created_s": now,
                "queued_s": now,
            },
            canonical=canonical,
            cells=cells,
            runs=runs,
            references=references,
        )

    @transaction
    def set_point(
        self,
        connection: Connection,
        experiment_id: int,
        attempt: int,
        indices: Collection[int],
        point: Point,
        spec: ExperimentSpec,
        message: str,
        refusal: Refusal | None = None,
    ) -> None:
        """Gives runs that were stored without axis values theirs.

        Args:
            attempt: the experiment's attempt that decides.
            indices: positions of the runs, which differ by seed or repeat.
            spec: the spec with the values written in, or any if they make none.
            refusal: why they cannot be trained.
        """
        now = self.clock()
        cell = cell_of(point)
        columns = {"point": point, "cell": cell, **self._typed_columns(spec, refusal)}
        row = lock_for_attempt(connection, experiment_id, attempt, 1)
        connection.execute(
            statements.insert_or_keep(connection, schema.cell_specs, ("experiment_id", "cell")),
            {
                "experiment_id": experiment_id,
                "cell": cell,
                "canonical": spec.canonical_json(),
                "refusal": refusal and storable(refusal.reason),
            },
        )
        connection.execute(
            update(schema.runs)
            .where(_r.experiment_id == experiment_id, _r.index.in_(list(indices)))
            .values(**columns)
        )
        new = NewEvent(EventKind.experiment_suggested, message, attempt=attempt, data={"point": point})
        insert_events(connection, experiment_id, row.event_count, [new], now)

    def _typed_columns(self, spec: ExperimentSpec, refusal: Refusal | None) -> dict[str, Any]:
        """Returns the columns of a cell; of a refused one, its values where no valid spec has them."""
        columns = self._columns_of(spec)
        if refusal is None:
            return columns
        for field, column in SPEC_COLUMNS.items():
            if (value := refusal.fields.get(field)) is not None:
                columns[column] = storable(value) if isinstance(value, str) else value
        if not isinstance(columns["global_batch_size"], int):
            columns["global_batch_size"] = 0
        entry = find(columns["hardware"], self._catalogue)
        columns["hardware"] = entry.name if entry else columns["hardware"]
        return columns | {"config_sha256": None}

    def _columns_of(self, spec: ExperimentSpec) -> dict[str, Any]:
        pricing = spec.pricing(self._catalogue)
        workers = spec.worker_numbers[0]
        devices = workers * pricing.charged_devices
        return {
            "task": str(spec.task.name),
            "student": storable(spec.model.name),
            "precision": str(spec.precision),
            "optimizer": str(spec.optimizer.name),
            "implementation": str(spec.optimizer.implementation),
            "global_batch_size": 0 if spec.batch.is_found else spec.batch.size,
            "strategy": str(spec.parallel.strategy),
            "workers": workers,
            "hardware": spec.hardware,
            "teacher": None if spec.model.teacher is None else storable(spec.model.teacher),
            "devices": devices,
            "price_usd_per_hour": devices * pricing.price_usd_per_hour,
            "power_w": devices * pricing.modelled_w,
            "config_sha256": config_sha256(spec, pricing),
        }

    def _store(self, group: list[ExperimentRows]) -> list[Answer]:
        """Commits a group; when the database refuses it, each on its own, so that one fails alone."""
        try:
            return self.database.write(lambda connection: insert_group(connection, group, self.clock()))
        except StoreOutage:
            raise
        except Exception as error:
            if len(group) == 1:
                return [error]
        answers: list[Answer] = []
        for item in group:
            try:
                answers += self._store([item])
            except StoreOutage as error:
                answers.append(error)
        return answers


def insert_group(connection: Connection, group: list[ExperimentRows], now: float) -> list[Answer]:
    """Stores those of a group that their project takes; the others get the reason."""
    by_project = refused_projects(connection, {item.experiment["project"] for item in group})
    refused = {
        position: by_project[project]
        for position, item in enumerate(group)
        if (project := item.experiment["project"]) in by_project
    }
    refused |= _beyond_queue_caps(connection, group, refused)
    accepted = [item for position, item in enumerate(group) if position not in refused]
    stored = iter(_insert_accepted(connection, accepted, now) if accepted else [])
    return [
        SpecError([refused[position]]) if position in refused else next(stored)
        for position in range(len(group))
    ]


def _insert_accepted(connection: Connection, group: list[ExperimentRows], now: float) -> list[Answer]:
    ids = list(statements.reserve_ids(connection, schema.experiments, len(group)))
    keepers = _claim_keys(connection, group, ids, now)
    answers: dict[int, Answer] = {}
    fresh: list[tuple[int, ExperimentRows]] = []
    replayed: dict[int, Any] = {}
    for position, (id, item) in enumerate(zip(ids, group, strict=True)):
        keeper = keepers.get((item.new.owner, item.new.idempotency_key))
        if keeper is None or keeper.experiment_id == id:
            fresh.append((id, item))
            answers[position] = (Experiment.from_row({**item.experiment, "id": id}), True)
        else:
            replayed[position] = keeper
    _insert_rows(connection, fresh, now)
    for id, item in fresh:
        if item.new.reuse != _NOTHING_REUSED:
            _reuse_runs(connection, id, item, now)
            answers[ids.index(id)] = (read_experiment(connection, id), True)
    experiments = _experiments_of(connection, replayed.values())
    for position, keeper in replayed.items():
        earlier = _replay(keeper, experiments, group[position].body_sha256)
        answers[position] = earlier if isinstance(earlier, StoreError) else (earlier, False)
    return [answers[position] for position in range(len(group))]


def _beyond_queue_caps(
    connection: Connection, group: list[ExperimentRows], refused: Collection[int]
) -> dict[int, Problem]:
    """Why submissions would give their owners too many queued runs, by position."""
    capped = [
        (position, item)
        for position, item in enumerate(group)
        if item.new.most_queued is not None and position not in refused
    ]
    waiting: dict[tuple[str, str], int] = {}
    for project, owner in sorted({(item.experiment["project"], item.new.owner) for _, item in capped}):
        waiting[project, owner] = count_queued_in_turn(connection, project, owner)
    beyond = {}
    for position, item in capped:
        key = item.experiment["project"], item.new.owner
        problem = queue_cap_problem(*key, waiting[key], len(item.runs), item.new.most_queued)
        if problem is None:
            waiting[key] += len(item.runs)
        else:
            beyond[position] = problem
    return beyond


def _experiments_of(connection: Connection, keepers: Collection[Any]) -> dict[int, Experiment]:
    if not keepers:
        return {}
    chosen = statements.experiments_by_id({keeper.experiment_id for keeper in keepers})
    return {one.id: one for one in records(connection, Experiment, chosen)}


def _replay(keeper: Any, experiments: Mapping[int, Experiment], sha256: str) -> Experiment | StoreError:
    if keeper.body_sha256 != sha256:
        return IdempotencyMismatch(keeper.key)
    return experiments.get(keeper.experiment_id) or ReplayOfDeleted(keeper.key, keeper.experiment_id)


def _claim_keys(
    connection: Connection, group: list[ExperimentRows], ids: list[int], now: float
) -> dict[tuple[str, str | None], Any]:
    """Who holds each idempotency key of the group: one of the group, or an earlier request."""
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for id, item in zip(ids, group, strict=True):
        owner, key = item.new.owner, item.new.idempotency_key
        if key is not None:
            row = {"owner": owner, "key": key, "body_sha256": item.body_sha256}
            first.setdefault((owner, key), row | {"experiment_id": id, "created_s": now})
    if not first:
        return {}
    insert = statements.insert_or_keep(connection, schema.idempotency_keys, ("owner", "key"))
    connection.execute(insert, [first[key] for key in sorted(first)])  # In one order: no deadlock.
    return _keepers(connection, first)


def _insert_rows(connection: Connection, fresh: list[tuple[int, ExperimentRows]], now: float) -> None:
    if not fresh:
        return
    changed_s = database_time(connection)
    experiments = [{**item.experiment, "id": id, "changed_s": changed_s} for id, item in fresh]
    statements.insert_rows(connection, schema.experiments, experiments)
    specs = [
        {"experiment_id": id, "text": storable(item.new.spec_text), "canonical": item.canonical}
        for id, item in fresh
    ]
    statements.insert_rows(connection, schema.experiment_specs, specs)
    cells = [{"experiment_id": id, **cell} for id, item in fresh for cell in item.cells]
    statements.insert_rows(connection, schema.cell_specs, cells)
    references = [
        {"experiment_id": id, "run_id": run_id} for id, item in fresh for run_id in sorted(item.references)
    ]
    statements.insert_rows(connection, schema.run_references, references)
    runs = [{**run, "experiment_id": id} for id, item in fresh for run in item.runs]
    statements.insert_rows(connection, schema.runs, runs)
    events = [
        {
            "experiment_id": id,
            "number": 1,
            "at_s": now,
            "kind": str(EventKind.experiment_submitted),
            "message": f"submitted by {item.new.owner} with {len(item.runs):,} runs",
            "actor": item.actor.user,
        }
        for id, item in fresh
    ]
    statements.insert_rows(connection, schema.events, events)


def _reuse_runs(connection: Connection, id: int, item: ExperimentRows, now: float) -> None:
    """Gives runs of a new experiment the figures of others, with an event for each."""
    wanted = item.new.reuse.runs
    # Held until the commit, so that no one deletes them meanwhile.
    reusable_runs = (
        select(_r.id, _r.experiment_id, *(_r[name] for name in _REUSED_COLUMNS))
        .join(schema.experiments, schema.experiments.c.id == _r.experiment_id)
        .where(_r.id.in_(sorted(set(wanted.values()))), _r.state == RunState.succeeded, statements.VISIBLE)
        .with_for_update(read=True)  # Left out on SQLite.
    )
    sources = {row["id"]: row for row in connection.execute(reusable_runs).mappings()}
    reused = {index: sources[source] for index, source in wanted.items() if source in sources}
    events = [
        NewEvent(EventKind.experiment_note, f"not reused: {why}")
        for why in dict.fromkeys(item.new.reuse.refused.values())
    ]
    if reused:
        connection.execute(
            _reuse_run(id, ended_s=now),
            [
                {"position": index, "source": row["id"]}
                | {f"new_{name}": row[name] for name in _REUSED_COLUMNS}
                for index, row in reused.items()
            ],
        )
        summaries = (
            select(_r.id, sa.literal(0), schema.run_summaries.c.summary)
            .join(schema.run_summaries, schema.run_summaries.c.run_id == _r.reused_from)
            .where(_r.experiment_id == id)
        )
        connection.execute(
            sa.insert(schema.run_summaries).from_select(["run_id", "attempt", "summary"], summaries)
        )
        rows = connection.execute(select(_r.index, _r.id).where(_r.experiment_id == id))
        own = {row[0]: row[1] for row in rows}
        events += [
            NewEvent(
                EventKind.run_reused,
                f"run {row['id']} of experiment {row['experiment_id']} has the same settings and data",
                own[index],
                data={"run_id": row["id"]},
            )
            for index, row in reused.items()
        ]
    if len(reused) == len(item.runs):
        connection.execute(statements.set_experiment(id, state=ExperimentState.succeeded, ended_s=now))
        events.append(NewEvent(EventKind.experiment_succeeded, "all runs are reused"))
    announce(connection, id, events, now, item.actor)


def _reuse_run(experiment_id: int, *, ended_s: float) -> sa.Update:
    """Ends a run that has just been inserted with the figures of another."""
    return (
        update(schema.runs)
        .where(_r.experiment_id == experiment_id, _r.index == bindparam("position"))
        .values(
            state=RunState.succeeded,
            reused_from=bindparam("source"),
            ended_s=ended_s,
            **{name: bindparam(f"new_{name}") for name in _REUSED_COLUMNS},
        )
    )


def _keepers(connection: Connection, keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str | None], Any]:
    c = schema.idempotency_keys.c
    chosen = select(schema.idempotency_keys).where(sa.tuple_(c.owner, c.key).in_(list(keys)))
    return {(row.owner, row.key): row for row in connection.execute(chosen)}
