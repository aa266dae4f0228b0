"""Experiments come in whole or not at all, once for each idempotency key."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import attrgetter

import pytest
import sqlalchemy as sa

from service.db.errors import IdempotencyMismatch
from service.domain.states import ExperimentState, RunState
from service.store import Conflict, Keyed, NewExperiment, NotFound, Store, body_sha256
from tests.conformance.building import Submit, count, plans_of, remove_deleted


def test_submission_stores_experiment_runs_specs_and_event(store: Store) -> None:
    spec, plans, _ = plans_of(
        2, search={"axes": {"precision": ["fp32", "bf16"], "batch.global_size": [8, 16]}}
    )
    experiment, created = store.submissions.submit(
        NewExperiment(spec, plans, spec_text="# mine\n", owner="ada")
    )

    assert created
    assert experiment == store.experiments.get(experiment.id)
    assert (experiment.state, experiment.run_count, experiment.owner) == (ExperimentState.queued, 8, "ada")
    assert store.experiments.spec(experiment.id) == ("# mine\n", spec.canonical_json())
    runs = store.runs.page(experiment_id=experiment.id).items
    assert [run.index for run in runs] == list(range(8))
    assert [run.point for run in runs] == [plan.point for plan in plans]
    assert {(run.precision, run.global_batch_size) for run in runs} == {
        ("fp32", 8), ("fp32", 16), ("bf16", 8), ("bf16", 16),
    }  # fmt: skip
    assert [store.runs.config(run.id) for run in runs] == [plan.spec.canonical_json() for plan in plans]
    assert store.experiments.run_counts(experiment.id)[RunState.queued] == 8
    assert [event.kind for event in store.experiments.events(experiment.id)] == ["experiment.submitted"]


def test_same_key_and_body_replays(store: Store, submit: Submit) -> None:
    first = submit(2, key="k")
    spec, plans, text = plans_of(2)
    again, created = store.submissions.submit(
        NewExperiment(spec, plans, spec_text=text, owner="ada", idempotency_key="k")
    )
    assert (again, created) == (first, False)
    assert count(store, "runs") == 2


def test_same_key_and_other_body_is_refused_and_stores_nothing(store: Store, submit: Submit) -> None:
    submit(2, key="k")
    with pytest.raises(IdempotencyMismatch, match="'k'"):
        submit(3, key="k")
    assert (count(store, "experiments"), count(store, "runs")) == (1, 2)


def test_keys_of_two_owners_are_apart(submit: Submit) -> None:
    assert submit(1, key="k", owner="ada").id != submit(1, key="k", owner="bob").id


def test_concurrent_replays_of_one_key_create_one(store: Store) -> None:
    spec, plans, text = plans_of(1)
    barrier = threading.Barrier(8)

    def call(_: int) -> tuple[int, bool]:
        barrier.wait()
        experiment, created = store.submissions.submit(
            NewExperiment(spec, plans, spec_text=text, owner="a", idempotency_key="k")
        )
        return experiment.id, created

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(call, range(8)))
    assert len({id for id, _ in answers}) == 1
    assert sum(created for _, created in answers) == 1
    assert count(store, "experiments") == 1


def test_one_bad_submission_fails_alone(store: Store) -> None:
    spec, plans, text = plans_of(2)
    bad = [plans[0], replace(plans[1], index=0)]
    barrier = threading.Barrier(9)

    def call(number: int) -> bool:
        barrier.wait()
        try:
            store.submissions.submit(
                NewExperiment(spec, bad if number == 4 else plans, spec_text=text, owner="a")
            )
        except sa.exc.IntegrityError:
            return False
        return True

    with ThreadPoolExecutor(9) as pool:
        assert list(pool.map(call, range(9))) == [number != 4 for number in range(9)]
    assert (count(store, "experiments"), count(store, "runs"), count(store, "events")) == (8, 16, 8)


def test_a_submission_that_cannot_become_rows_fails_alone(store: Store) -> None:
    spec, plans, text = plans_of(2)
    good = NewExperiment(spec, plans, text, "ada")
    bad = NewExperiment(spec, [replace(plans[0], cell=["not a hash"])], text, "ada")  # type: ignore[arg-type]
    first, failed, last = store.submissions.submit_many([good, bad, good])
    assert isinstance(failed, TypeError)
    assert isinstance(first, tuple)
    assert isinstance(last, tuple)
    assert (first[1], last[1], count(store, "experiments")) == (True, True, 2)


def test_earlier_answers_are_found_by_key(store: Store, submit: Submit) -> None:
    first = submit(2, key="k")
    _, _, text = plans_of(2)
    same = Keyed("ada", "k", body_sha256(text.encode()))
    other, unknown = replace(same, body_sha256="0"), replace(same, owner="bob")
    replayed, mismatch, new = store.submissions.replays([same, other, unknown])
    assert replayed == first
    assert isinstance(mismatch, IdempotencyMismatch)
    assert new is None
    assert store.submissions.replays([]) == []


def test_the_key_of_a_deleted_experiment_stays_used(store: Store, submit: Submit) -> None:
    first = submit(key="k")
    store.requests.cancel(first.id)
    store.removal.delete(first.id, at_once=True)
    with pytest.raises(Conflict, match=f"'k' was used for experiment {first.id}, which has been deleted"):
        submit(key="k")
    (answer,) = store.submissions.replays([Keyed("ada", "k", body_sha256(plans_of(1)[2].encode()))])
    assert isinstance(answer, Conflict)
    remove_deleted(store)
    assert count(store, "experiments") == 0


def test_ids_of_deleted_experiments_are_not_given_again(store: Store, submit: Submit) -> None:
    first = submit()
    store.requests.cancel(first.id)
    store.removal.delete(first.id, at_once=True)
    assert submit().id > first.id


def test_text_that_databases_refuse_is_made_storable(store: Store) -> None:
    spec, plans, _ = plans_of(1)
    experiment, _ = store.submissions.submit(
        NewExperiment(spec, plans, spec_text="a\x00b\ud800", owner="a\x00")
    )
    assert store.experiments.get(experiment.id).owner == "a\ufffd"
    assert store.experiments.spec(experiment.id)[0] == "a\ufffdb\ufffd"


@pytest.mark.parametrize("id", [0, -1, 7, 2**63, 10**30])
def test_unknown_ids_are_not_found(store: Store, id: int) -> None:
    reads = (
        "experiments.get experiments.spec experiments.run_counts experiments.events runs.get runs.config "
        "runs.attempts runs.measurements runs.summary runs.logs series.points series.latest_points "
        "accounting.totals accounting.ledger accounting.account requests.cancel requests.pause "
        "requests.resume requests.retry removal.delete requests.cancel_run requests.retry_run"
    )
    for read in reads.split():
        with pytest.raises(NotFound):
            attrgetter(read)(store)(id)
    with pytest.raises(NotFound):
        store.runs.page(experiment_id=id)
