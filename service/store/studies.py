"""Studies: several experiments that are submitted as one, of which later parts wait for earlier ones.

Each part becomes an experiment once: its row leaves `waiting` in the transaction that stores the experiment.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

import sqlalchemy as sa
from sqlalchemy import Connection, select, update

from service.config.document import Problem, SpecError
from service.config.settings import Settings
from service.db import schema, statements
from service.db.engine import Database
from service.db.errors import IdempotencyMismatch, NotFound
from service.domain.access import EVERYTHING, LOCAL_ACTOR, Actor, Visibility
from service.domain.notifications import PART_REFUSED
from service.domain.records import Experiment, ExperimentStatus, PartOf
from service.domain.studies import PartState, Study, StudyDetail, StudyPart, state_of
from service.specs.study import in_part
from service.store.audit import note_change
from service.store.base import Clocks, StorePart, records, storable, transaction
from service.store.experiments import Belonging, Experiments
from service.store.requests import cancel_experiment
from service.store.submissions import Keyed, NewExperiment, Submissions, body_sha256, insert_group

_s, _p, _x = schema.studies.c, schema.study_parts.c, schema.experiments.c
_STUDY = [_s[name] for name in Study.__dataclass_fields__]


@dataclass(frozen=True, slots=True)
class NewPart:
    """A part of a submission; without an experiment it waits for the parts that it needs."""

    name: str
    needs: Sequence[str] = ()
    tuned: str | None = None
    experiment: NewExperiment | None = None


@dataclass(frozen=True, slots=True)
class NewStudy:
    """A study, checked and not stored yet."""

    name: str
    project: str
    owner: str
    text: str  # As submitted, kept verbatim
    parts: Sequence[NewPart]
    idempotency_key: str | None = None
    actor: Actor | None = None  # Who sent it; None = the owner


@dataclass(frozen=True, slots=True)
class WaitingStudy:
    study: StudyDetail
    text: str


class Studies(StorePart):
    def __init__(
        self,
        database: Database,
        settings: Settings,
        clocks: Clocks,
        submissions: Submissions,
        experiments: Experiments,
    ) -> None:
        super().__init__(database, settings, clocks)
        self._submissions, self._experiments = submissions, experiments

    def submit(self, new: NewStudy) -> tuple[StudyDetail, bool]:
        """Stores a study with the experiments of those parts that need no other, or nothing.

        Returns:
            The study, and True when it was created, False when it was replayed.

        Raises:
            IdempotencyMismatch: the owner used the key for another text.
            SpecError: its project does not exist or is archived, or too many runs would be queued.
        """
        id, created = self._submit(new)
        return self.get(id), created

    @transaction
    def _submit(self, connection: Connection, new: NewStudy) -> tuple[int, bool]:
        now, owner = self.clock(), storable(new.owner)
        sha256 = body_sha256(new.text.encode("utf-8", "surrogatepass"))
        (id,) = statements.reserve_ids(connection, schema.studies, 1)
        connection.execute(
            statements.insert_or_keep(connection, schema.studies, ("owner", "idempotency_key")),
            {
                "id": id,
                "name": new.name,
                "project": new.project,
                "owner": owner,
                "text": storable(new.text),
                "created_s": now,
                "idempotency_key": new.idempotency_key,
                "body_sha256": sha256,
            },
        )
        if new.idempotency_key is not None:
            keeper = _keeper(connection, Keyed(owner, new.idempotency_key, sha256))
            if keeper is not None and keeper != id:
                return keeper, False
        first = {part.name: part.experiment for part in new.parts if part.experiment is not None}
        rows = [self._submissions.rows(experiment) for experiment in first.values()]
        answers = dict(zip(first, insert_group(connection, rows, now), strict=True))
        experiments: dict[str, int] = {}
        problems: list[Problem] = []
        for name, answer in answers.items():
            if isinstance(answer, SpecError):
                problems += in_part(name, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                experiments[name] = answer[0].id
        if problems:
            raise SpecError(problems)
        connection.execute(
            sa.insert(schema.study_parts),
            [
                {
                    "study_id": id,
                    "position": position,
                    "name": part.name,
                    "state": PartState.submitted if part.name in experiments else PartState.waiting,
                    "needs": ",".join(part.needs),
                    "tuned": part.tuned,
                    "experiment_id": experiments.get(part.name),
                }
                for position, part in enumerate(new.parts)
            ],
        )
        actor = new.actor or Actor(owner)
        after = {"name": new.name, "project": new.project, "experiments": list(experiments.values())}
        note_change(connection, actor, "study.submit", id, now, after=after)
        return id, True

    def replay(self, request: Keyed) -> StudyDetail | None:
        """The study of a request whose key was used before; None where the key is new."""
        with self.database.read() as connection:
            id = _keeper(connection, request)
        return None if id is None else self.get(id)

    @transaction
    def submit_part(
        self, connection: Connection, study_id: int, name: str, new: NewExperiment, chosen: str | None
    ) -> Experiment | None:
        """Stores the experiment of a part that waits; None when it waits no more.

        Raises:
            SpecError: its project is archived, or too many runs would be queued.
        """
        taken = _leave_waiting(study_id, name, PartState.submitted).values(chosen=chosen and storable(chosen))
        if not connection.execute(taken).rowcount:
            return None
        (answer,) = insert_group(connection, [self._submissions.rows(new)], self.clock())
        if isinstance(answer, BaseException):
            raise answer
        experiment = answer[0]
        part = (_p.study_id == study_id) & (_p.name == name)
        connection.execute(update(schema.study_parts).where(part).values(experiment_id=experiment.id))
        return experiment

    @transaction
    def refuse_part(self, connection: Connection, study_id: int, name: str, reason: str) -> None:
        """Ends a part that waits, as a failure; one that waits no more stays as it is."""
        refused = _leave_waiting(study_id, name, PartState.refused)
        if not connection.execute(refused.values(reason=storable(reason))).rowcount:
            return
        of = connection.execute(select(_s.name, _s.project, _s.owner).where(_s.id == study_id)).one()
        notice = {
            "key": f"study:{study_id}:{name}",
            "kind": PART_REFUSED,
            "at_s": self.clock(),
            "project": of.project,
            "message": storable(f"part {name} of study {study_id} ({of.name}) was refused: {reason}"),
            "data": {"study": {"id": study_id, "name": of.name, "owner": of.owner}, "part": name},
        }
        connection.execute(sa.insert(schema.notices).inline(), notice)

    def cancel(self, study_id: int, *, actor: Actor = LOCAL_ACTOR) -> StudyDetail:
        """Cancels the experiments of a study, and parts that wait; leaves what has ended."""
        self._cancel(study_id, actor)
        return self.get(study_id)

    @transaction
    def _cancel(self, connection: Connection, study_id: int, actor: Actor) -> None:
        now = self.clock()
        waiting = (_p.study_id == study_id) & (_p.state == PartState.waiting)
        cancelled = update(schema.study_parts).where(waiting).values(state=PartState.cancelled)
        # Before the experiments are read: what a scheduler has submitted meanwhile is among them.
        ended = connection.execute(cancelled.values(reason=f"cancelled by {storable(actor.user)}")).rowcount
        experiments = select(_x.id).join(schema.study_parts, _p.experiment_id == _x.id)
        of_study = experiments.where(_p.study_id == study_id, statements.VISIBLE).order_by(_x.id)
        for id in connection.execute(of_study).scalars().all():
            cancel_experiment(connection, id, now, actor)
        if ended:
            note_change(connection, actor, "study.cancel", study_id, now, after={"parts": ended})

    def get(self, id: int) -> StudyDetail:
        found = self._read(_s.id == id)
        if not found:
            raise NotFound("study", id)
        return found[0]

    def newest(self, *, limit: int, visible: Visibility = EVERYTHING) -> list[StudyDetail]:
        seen = sa.true() if visible.projects is None else _s.project.in_(sorted(visible.projects))
        return self._read(seen, limit=limit)

    def belonging(self, id: int) -> Belonging | None:
        rows = self.read(select(_s.project, _s.owner).where(_s.id == id))
        return Belonging(*rows[0]) if rows else None

    def waiting(self) -> list[WaitingStudy]:
        """Studies with parts that wait, the oldest first."""
        ids = [
            row[0] for row in self.read(select(_p.study_id).where(_p.state == PartState.waiting).distinct())
        ]
        if not ids:
            return []
        texts = {row.id: row.text for row in self.read(select(_s.id, _s.text).where(_s.id.in_(ids)))}
        return [WaitingStudy(study, texts[study.id]) for study in reversed(self._read(_s.id.in_(ids)))]

    def part_of(self, experiment_id: int) -> PartOf | None:
        joined = select(_s.id, _s.name, _p.name).join(schema.study_parts, _p.study_id == _s.id)
        rows = self.read(joined.where(_p.experiment_id == experiment_id))
        return PartOf(*rows[0]) if rows else None

    def chosen(self, experiment_ids: Collection[int]) -> dict[int, str]:
        """What was chosen for experiments that are parts of studies, by id."""
        of = _p.experiment_id.in_(list(experiment_ids)) & _p.chosen.is_not(None)
        return {
            row.experiment_id: row.chosen for row in self.read(select(_p.experiment_id, _p.chosen).where(of))
        }

    def _read(self, chosen: sa.ColumnElement[bool], *, limit: int | None = None) -> list[StudyDetail]:
        with self.database.read() as connection:
            wanted = select(*_STUDY).where(chosen).order_by(_s.id.desc()).limit(limit)
            found = records(connection, Study, wanted)
            of_studies = _p.study_id.in_([study.id for study in found])
            rows = connection.execute(
                select(schema.study_parts).where(of_studies).order_by(_p.study_id, _p.position)
            ).all()
            ids = [row.experiment_id for row in rows if row.experiment_id is not None]
            experiments = records(connection, Experiment, statements.experiments_by_id(set(ids)))
        counts = self._experiments.run_counts_of([one.id for one in experiments])
        by_id = {one.id: ExperimentStatus.of(one, counts[one.id]) for one in experiments}
        parts: Mapping[int, list[StudyPart]] = {study.id: [] for study in found}
        for row in rows:
            parts[row.study_id].append(
                StudyPart(
                    name=row.name,
                    state=row.state,
                    needs=row.needs.split(",") if row.needs else [],
                    tuned=row.tuned,
                    reason=row.reason,
                    chosen=row.chosen,
                    experiment=by_id.get(row.experiment_id),
                )
            )
        return [
            StudyDetail(**asdict(study), state=state_of(parts[study.id]), parts=parts[study.id])
            for study in found
        ]


def _leave_waiting(study_id: int, name: str, state: PartState) -> sa.Update:
    part = (_p.study_id == study_id) & (_p.name == name) & (_p.state == PartState.waiting)
    return update(schema.study_parts).where(part).values(state=state)


def _keeper(connection: Connection, request: Keyed) -> int | None:
    """The study that an owner used a key for; raises `IdempotencyMismatch` where its text was another."""
    of_key = (_s.owner == request.owner) & (_s.idempotency_key == request.key)
    row = connection.execute(select(_s.id, _s.body_sha256).where(of_key)).one_or_none()
    if row is None:
        return None
    if row.body_sha256 != request.body_sha256:
        raise IdempotencyMismatch(request.key)
    return int(row.id)
