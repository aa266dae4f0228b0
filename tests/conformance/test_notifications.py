"""Who is told what, and that it is told once, on both databases."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import Connection

from service import studies
from service.config.settings import Settings
from service.db import schema
from service.domain.events import EventKind, Topic
from service.domain.notifications import BUDGET_WARNED, DeliveryState
from service.domain.process_metrics import series_of
from service.domain.records import Experiment, Run
from service.domain.states import ExperimentState, RunState
from service.scheduling.queue import Queue
from service.specs.experiment import validate
from service.store import NewExperiment, Store
from service.store.base import NewEvent, announce
from service.studies import UndecidedEnds
from tests.conformance.building import Submit, count
from trainers.errors import FailureClass

URL = "https://hooks.example.com/"


def told(store: Store, *topics: Topic, owner: str = "ada", project: str | None = None) -> int:
    return store.notifications.subscribe(owner, "webhook", URL, topics, project=project).id


def kinds(store: Store) -> list[str]:
    return sorted(entry.kind for entry in store.notifications.deliveries())


def in_threads(settings: Settings, number: int, work: Callable[[Store], Any]) -> list[Any]:
    """What `work` returns in several threads at once, each with a store of its own."""
    results: list[Any] = []
    barrier = threading.Barrier(number)

    def run() -> None:
        with closing(Store.open(settings)) as store:
            barrier.wait()
            results.append(work(store))

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("state", [ExperimentState.failed, ExperimentState.incomplete])
def test_a_failure_is_an_end_and_is_told_once(
    store: Store, running: Callable[..., tuple[Experiment, list[Run]]], state: ExperimentState
) -> None:
    told(store, Topic.end, Topic.failure)
    experiment, _ = running()
    failure = (FailureClass.bug, "wrong") if state is ExperimentState.failed else None
    store.drivers.finish_experiment(experiment.id, experiment.attempt, state, failure=failure)
    assert store.notifications.address() == 1
    assert store.notifications.address() == 0
    assert kinds(store) == [f"experiment.{state}"]


DECIDED = {"fp32": (2.0, 2.1, 2.05), "bf16": (1.0, 1.1, 1.05)}
CLOSE = {"fp32": (1.0, 2.1, 3.05), "bf16": (2.9, 1.1, 1.95)}


def ended(store: Store, queue: Queue, costs: dict[str, tuple[float, ...]]) -> Experiment:
    """An experiment whose runs cost so much, by precision and seed."""
    spec = validate(
        {
            "name": "close",
            "task": {"name": "imdb"},
            "search": {"axes": {"precision": list(costs)}},
            "seeds": [0, 1, 2],
        }
    )
    new = NewExperiment(spec, list(spec.runs()), spec_text="", owner="ada")
    experiment, _ = store.submissions.submit(new)
    (claimed,) = queue.claim("s1", lease_s=30)
    store.drivers.started(experiment.id, claimed.attempt, "node", 1)
    for run in store.runs.all_of(experiment.id):
        attempt = store.attempts.open(run.id, claimed.attempt)
        store.attempts.run_started(run.id, attempt, total_steps=9, resumed_from_step=0, facts={})
        summary = {"cost_usd": costs[str(run.point["precision"])][run.seed], "accuracy": 0.9}
        summary |= {"headline": "accuracy", "score": 0.9}
        store.attempts.finish_run(run.id, attempt, RunState.succeeded, summary=summary)
    store.drivers.finish_experiment(experiment.id, claimed.attempt, ExperimentState.succeeded)
    return experiment


@pytest.mark.parametrize(
    ("costs", "messages"), [(DECIDED, []), (CLOSE, ["experiment.undecided"])], ids=["decided", "undecided"]
)
def test_an_end_without_a_proven_winner_is_told_once(
    store: Store, queue: Queue, costs: dict[str, tuple[float, ...]], messages: list[str]
) -> None:
    told(store, Topic.undecided)
    ended(store, queue, costs)
    for _ in range(2):  # As after a restart, or by two schedulers.
        UndecidedEnds(store).run_once()
    store.notifications.address()
    assert kinds(store) == messages


def test_an_end_that_cannot_be_judged_holds_up_no_other(
    store: Store, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(store, Topic.undecided)
    ended(store, queue, CLOSE)
    broken = ended(store, queue, CLOSE)
    judge = studies.verdict

    def fails_once(store: Store, one: Experiment) -> str | None:
        if one.id == broken.id:
            raise ZeroDivisionError
        return judge(store, one)

    monkeypatch.setattr(studies, "verdict", fails_once)
    UndecidedEnds(store).run_once()
    store.notifications.address()
    assert kinds(store) == ["experiment.undecided"]


def test_a_preempted_run_is_told_and_counted(
    store: Store, training: Callable[..., tuple[Experiment, Run, int]]
) -> None:
    told(store, Topic.preemption)
    _, run, attempt = training()
    failure = (FailureClass.preempted, "2 devices go to experiment 7")
    store.attempts.finish_run(run.id, attempt, RunState.failed, failure=failure, retry_delay_s=0.0)
    store.notifications.address()
    (taken,) = store.notifications.take_deliveries(1, 60.0)
    message = json.loads(taken.body)
    assert (message["type"], message["data"]["run"]) == ("run.preempted", run.id)
    assert "2 devices go to experiment 7" in message["data"]["message"]
    (counted,) = series_of(store.process_metrics.figures())
    assert (counted.info.name, counted.labels, counted.value) == (
        "stillhouse_preemptions_total", {"project": "default"}, 1.0,
    )  # fmt: skip


def test_a_notice_exists_only_if_its_event_does(store: Store, submit: Submit) -> None:
    experiment = submit()

    def body(connection: Connection) -> None:
        announce(connection, experiment.id, [NewEvent(EventKind.experiment_failed, "x")], 1.0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        store.database.write(body)
    assert count(store, "notices") == 0


def test_a_subscription_is_told_of_nothing_older_than_itself(store: Store, submit: Submit) -> None:
    store.requests.cancel(submit().id)
    told(store, Topic.end)
    later = submit()
    store.requests.cancel(later.id)
    assert store.notifications.address() == 2, "no scheduler had looked yet"
    (sent,) = store.notifications.take_deliveries(10, 60.0)
    assert json.loads(sent.body)["data"]["experiment"]["id"] == later.id


def test_schedulers_address_each_notice_once(store: Store, submit: Submit, settings: Settings) -> None:
    told(store, Topic.end)
    for _ in range(30):
        store.requests.cancel(submit().id)
    in_threads(settings, 3, lambda each: each.notifications.address())
    store.notifications.address()  # What a thread found locked is left to the next round.
    assert count(store, "deliveries") == 30


def test_schedulers_take_each_delivery_once(store: Store, submit: Submit, settings: Settings) -> None:
    told(store, Topic.end)
    for _ in range(30):
        store.requests.cancel(submit().id)
    store.notifications.address()
    taken = in_threads(
        settings, 3, lambda each: [one.id for one in each.notifications.take_deliveries(20, 60.0)]
    )
    taken.append([one.id for one in store.notifications.take_deliveries(30, 60.0)])
    ids = [id for each in taken for id in each]
    assert len(ids) == len(set(ids)) == 30


def test_what_a_dead_scheduler_took_is_taken_again_later(store: Store, submit: Submit) -> None:
    now = 1000.0
    store.clocks.simulated = lambda: now
    told(store, Topic.end)
    store.requests.cancel(submit().id)
    store.notifications.address()
    (first,) = store.notifications.take_deliveries(10, 60.0)
    now += 59.0
    assert not store.notifications.take_deliveries(10, 60.0)
    now += 2.0
    (second,) = store.notifications.take_deliveries(10, 60.0)
    assert (second.id, second.attempt, second.message_id) == (first.id, 2, first.message_id)
    store.notifications.not_delivered(
        first, "too late", None
    )  # The first was only slow: its word no longer counts.
    assert store.notifications.deliveries()[0].state is DeliveryState.pending
    store.notifications.delivered(second, "204")
    assert store.notifications.deliveries()[0].state is DeliveryState.delivered


def test_a_budget_is_told_once_to_its_project(store: Store) -> None:
    told(store, Topic.budget, project="default")
    told(store, Topic.budget, owner="bob", project="default")
    told(store, Topic.end, project="default")
    key = "budget:default:2026-11:usd:80"
    assert store.notifications.notice(key, BUDGET_WARNED, "default", "80% is used", {"usd": 80.0})
    assert not store.notifications.notice(key, BUDGET_WARNED, "default", "80% is used", {"usd": 80.0})
    store.notifications.address()
    assert kinds(store) == [BUDGET_WARNED, BUDGET_WARNED]


def test_a_project_is_told_of_everyones_experiments_and_a_user_of_their_own(
    store: Store, submit: Submit
) -> None:
    by_project = told(store, Topic.end, owner="bob", project="default")
    by_user = told(store, Topic.end, owner="bob")
    store.requests.cancel(submit(owner="ada").id)
    store.requests.cancel(submit(owner="bob").id)
    store.notifications.address()
    assert len(store.notifications.deliveries(subscription_id=by_project)) == 2
    assert len(store.notifications.deliveries(subscription_id=by_user)) == 1


def people(connection: Connection) -> None:
    user = {"kind": "person", "administrator": False, "created_s": 1.0}
    connection.execute(
        sa.insert(schema.users),
        [
            {**user, "name": "member", "disabled_s": None},
            {**user, "name": "left", "disabled_s": None},
            {**user, "name": "disabled", "disabled_s": 2.0},
            {**user, "name": "root", "administrator": True, "disabled_s": None},
        ],
    )
    connection.execute(
        sa.insert(schema.projects),
        [
            {
                "name": "closed",
                "title": "",
                "visible_to_all": False,
                "notes": "",
                "created_s": 1.0,
                "settings": {},
            }
        ],
    )
    connection.execute(
        sa.insert(schema.members),
        [{"project": "closed", "user": name, "role": "viewer"} for name in ("member", "disabled")],
    )


def test_only_those_who_see_a_project_are_told_of_it(store: Store) -> None:
    store.database.write(people)
    ids = {
        name: told(store, Topic.budget, owner=name, project="closed")
        for name in ("member", "left", "disabled", "root")
    }
    store.notifications.notice("k", BUDGET_WARNED, "closed", "80% is used", {})
    store.notifications.address()
    assert {entry.subscription_id for entry in store.notifications.deliveries()} == {
        ids["member"],
        ids["root"],
    }
    assert not store.notifications.sees_project("left", "closed")
    assert store.notifications.sees_project("member", "closed")
    assert not store.notifications.sees_project("root", "nowhere")


def test_a_subscription_goes_with_its_messages(store: Store, submit: Submit) -> None:
    id = told(store, Topic.end)
    store.requests.cancel(submit().id)
    store.notifications.address()
    store.notifications.unsubscribe(id)
    assert not store.notifications.take_deliveries(10, 60.0)
    assert count(store, "deliveries") == 0


def test_the_log_is_kept_for_a_while(store: Store, submit: Submit) -> None:
    now = 1000.0
    store.clocks.simulated = lambda: now
    told(store, Topic.end)
    store.requests.cancel(submit().id)
    store.notifications.address()
    (taken,) = store.notifications.take_deliveries(1, 60.0)
    store.notifications.delivered(taken, "204")
    store.notifications.forget_deliveries(100.0)
    assert count(store, "deliveries") == 1
    now += 101.0
    store.notifications.forget_deliveries(100.0)
    assert count(store, "deliveries") == count(store, "notices") == 0
