"""The stream of all changes: what each reader sees, from one read of the database for all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from api.changes import ChangesSource
from api.stream import Streams
from service.config.settings import Settings
from service.db import schema
from service.domain.access import EVERYTHING, Role, Visibility
from service.domain.states import ExperimentState
from service.scheduling.cluster import ClusterSnapshot
from service.scheduling.queue import Queue
from service.store import Store
from tests.api.access_table import FIRST_TOKEN, headers_of, insert, populate
from tests.api.conftest import Driver, wait_until
from tests.api.test_stream import Event, following
from tests.serving import serving

STREAM = "/stream"


@pytest.fixture
def fast(app: FastAPI) -> Streams:
    """Streams that poll often."""
    streams: Streams = app.state.streams
    streams._interval_s = 0.05
    return streams


@pytest.fixture
def source(store: Store) -> ChangesSource:
    return ChangesSource(store, Queue(store))


def of_kind(stream: Iterator[Event], kind: str) -> Any:
    """Data of the next event of a kind."""
    return next(data for name, _, data in stream if name == kind)


def sent(frames: Any, visible: Visibility = EVERYTHING) -> list[str]:
    """Names of the events that a reader is sent."""
    lines = frames.seen_by(visible).decode().split("\n")
    return [line[7:] for line in lines if line.startswith("event: ")]


def test_a_life_is_followed_from_submission_to_deletion(
    fast: Streams, http: httpx.Client, driver: Driver
) -> None:
    with following(http, STREAM) as stream:
        experiment = driver.submit(seeds=[0, 1])
        one = of_kind(stream, "experiment")
        assert (one["id"], one["state"], one["run_states"]) == (experiment.id, "queued", {"queued": 2})
        assert one["cost"] == {"so_far_usd": 0.0, "rest_usd": None}
        assert of_kind(stream, "queue") == {"waiting": 1, "active": 0}
        runs = driver.start(experiment)
        while of_kind(stream, "experiment")["run_states"] != {"running": 2}:
            pass
        driver.finish(experiment, runs)
        while of_kind(stream, "experiment")["state"] != "succeeded":
            pass
        driver.store.removal.delete(experiment.id)
        assert of_kind(stream, "deleted") == {"id": experiment.id}
        driver.store.removal.restore(experiment.id)
        assert of_kind(stream, "experiment")["id"] == experiment.id


def test_what_was_submitted_before_the_stream_began_is_not_missed(
    fast: Streams, http: httpx.Client, driver: Driver
) -> None:
    experiment = driver.submit()
    with following(http, STREAM) as stream:
        assert of_kind(stream, "experiment")["id"] == experiment.id
        assert of_kind(stream, "queue") == {"waiting": 1, "active": 0}


def test_what_nothing_led_up_to_begins_with_a_place_alone(source: ChangesSource) -> None:
    snapshot, _ = source.poll(None)
    assert [sent(frames) for frames in source.catch_up(None, snapshot)] == [[]]


def test_a_reconnect_is_sent_what_changed_meanwhile(
    fast: Streams, http: httpx.Client, driver: Driver
) -> None:
    first = driver.submit()
    with http.stream("GET", "/api/v1/stream") as answer:
        last_id = next(line[4:] for line in answer.iter_lines() if line.startswith("id: "))
    second = driver.submit(name="meanwhile")
    with following(http, STREAM, last_id) as stream:
        while of_kind(stream, "experiment")["id"] != second.id:
            pass
        assert of_kind(stream, "queue")["waiting"] == 2
        driver.store.requests.cancel(first.id)
        while of_kind(stream, "experiment")["state"] != "cancelled":  # What caught up may be sent once more.
            pass


@pytest.mark.parametrize("last_id", ["x", "-1", "1-2-3"])
def test_a_foreign_last_event_id_is_refused(http: httpx.Client, last_id: str) -> None:
    answer = http.get("/api/v1/stream", headers={"Last-Event-ID": last_id})
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-parameter")


def test_followers_of_different_projects_share_one_read(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from api.app import create_app

    app = create_app(settings.model_copy(update={"token": SecretStr(FIRST_TOKEN)}))
    world = populate(app.state.store)
    app.state.streams._interval_s = 0.05
    reads = []
    real = world.store.experiments.followed

    def counted(ids: Any) -> Any:
        if ids:
            reads.append(list(ids))
        return real(ids)

    with serving(app) as url, ExitStack() as stack:
        streams = {}
        for name in ("owner", "maintainer", "other", "administrator"):
            client = stack.enter_context(client_of(url, name))
            answer = stack.enter_context(client.stream("GET", "/api/v1/stream"))
            lines = answer.iter_lines()
            next(line for line in lines if line.startswith("id: "))  # From here on it is sent what changes.
            streams[name] = lines
        assert app.state.streams.polls == 1
        monkeypatch.setattr(world.store.experiments, "followed", counted)
        hidden, _ = world.submit()
        frames = {name: until_place(lines) for name, lines in streams.items()}
        assert reads == [[hidden]]
        for name in ("owner", "maintainer", "administrator"):
            assert f'"id":{hidden},' in frames[name]
        assert frames["other"].split()[:2] == ["event:", "queue"], "nothing of the experiment"
        assert "theirs" not in frames["other"]
    wait_until(lambda: app.state.streams.polls == 0)


def client_of(url: str, name: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers=headers_of(name), timeout=30.0, trust_env=False)


def until_place(lines: Iterator[str]) -> str:
    """What is sent up to the next id."""
    seen = []
    for line in lines:
        seen.append(line)
        if line.startswith("id: "):
            return "\n".join(seen)
    raise AssertionError("the stream ended")


def test_a_reader_who_loses_a_project_is_sent_away(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from api.app import create_app

    monkeypatch.setattr("api.access.RECHECK_S", 0.0)
    monkeypatch.setattr("api.feeds._PING_S", 0.05)
    app = create_app(settings.model_copy(update={"token": SecretStr(FIRST_TOKEN)}))
    world = populate(app.state.store)
    with (
        serving(app) as url,
        client_of(url, "viewer") as client,
        client.stream("GET", "/api/v1/stream") as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        insert(world.store, schema.members, [{"project": "vision", "user": "viewer", "role": Role.viewer}])
        list(lines)  # It ends; a browser connects again, with what it sees now.


def test_more_than_is_sent_one_by_one_asks_for_the_lists_again(
    source: ChangesSource, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.changes.MOST_CHANGES", 2)
    snapshot, _ = source.poll(None)
    for _ in range(3):
        driver.submit()
    after, frames = source.poll(snapshot)
    assert sent(frames) == ["many", "queue"]
    assert [sent(frames) for frames in source.catch_up(snapshot.place, after)] == [["many", "queue"]]
    _, frames = source.poll(after)
    assert sent(frames) == []


def test_a_change_that_is_committed_late_is_sent(source: ChangesSource, driver: Driver) -> None:
    from sqlalchemy import update

    snapshot, _ = source.poll(None)
    experiment = driver.submit()
    # As if its transaction had begun before the last poll.
    earlier = update(schema.experiments).values(changed_s=snapshot.place - 5.0)
    driver.store.database.write(lambda connection: connection.execute(earlier))
    after, frames = source.poll(snapshot)
    assert sent(frames) == ["experiment", "queue"]
    assert f'"id":{experiment.id},' in frames.seen_by(EVERYTHING).decode()
    assert sent(source.poll(after)[1]) == [], "it is sent once"


def test_costs_and_clusters_are_looked_at_slowly(
    source: ChangesSource, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = driver.submit()
    driver.start(experiment)
    snapshot, _ = source.poll(None)
    source.queue.put_cluster(ClusterSnapshot(time.time(), True, None, ()))
    snapshot, frames = source.poll(snapshot)
    assert sent(frames) == []
    monkeypatch.setattr("api.changes.SLOWLY_S", 0.0)
    snapshot, frames = source.poll(snapshot)
    assert sent(frames) == ["costs", "queue"]
    assert sent(frames, Visibility(frozenset({"other"}))) == ["queue"]
    # The same devices, seen again: nothing that the page of the queue would show differently.
    source.queue.put_cluster(ClusterSnapshot(time.time(), True, None, ()))
    assert "queue" not in sent(source.poll(snapshot)[1])


def test_what_leaves_the_order_as_it_is_does_not_announce_the_queue(
    source: ChangesSource, driver: Driver
) -> None:
    experiment = driver.submit()
    driver.store.requests.tag(experiment.id, add=["baseline"])
    snapshot, _ = source.poll(None)
    driver.store.requests.set_priority(experiment.id, 60)
    snapshot, frames = source.poll(snapshot)
    assert sent(frames) == ["experiment", "queue"]
    driver.store.requests.annotate(experiment.id, "a note")
    snapshot, frames = source.poll(snapshot)
    assert sent(frames) == ["experiment"]
    driver.store.requests.cancel(experiment.id)
    assert driver.store.experiments.get(experiment.id).state is ExperimentState.cancelled
    assert sent(source.poll(snapshot)[1]) == ["experiment", "queue"]
