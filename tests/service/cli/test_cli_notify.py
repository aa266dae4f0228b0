"""`stillhouse notify` against a real API, with messages that a courier really delivers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.cli.terminal import ExitCode
from service.notifications.courier import Courier
from tests.service.cli.conftest import running
from tests.service.cli.house import House
from tests.service.notifications.receivers import http_receiver


@pytest.fixture
def house(tmp_path: Path, sqlite_template: Path) -> Iterator[House]:
    with running(tmp_path, sqlite_template, webhook_hosts="127.0.0.1") as found:
        yield found


def test_from_subscription_to_delivery(house: House) -> None:
    with http_receiver() as receiver:
        made = house.run("notify", "add", "webhook", receiver.url, "--on", "end", "--on", "failure")
        assert made.exit_code == 0, made.output
        assert "secret: whsec_" in made.stdout
        experiment = house.submitted()
        house.run("cancel", str(experiment))
        Courier(house.store, house.settings).run_once()
        assert len(receiver.requests) == 1
    (listed,) = house.json("notify", "list")
    assert (listed["topics"], listed["project"]) == (["end", "failure"], None)
    assert "secret" not in listed
    log = house.run("notify", "log", width=160)
    assert "experiment.cancelled" in log.stdout
    assert "delivered" in log.stdout
    assert house.run("notify", "remove", str(listed["id"])).exit_code == 0
    assert house.json("notify", "list") == []
    assert house.run("notify", "remove", str(listed["id"])).exit_code == ExitCode.not_found


def test_a_test_message_waits_for_its_answer(house: House) -> None:
    stop = threading.Event()
    courier = threading.Thread(target=Courier(house.store, house.settings).run, args=(stop,))
    with http_receiver() as receiver:
        house.json("notify", "add", "webhook", receiver.url, "--on", "hold")
        courier.start()
        try:
            sent = house.json("notify", "test", "1")
        finally:
            stop.set()
            courier.join()
        assert b'"type":"notice.test"' in receiver.requests[0][2]
    assert (sent["state"], sent["answer"]) == ("delivered", "204")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("webhook", "http://10.0.0.1/", "--on", "end"), "body.target: webhooks may not go to '10.0.0.1'"),
        (("pigeon", "x", "--on", "end"), "body.channel: channel 'pigeon' does not exist"),
        (("mail", "ada@example.com", "--on", "end"), "body.target: this server sends no e-mail"),
        (("webhook", "http://127.0.0.1/", "--on", "budget"), "body.topics: budgets belong to projects"),
        (("webhook", "http://127.0.0.1/", "--on", "end", "--project", "nowhere"), "body.project: project"),
    ],
)
def test_what_is_refused_is_one_line_and_changes_nothing(
    house: House, arguments: tuple[str, ...], line: str
) -> None:
    result = house.run("notify", "add", *arguments)
    assert result.exit_code == ExitCode.usage
    assert line in result.stderr
    assert result.stderr.count("\n") == 1
    assert house.store.notifications.subscriptions() == []


def test_no_scheduler_is_alive_here(house: House) -> None:
    import os
    import socket

    result = house.run("scheduler", "--check")
    assert result.exit_code == ExitCode.not_succeeded
    assert "no scheduler on" in result.stderr
    house.queue.heartbeat("one", node=socket.gethostname(), pid=os.getpid())
    result = house.run("scheduler", "--check")
    assert (result.exit_code, result.stdout) == (0, "one\n")
