"""Live streams against a real server: gapless, resumable, cheap for those who leave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from api.stream import MAX_POINTS, Place, RunSource, Streams
from service.domain.records import LogLine
from service.store import RecordBatch, Store, StoreUnavailable
from tests.api.conftest import Driver, wait_until

Event = tuple[str, str | None, Any]


def events(answer: httpx.Response) -> Iterator[Event]:
    """Server-sent events as (name, id, data)."""
    name, id, data = "message", None, ""
    for line in answer.iter_lines():
        if not line and data:
            yield name, id, json.loads(data)
            name, id, data = "message", None, ""
        elif line.startswith("event: "):
            name = line[7:]
        elif line.startswith("id: "):
            id = line[4:]
        elif line.startswith("data: "):
            data += line[6:]


@contextmanager
def following(http: httpx.Client, path: str, last_id: str | None = None) -> Iterator[Iterator[Event]]:
    headers = {"Last-Event-ID": last_id} if last_id else {}
    with http.stream("GET", f"/api/v1{path}", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield events(answer)


@pytest.fixture
def fast(app: FastAPI) -> Streams:
    """Streams that poll often."""
    streams: Streams = app.state.streams
    streams._interval_s = 0.05
    return streams


def test_events_are_numbered_without_gaps_until_the_end(
    fast: Streams, http: httpx.Client, driver: Driver
) -> None:
    experiment = driver.submit(seeds=[0, 1, 2])

    def drive() -> None:
        runs = driver.start(experiment)
        for run in runs:
            driver.report(run, "loss", [1], [0.5])
            time.sleep(0.03)
        driver.finish(experiment, runs)

    thread = threading.Thread(target=drive)
    with following(http, f"/experiments/{experiment.id}/stream") as stream:
        first = next(stream)
        thread.start()
        seen = [first, *stream]
    thread.join()
    numbers = [int(id) for name, id, _ in seen if name == "event" and id is not None]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) == len(driver.store.experiments.events(experiment.id))
    name, _, last = seen[-1]
    assert (name, last["state"], last["run_states"]) == ("end", "succeeded", {"succeeded": 3})
    assert {data["run"]["id"] for name, _, data in seen if name == "run"} == {
        run.id for run in driver.store.runs.page(experiment_id=experiment.id).items
    }


def test_a_reconnect_goes_on_after_the_last_event(fast: Streams, http: httpx.Client, driver: Driver) -> None:
    experiment = driver.submit(seeds=[0, 1])
    driver.finish(experiment, driver.start(experiment))
    with following(http, f"/experiments/{experiment.id}/stream") as stream:
        whole = [id for name, id, _ in stream if name == "event"]
    with following(http, f"/experiments/{experiment.id}/stream", last_id=whole[2]) as stream:
        assert [id for name, id, _ in stream if name == "event"] == whole[3:]


def test_a_late_follower_reads_events_that_the_shared_poll_no_longer_keeps(
    fast: Streams, http: httpx.Client, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.feeds._KEPT_BYTES", 2)
    monkeypatch.setattr("api.stream._EVENTS_PER_READ", 3)
    experiment = driver.submit(seeds=[0, 1, 2])
    driver.finish(experiment, driver.start(experiment))
    with following(http, f"/experiments/{experiment.id}/stream") as stream:
        numbers = [int(id or 0) for name, id, _ in stream if name == "event"]
    assert numbers == [event.number for event in driver.store.experiments.events(experiment.id)]


@pytest.mark.parametrize("last_id", ["x", "-1", "1" * 30, "1-2"])
def test_a_foreign_last_event_id_is_refused(http: httpx.Client, driver: Driver, last_id: str) -> None:
    experiment = driver.submit()
    for path in (f"/experiments/{experiment.id}/stream", "/runs/1/stream"):
        answer = http.get(f"/api/v1{path}", headers={"Last-Event-ID": last_id})
        assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-parameter")


def test_a_point_is_visible_within_two_seconds(http: httpx.Client, driver: Driver) -> None:
    experiment = driver.submit()
    (run,) = driver.start(experiment)
    with following(http, f"/experiments/{experiment.id}/stream") as stream:
        next(stream)
        reported = time.monotonic()
        driver.report(run, "loss", [7], [0.25])
        for name, _, data in stream:
            if name == "run" and data["latest"].get("loss"):
                break
    assert data["latest"]["loss"] == {"step": 7, "value": 0.25}
    assert time.monotonic() - reported < 2.0


def test_a_run_streams_points_and_lines_to_its_end(fast: Streams, http: httpx.Client, driver: Driver) -> None:
    experiment = driver.submit()
    (run,) = driver.start(experiment)
    driver.report(run, "loss", [1, 2], [0.5, float("nan")])
    with following(http, f"/runs/{run.id}/stream") as stream:
        seen = [next(stream), next(stream)]
        driver.store.recording.record(RecordBatch(logs=[LogLine(run.id, 1, 1, 0.0, "info", "half\nway")]))
        driver.report(run, "loss", [3], [0.1])
        seen += [next(stream), next(stream)]
        driver.report(run, "accuracy", [3], [0.9])
        driver.finish(experiment, [run])
        seen += list(stream)
    values = {}
    for name, _, data in seen:
        if name == "points":
            for metric, series in data.items():
                for step, value in zip(series["steps"], series["values"], strict=True):
                    assert (metric, step) not in values, "sent once"
                    values[metric, step] = value
    assert values == {("loss", 1): 0.5, ("loss", 2): "NaN", ("loss", 3): 0.1, ("accuracy", 3): 0.9}
    assert [data["message"] for name, _, data in seen if name == "log"] == ["half\nway"]
    assert (seen[-1][0], seen[-1][2]["run"]["state"]) == ("end", "succeeded")


def test_a_reader_that_has_the_rest_gets_what_comes_next(
    fast: Streams, http: httpx.Client, driver: Driver
) -> None:
    (run,) = driver.start(driver.submit())
    driver.report(run, "loss", [1, 2], [0.5, 0.4])
    driver.store.recording.record(RecordBatch(logs=[LogLine(run.id, 1, 1, 0.0, "info", "before")]))
    with following(http, f"/runs/{run.id}/stream?now=true") as stream:
        first, last_id, data = next(stream)
        assert (first, data["latest"]["loss"]["step"]) == ("run", 2)
        driver.store.recording.record(RecordBatch(logs=[LogLine(run.id, 1, 2, 0.0, "info", "after")]))
        assert next(data["message"] for name, _, data in stream if name == "log") == "after"
    with following(http, f"/runs/{run.id}/stream?now=true", last_id=last_id) as stream:
        # A reconnect continues from where it was, whatever the address says.
        assert next(data["message"] for name, _, data in stream if name == "log") == "after"


def test_a_run_stream_goes_on_where_it_broke_off(fast: Streams, http: httpx.Client, driver: Driver) -> None:
    (run,) = driver.start(driver.submit())
    driver.report(run, "loss", [1, 2, 3], [0.5, 0.4, 0.3])
    with following(http, f"/runs/{run.id}/stream") as stream:
        last_id = next(id for name, id, _ in stream if name == "points")
    driver.report(run, "loss", [4], [0.2])
    driver.report(run, "accuracy", [3], [0.9])
    steps: dict[str, list[int]] = {"loss": [], "accuracy": []}
    with following(http, f"/runs/{run.id}/stream", last_id=last_id) as stream:
        # The poll of the connection before may still go on, with a snapshot from before the reports.
        for points in (data for name, _, data in stream if name == "points"):
            for metric, series in points.items():
                steps[metric] += series["steps"]
            if steps["accuracy"] and 4 in steps["loss"]:
                break
    assert steps == {"loss": [3, 4], "accuracy": [3]}, "at most the last step again"


def test_a_new_attempt_sends_again_what_it_does_again(
    fast: Streams, http: httpx.Client, driver: Driver
) -> None:
    from service.domain.states import RunState
    from trainers.errors import FailureClass

    (run,) = driver.start(driver.submit())
    driver.report(run, "loss", [1, 2, 3, 4], [0.5, 0.4, 0.3, 0.2])
    with following(http, f"/runs/{run.id}/stream") as stream:
        next(stream for name, _, _ in stream if name == "points")
        driver.store.attempts.finish_run(
            run.id, 1, RunState.queued, failure=(FailureClass.lost, "gone"), retry_delay_s=0.0
        )
        attempt = driver.store.attempts.open(run.id, 1)
        driver.store.attempts.run_started(run.id, attempt, total_steps=100, resumed_from_step=2, facts={})
        driver.report(driver.store.runs.get(run.id), "loss", [3], [0.35])
        data = next(data for name, _, data in stream if name == "points")
    assert (data["loss"]["steps"], data["loss"]["values"]) == ([3], [0.35])


def test_followers_share_one_poll_and_take_it_with_them(
    fast: Streams, url: str, driver: Driver, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = driver.submit()
    polls = 0
    read = store.experiments.run_counts

    def counted(id: int) -> Any:
        nonlocal polls
        polls += 1
        return read(id)

    monkeypatch.setattr(store.experiments, "run_counts", counted)
    fast._interval_s = 0.2
    clients = [httpx.Client(base_url=url, trust_env=False) for _ in range(5)]
    contexts = [following(client, f"/experiments/{experiment.id}/stream") for client in clients]
    streams = [context.__enter__() for context in contexts]
    for stream in streams:
        next(stream)
    assert fast.polls == 1
    polls, before = 0, time.monotonic()
    time.sleep(1.0)
    assert polls <= (time.monotonic() - before) / 0.2 + 2
    for context, client in zip(contexts, clients, strict=True):
        context.__exit__(None, None, None)
        client.close()
    wait_until(lambda: fast.polls == 0)


def test_a_stream_of_a_deleted_experiment_ends(fast: Streams, http: httpx.Client, driver: Driver) -> None:
    experiment = driver.submit()
    with following(http, f"/experiments/{experiment.id}/stream") as stream:
        next(stream)
        driver.store.requests.cancel(experiment.id)
        driver.store.removal.delete(experiment.id)
        list(stream)


def test_streams_outlive_a_store_that_is_away_for_a_while(
    fast: Streams, http: httpx.Client, driver: Driver, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = driver.submit()
    real = store.experiments.get
    with following(http, f"/experiments/{experiment.id}/stream") as stream:
        next(stream)
        monkeypatch.setattr(store.experiments, "get", unavailable)
        time.sleep(0.2)
        monkeypatch.setattr(store.experiments, "get", real)
        store.requests.cancel(experiment.id)
        assert [name for name, _, _ in stream][-1] == "end"


def test_followers_of_a_run_share_what_is_read(
    fast: Streams, url: str, driver: Driver, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = driver.submit()
    (run,) = driver.start(experiment)
    reads: list[str] = []
    for part, name in ((store.runs, "logs"), (store.series, "sampled_points")):
        real = getattr(part, name)

        def counted(*arguments: Any, _name: str = name, _real: Any = real, **named: Any) -> Any:
            reads.append(_name)
            return _real(*arguments, **named)

        monkeypatch.setattr(part, name, counted)
    clients = [httpx.Client(base_url=url, trust_env=False) for _ in range(10)]
    contexts = [following(client, f"/runs/{run.id}/stream") for client in clients]
    streams = [context.__enter__() for context in contexts]
    for stream in streams:
        next(stream)
    reads.clear()
    driver.report(run, "loss", [1], [0.5])
    for stream in streams:
        assert next(stream)[0] == "run"
        assert next(stream)[0] == "points"
    assert reads.count("sampled_points") == 1
    driver.finish(experiment, [run])
    for stream, context, client in zip(streams, contexts, clients, strict=True):
        assert [name for name, _, _ in stream][-1] == "end"
        context.__exit__(None, None, None)
        client.close()


@pytest.mark.parametrize(
    ("part", "broken"), [("experiments", "get"), ("runs", "page"), ("series", "latest_points")]
)
def test_a_stream_whose_poll_fails_ends_and_the_next_one_works(
    fast: Streams,
    http: httpx.Client,
    driver: Driver,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    broken: str,
) -> None:
    experiment = driver.submit()
    driver.start(experiment)
    real = getattr(getattr(store, part), broken)

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("unforeseen")

    path = f"/experiments/{experiment.id}/stream"
    with following(http, path) as stream:
        next(stream)
        monkeypatch.setattr(getattr(store, part), broken, fail)
        assert "end" not in [name for name, _, _ in stream], "it ends, and the experiment has not"
    monkeypatch.setattr(getattr(store, part), broken, real)
    with following(http, path) as stream:
        assert next(stream)[0] == "event"


def test_a_metric_that_is_read_late_is_not_left_out(driver: Driver, store: Store) -> None:
    (run,) = driver.start(driver.submit())
    source = RunSource(store, run.id)
    driver.report(run, "accuracy", [1], [0.5])
    driver.report(run, "loss", list(range(1, 21)), [0.5] * 20)
    state, _ = source.poll(None)
    # What the next poll finds of accuracy is far ahead of what it finds of loss.
    driver.report(run, "accuracy", [29], [0.6])
    state, _ = source.poll(state)
    driver.report(run, "loss", list(range(21, 30)), [0.4] * 9)
    _, frames = source.poll(state)
    points = [json.loads(line[6:]) for line in frames.decode().split("\n") if line.startswith("data: ")]
    assert points[-1]["loss"]["steps"] == list(range(21, 30))


def test_a_new_follower_of_a_long_run_gets_a_thinned_history(driver: Driver, store: Store) -> None:
    (run,) = driver.start(driver.submit())
    steps = list(range(1, 3 * MAX_POINTS))
    driver.report(run, "loss", steps, [1.0 / step for step in steps])
    source = RunSource(store, run.id)
    state, _ = source.poll(None)
    frames = b"".join(source.catch_up(Place(), state)).decode()
    points = next(json.loads(line[6:]) for line in frames.split("\n") if line.startswith('data: {"loss"'))
    assert points["loss"]["steps"][0] == 1
    assert points["loss"]["steps"][-1] == steps[-1]
    assert len(points["loss"]["steps"]) <= MAX_POINTS
    assert points["loss"]["bucket_steps"] == 7


def test_a_stream_that_waits_for_the_store_still_gives_signs_of_life(
    fast: Streams, http: httpx.Client, driver: Driver, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.feeds._PING_S", 0.05)
    experiment = driver.submit()
    with http.stream("GET", f"/api/v1/experiments/{experiment.id}/stream") as answer:
        lines = answer.iter_lines()
        next(lines)
        monkeypatch.setattr(store.experiments, "get", unavailable)
        while next(lines) != ": ping":
            pass
        assert fast.polls == 1


def unavailable(_: int) -> Any:
    raise StoreUnavailable("restarting")


def test_closing_ends_every_stream(fast: Streams, http: httpx.Client, driver: Driver) -> None:
    experiment = driver.submit()
    with following(http, f"/experiments/{experiment.id}/stream") as stream:
        next(stream)
        fast.close()
        assert [name for name, _, _ in stream if name == "end"] == []
