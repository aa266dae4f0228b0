"""Studies on every database: parts become experiments once, in order, and for their owner."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from service.analysis.question import Question
from service.analysis.run_table import read_run_table
from service.config.document import parse
from service.config.settings import Settings
from service.db.errors import IdempotencyMismatch
from service.domain.access import Actor, Role, Visibility
from service.domain.events import Topic
from service.domain.states import ExperimentState, RunState
from service.domain.studies import PartState, StudyDetail
from service.scheduling.queue import Queue
from service.specs.study import parse_study, part_text
from service.store import NewExperiment, NewPart, NewStudy, NotFound, Store
from service.studies import StudyParts
from tests.service.specs.test_study import DISTILLATION, TUNED

SubmitStudy = Callable[..., StudyDetail]
Finish = Callable[..., None]


def new_study(text: str, key: str | None = None, owner: str = "ada") -> NewStudy:
    study = parse_study(parse(text.encode()))
    parts = []
    for name, part in study.parts.items():
        document, spec = study.outlines[name]
        new = NewExperiment(spec, list(spec.runs()), part_text(study.name, name, document), owner)
        parts.append(NewPart(name, part.needs, part.tuned, None if part.needs else new))
    return NewStudy(study.name, study.project, owner, text, parts, key)


@pytest.fixture
def submit_study(store: Store) -> SubmitStudy:
    def call(text: str, **more: Any) -> StudyDetail:
        return store.studies.submit(new_study(text, **more))[0]

    return call


@pytest.fixture
def finish(store: Store, queue: Queue) -> Finish:
    """Ends the experiment that is next in the queue, each run with an accuracy; None = it fails."""

    def call(experiment_id: int, accuracy: Callable[[Mapping[str, Any], int], float | None]) -> None:
        (claimed,) = queue.claim("s1", lease_s=30)
        assert claimed.id == experiment_id
        store.drivers.started(claimed.id, claimed.attempt, "node", 1)
        values = []
        for run in store.runs.all_of(experiment_id):
            values.append(accuracy(run.point, run.seed))
            attempt = store.attempts.open(run.id, claimed.attempt)
            store.attempts.run_started(run.id, attempt, total_steps=9, resumed_from_step=0, facts={})
            ended = RunState.failed if values[-1] is None else RunState.succeeded
            summary = {"accuracy": values[-1], "headline": "accuracy", "score": values[-1]}
            store.attempts.finish_run(run.id, attempt, ended, summary=summary)
        works = any(value is not None for value in values)
        state = ExperimentState.failed
        if works:
            state = ExperimentState.incomplete if None in values else ExperimentState.succeeded
        store.drivers.finish_experiment(claimed.id, claimed.attempt, state)

    return call


@pytest.fixture
def parts(store: Store, settings: Settings) -> StudyParts:
    return StudyParts(store, settings)


def states(study: StudyDetail) -> dict[str, str]:
    return {part.name: str(part.state) for part in study.parts}


def experiment_of(study: StudyDetail, part: str) -> int:
    (experiment,) = (one.experiment for one in study.parts if one.name == part)
    assert experiment is not None
    return experiment.id


def test_parts_that_need_no_other_are_experiments_at_once(store: Store, submit_study: SubmitStudy) -> None:
    study = submit_study(DISTILLATION)
    assert states(study) == {"student": "waiting", "teacher": "submitted", "shared": "waiting"}
    teacher = store.experiments.get(experiment_of(study, "teacher"))
    assert (teacher.name, teacher.owner, teacher.run_count) == ("distillation-teacher", "ada", 3)
    assert (study.state, study.compared) == (ExperimentState.running, [teacher.id])
    (row,) = store.audit.page(action="study").items
    assert (row.action, row.object_id, row.actor) == ("study.submit", str(study.id), "ada")


def test_the_same_key_is_the_same_study_and_another_text_is_refused(store: Store) -> None:
    first, created = store.studies.submit(new_study(DISTILLATION, key="k"))
    again, created_again = store.studies.submit(new_study(DISTILLATION, key="k"))
    assert (created, created_again, again.id) == (True, False, first.id)
    assert len(store.experiments.page().items) == 1
    with pytest.raises(IdempotencyMismatch):
        store.studies.submit(new_study(TUNED, key="k"))
    assert len(store.experiments.page().items) == 1
    assert store.studies.submit(new_study(TUNED, key="k", owner="ben"))[1]


def test_a_study_of_a_missing_project_stores_nothing(store: Store) -> None:
    with pytest.raises(ValueError, match=r"^parts\.teacher\.project: there is no project nlp;"):
        store.studies.submit(new_study(DISTILLATION.replace("parts:", "project: nlp\nparts:", 1)))
    assert store.experiments.page().items == []
    with pytest.raises(NotFound, match="no study has the id 1"):
        store.studies.get(1)


def test_later_parts_start_from_the_runs_of_earlier_ones(
    store: Store, submit_study: SubmitStudy, finish: Finish, parts: StudyParts
) -> None:
    study = submit_study(DISTILLATION)
    parts.run_once()
    assert states(store.studies.get(study.id))["student"] == "waiting"
    teacher = experiment_of(study, "teacher")
    finish(teacher, lambda point, seed: {0: 0.7, 1: 0.9, 2: 0.8}[seed])
    parts.run_once()
    parts.run_once()
    study = store.studies.get(study.id)
    assert set(states(study).values()) == {"submitted"}
    first, second, _ = store.runs.all_of(teacher)
    student = store.runs.all_of(experiment_of(study, "student"))
    assert [(run.seed, run.teacher) for run in student] == [
        (0, f"run:0={first.id},1={second.id}"),
        (1, f"run:0={first.id},1={second.id}"),
    ]
    references = store.experiments.references(experiment_of(study, "student"))
    assert [one.run_id for one in references] == [first.id, second.id]
    shared = store.runs.all_of(experiment_of(study, "shared"))
    assert [run.teacher for run in shared] == [None, f"run:{second.id}"]
    assert [part.chosen for part in study.parts] == [
        None,
        None,
        f"run {second.id} is the best of 3 of part teacher by accuracy on validation (0.9)",
    ]
    text, _ = store.experiments.spec(experiment_of(study, "student"))
    assert text.startswith("# Part student of study distillation\n")
    assert [one.owner for one in store.experiments.page().items] == ["ada"] * 3


LINKED = TUNED.replace(
    "axes: {optimizer.name: [adamw, adan], optimizer.learning_rate: [1.0e-4, 1.0e-3, 1.0e-2]}",
    "together: [{optimizer.name: [adamw, adamw, adamw, adan, adan, adan], optimizer.learning_rate: [1.0e-4, "
    "1.0e-3, 1.0e-2, 1.0e-4, 1.0e-3, 1.0e-2]}]",
)


@pytest.mark.parametrize("text", [TUNED, LINKED], ids=["axes", "linked"])
def test_the_arms_of_a_tuned_part_are_compared_at_their_best(
    store: Store, submit_study: SubmitStudy, finish: Finish, parts: StudyParts, text: str
) -> None:
    study = submit_study(text)

    def accuracy(point: Mapping[str, Any], seed: int) -> float:
        label = "+".join(map(str, point.values()))
        return 0.9 if label in ("adamw+0.001", "adan+0.01") else 0.8

    tuning = experiment_of(study, "tuning")
    finish(tuning, accuracy)
    parts.run_once()
    study = store.studies.get(study.id)
    final = experiment_of(study, "final")
    points = {json.dumps(run.point): run.seed for run in store.runs.all_of(final)}
    name = "optimizer.name+optimizer.learning_rate"
    assert [json.loads(point) for point in points] == [{name: "adamw+0.001"}, {name: "adan+0.01"}]
    assert study.compared == [final]
    part = store.studies.part_of(final)
    assert part is not None
    assert (part.id, part.name, part.part) == (study.id, "optimizers", "final")
    assert store.studies.chosen([tuning, final]) == {
        final: "optimizer.learning_rate was chosen on validation by mean accuracy, among 3 cells per arm of "
        f"experiment {tuning}, and the arms are compared with fresh seeds (optimizer.name=adamw: "
        "optimizer.learning_rate=0.001; optimizer.name=adan: optimizer.learning_rate=0.01)"
    }
    finish(final, lambda point, seed: 0.85 + 0.01 * seed)
    answer = Question(read_run_table(store, study.compared)).compare(metrics=["accuracy"])
    assert answer.notes[0] == f"experiment {final}: {store.studies.chosen([final])[final]}"


def test_fresh_seeds_learn_from_their_own_teachers(
    store: Store, submit_study: SubmitStudy, finish: Finish, parts: StudyParts
) -> None:
    text = TUNED.replace("    seeds: [0, 1]", "    model: {teacher: {run: teacher/seed}}\n    seeds: [0, 1]")
    study = submit_study(text + "  teacher: {task: {name: imdb}, seeds: [0, 1, 10, 11]}\n")
    teacher = experiment_of(study, "teacher")
    finish(teacher, lambda point, seed: 0.9)
    parts.run_once()
    tuning = experiment_of(store.studies.get(study.id), "tuning")
    finish(tuning, lambda point, seed: 0.5 + float(point["optimizer.learning_rate"]))
    parts.run_once()
    runs = {run.seed: run.id for run in store.runs.all_of(teacher)}
    of_part = store.runs.all_of(experiment_of(store.studies.get(study.id), "final"))
    assert {run.teacher for run in of_part} == {f"run:10={runs[10]},11={runs[11]}"}
    assert {run.teacher for run in store.runs.all_of(tuning)} == {f"run:0={runs[0]},1={runs[1]}"}


def test_an_arm_without_a_result_ends_the_comparison(
    store: Store, submit_study: SubmitStudy, finish: Finish, parts: StudyParts
) -> None:
    study = submit_study(TUNED)
    finish(
        experiment_of(study, "tuning"),
        lambda point, seed: None if point["optimizer.name"] == "adan" else 0.5,
    )
    parts.run_once()
    (_, final) = store.studies.get(study.id).parts
    assert final.state is PartState.refused
    assert str(final.reason).startswith(
        "part tuning has no best optimizer.learning_rate for optimizer.name=adan: "
    )


def test_parts_whose_part_failed_end_with_the_reason(
    store: Store, submit_study: SubmitStudy, finish: Finish, parts: StudyParts
) -> None:
    study = submit_study(DISTILLATION)
    finish(experiment_of(study, "teacher"), lambda point, seed: None)
    parts.run_once()
    study = store.studies.get(study.id)
    assert [part.reason for part in study.parts if part.state is PartState.refused] == [
        "part teacher failed (experiment 1)"
    ] * 2
    assert study.state is ExperimentState.failed
    assert store.studies.waiting() == []


def test_a_refused_part_is_told_like_a_failure_and_once(
    store: Store, submit_study: SubmitStudy, finish: Finish, parts: StudyParts
) -> None:
    for owner, topics in (("ada", [Topic.failure]), ("ada", [Topic.hold]), ("ben", [Topic.failure])):
        store.notifications.subscribe(owner, "webhook", "https://hooks.example.com/", topics)
    study = submit_study(DISTILLATION)
    finish(experiment_of(study, "teacher"), lambda point, seed: None if seed == 1 else 0.5)
    for _ in range(2):
        parts.run_once()
        store.studies.refuse_part(study.id, "student", "too late")
        store.notifications.address()
    sent = [json.loads(each.body) for each in store.notifications.take_deliveries(9, 60.0)]
    assert [message["type"] for message in sent] == ["experiment.incomplete", "study.part_refused"]
    message = sent[1]
    reason = "part teacher has no result for seed 1"
    assert message["data"] == {
        "message": f"part student of study {study.id} (distillation) was refused: {reason}",
        "project": "default",
        "study": {"id": study.id, "name": "distillation", "owner": "ada"},
        "part": "student",
    }


def test_a_seed_without_a_teacher_ends_the_part(
    store: Store, submit_study: SubmitStudy, finish: Finish, parts: StudyParts
) -> None:
    study = submit_study(DISTILLATION)
    finish(experiment_of(study, "teacher"), lambda point, seed: None if seed == 1 else 0.5)
    parts.run_once()
    student, _, shared = store.studies.get(study.id).parts
    assert (student.state, student.reason) == (PartState.refused, "part teacher has no result for seed 1")
    assert shared.state is PartState.submitted
    assert shared.experiment is not None
    store.requests.cancel(shared.experiment.id)
    assert store.studies.get(study.id).state is ExperimentState.cancelled


def test_a_deleted_teacher_ends_the_part(
    store: Store, submit_study: SubmitStudy, finish: Finish, parts: StudyParts
) -> None:
    study = submit_study(DISTILLATION)
    teacher = experiment_of(study, "teacher")
    finish(teacher, lambda point, seed: 0.5)
    store.removal.delete(teacher)
    parts.run_once()
    assert store.studies.get(study.id).parts[0].reason == "the experiment of part teacher was deleted"


def test_what_the_owner_may_no_longer_do_ends_the_part(
    store: Store, submit_study: SubmitStudy, finish: Finish, parts: StudyParts
) -> None:
    store.people.add_user("ada")
    store.projects.create("nlp")
    store.projects.set_member("nlp", "ada", Role.member)
    study = submit_study(DISTILLATION.replace("parts:", "project: nlp\nparts:", 1))
    finish(experiment_of(study, "teacher"), lambda point, seed: 0.5)
    store.projects.set_member("nlp", "ada", Role.viewer)
    parts.run_once()
    (reason, again) = (part.reason for part in store.studies.get(study.id).parts if part.needs)
    assert reason == again
    assert str(reason).startswith("project: submitting needs role member in project nlp, and you are viewer;")


def test_a_run_that_the_owner_does_not_see_ends_the_part(
    store: Store, submit_study: SubmitStudy, finish: Finish, parts: StudyParts
) -> None:
    store.projects.create("hidden")
    secret = submit_study(DISTILLATION.replace("parts:", "project: hidden\nparts:", 1), owner="ben")
    finish(experiment_of(secret, "teacher"), lambda point, seed: 0.5)
    (run, *_) = store.runs.all_of(experiment_of(secret, "teacher"))
    store.people.add_user("ada")
    study = submit_study(DISTILLATION.replace("name: tiny", f"name: 'run:{run.id}'"))
    finish(experiment_of(study, "teacher"), lambda point, seed: 0.5)
    parts.run_once()
    student = store.studies.get(study.id).parts[0]
    assert student.reason == f"model.name: 'run:{run.id}': no such run; `stillhouse runs` lists them"


def test_two_schedulers_submit_a_part_once(
    store: Store, settings: Settings, submit_study: SubmitStudy, finish: Finish
) -> None:
    study = submit_study(DISTILLATION)
    finish(experiment_of(study, "teacher"), lambda point, seed: 0.5)
    (waiting,) = store.studies.waiting()
    part, other = StudyParts(store, settings), StudyParts(store, settings)
    known = {one.name: one for one in waiting.study.parts}
    part._submit(waiting, known["student"], known)
    other._submit(waiting, known["student"], known)
    assert len(store.experiments.page().items) == 2
    store.studies.refuse_part(study.id, "student", "too late")
    assert states(store.studies.get(study.id))["student"] == "submitted"


def test_a_part_that_cannot_be_stored_still_waits(
    store: Store, submit_study: SubmitStudy, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = submit_study(DISTILLATION)

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("service.store.studies.insert_group", killed)
    new = new_study(DISTILLATION).parts[1].experiment
    assert new is not None
    with pytest.raises(KeyboardInterrupt):
        store.studies.submit_part(study.id, "student", new, None)
    assert states(store.studies.get(study.id))["student"] == "waiting"
    assert len(store.experiments.page().items) == 1


def test_cancelling_ends_experiments_and_parts_that_wait(
    store: Store, submit_study: SubmitStudy, parts: StudyParts
) -> None:
    study = submit_study(DISTILLATION)
    cancelled = store.studies.cancel(study.id, actor=Actor("ben"))
    assert states(cancelled) == {"student": "cancelled", "teacher": "submitted", "shared": "cancelled"}
    assert cancelled.parts[0].reason == "cancelled by ben"
    assert cancelled.state is ExperimentState.cancelled
    assert store.experiments.get(experiment_of(study, "teacher")).state is ExperimentState.cancelled
    assert [row.action for row in store.audit.page(actor="ben").items] == [
        "experiment.cancelled",
        "study.cancel",
    ]
    assert store.studies.cancel(study.id) == cancelled
    parts.run_once()
    assert store.studies.get(study.id) == cancelled


def test_lists_have_the_newest_first_and_what_is_visible(store: Store, submit_study: SubmitStudy) -> None:
    first, second = submit_study(DISTILLATION), submit_study(TUNED)
    assert [one.id for one in store.studies.newest(limit=5)] == [second.id, first.id]
    assert [one.id for one in store.studies.newest(limit=1)] == [second.id]
    assert store.studies.newest(limit=5, visible=Visibility(frozenset({"nlp"}))) == []


def test_a_study_with_which_something_is_wrong_holds_up_no_other(
    store: Store,
    submit_study: SubmitStudy,
    finish: Finish,
    parts: StudyParts,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = submit_study(DISTILLATION), submit_study(DISTILLATION)
    for study in (first, second):
        finish(experiment_of(study, "teacher"), lambda point, seed: 0.9)
    submit_part = store.studies.submit_part

    def broken(study_id: int, *more: Any) -> Any:
        if study_id == first.id:
            raise RuntimeError("a mistake of ours")
        return submit_part(study_id, *more)

    monkeypatch.setattr(store.studies, "submit_part", broken)
    parts.run_once()
    assert states(store.studies.get(first.id))["student"] == "waiting"
    assert states(store.studies.get(second.id))["student"] == "submitted"
    assert f"study {first.id}: its parts could not be judged" in caplog.text
