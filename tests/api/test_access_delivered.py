"""What is delivered to whom: webhooks, mail and the stream of all changes, for every kind of token."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import SecretStr

from api.app import create_app
from service.config.settings import MailSecurity, Settings
from service.notifications.courier import Courier
from service.store import Store
from tests.api.access_table import (
    ELSEWHERE,
    FIRST_TOKEN,
    HERE,
    SENDERS,
    Sender,
    World,
    headers_of,
    populate,
)
from tests.api.conftest import BASE_URL
from tests.conftest import KINDS
from tests.service.notifications.receivers import HttpReceiver, SmtpReceiver, http_receiver, smtp_receiver
from tests.serving import serving

EXPERIMENTS = (
    ("owner", HERE),
    ("owner", ELSEWHERE),
    ("owner", "default"),
    ("member", HERE),
    ("other", ELSEWHERE),
)
"""Whose experiment ends, in which project."""


@pytest.fixture
def http() -> Iterator[HttpReceiver]:
    with http_receiver() as receiver:
        yield receiver


@pytest.fixture
def smtp(tmp_path: Path) -> Iterator[SmtpReceiver]:
    with smtp_receiver(tmp_path, starttls=False) as receiver:
        yield receiver


@pytest.fixture(params=KINDS)
def settings(request: pytest.FixtureRequest, tmp_path: Path, smtp: SmtpReceiver) -> Settings:
    url = None if request.param == "sqlite" else request.getfixturevalue("postgresql_url")
    found = Settings(
        data_dir=tmp_path / "data",
        data_roots=str(tmp_path),
        model_roots=str(tmp_path),
        database_url=url,
        token=SecretStr(FIRST_TOKEN),
        webhook_hosts="127.0.0.1",
        smtp_host="127.0.0.1",
        smtp_port=smtp.port,
        smtp_from="stillhouse@example.com",
        smtp_security=MailSecurity.none,
    )
    Store.open(found, migrate=True).close()
    return found


@pytest.fixture
def world(app: FastAPI) -> World:
    return populate(app.state.store)


@pytest.fixture
def app(settings: Settings) -> Iterator[FastAPI]:
    made = create_app(settings)
    yield made
    made.state.store.close()


CardSource = Counter[tuple[int, int]]
"""(subscription, experiment) of messages."""


class House:
    """Subscriptions of everyone with every token, and what arrives at their receivers."""

    def __init__(self, app: FastAPI, world: World, http: HttpReceiver, smtp: SmtpReceiver) -> None:
        self.world, self.http, self.smtp = world, http, smtp
        self.courier = Courier(world.store, app.state.settings)
        self.subscriptions: dict[int, tuple[Sender, str | None]] = {}

    def subscribe(self, client: TestClient) -> None:
        for sender in SENDERS.values():
            if sender.scope != "submit":
                continue  # The smallest scope that subscribes; a larger one changes nothing.
            for channel in ("webhook", "mail"):
                for project in (None, HERE, ELSEWHERE):
                    target = self.http.url if channel == "webhook" else f"{sender.user}@example.com"
                    wanted = {"channel": channel, "target": target, "topics": ["end"], "project": project}
                    headers = headers_of(sender.name)
                    made = client.post("/api/v1/subscriptions", json=wanted, headers=headers)
                    assert (made.status_code == 201) is (project is None or sender.sees(project)), made.text
                    if made.status_code == 201:
                        self.subscriptions[made.json()["subscription"]["id"]] = sender, project

    def happen(self) -> dict[int, tuple[str, str]]:
        """Ends an experiment of each kind; returns owner and project by number."""
        ended = {self.world.submit(project, owner)[0]: (owner, project) for owner, project in EXPERIMENTS}
        for id in ended:
            self.world.store.requests.cancel(id)
        return ended

    def delivered(self) -> CardSource:
        """What arrives now."""
        self.http.requests.clear()
        self.smtp.mails.clear()
        while any((did := self.courier.run_once()).delivered) or did.addressed:
            assert not did.failed
        told: CardSource = Counter()
        of_message = {
            one.message_id: one.subscription_id
            for one in self.world.store.notifications.deliveries(limit=500)
        }
        for _, headers, body in self.http.requests:
            experiment = json.loads(body)["data"]["experiment"]["id"]
            told[of_message[headers["webhook-id"]], experiment] += 1
        for recipient, text in self.smtp.mails:
            subscription = int(re.findall(rb"notify remove (\d+)", text)[0])
            assert recipient == f"{self.subscriptions[subscription][0].user}@example.com"
            told[subscription, int(re.findall(rb"^experiment +(\d+) ", text, re.MULTILINE)[0])] += 1
        return told

    def expected(
        self,
        ended: dict[int, tuple[str, str]],
        lost: Callable[[Sender, str], bool] = lambda sender, project: False,
    ) -> CardSource:
        """What should arrive, but for subscriptions of a sender who has lost sight of a project."""
        return Counter(
            (id, experiment)
            for id, (sender, wanted) in self.subscriptions.items()
            for experiment, (owner, project) in ended.items()
            if sender.sees(project) and not lost(sender, project)
            if wanted == project or (wanted is None and owner == sender.user)
        )


def lost_since(sender: Sender, project: str) -> bool:
    gone = sender.user == "member" and project == HERE
    return gone or sender.user == "other" or sender.name == "owner_submit_here"


def test_messages_tell_no_more_than_the_token_they_were_asked_for_with(
    app: FastAPI, world: World, http: HttpReceiver, smtp: SmtpReceiver
) -> None:
    house, store = House(app, world, http, smtp), world.store
    with TestClient(app, base_url=BASE_URL) as client:
        house.happen()  # Before anyone subscribes, and told to no one.
        house.subscribe(client)
        ended = house.happen()
        assert house.delivered() == house.expected(ended) != Counter()

        store.projects.remove_member(HERE, "member")
        store.people.set_user("other", disabled=True)
        revoke(client, store, "owner", "owner_submit_here")
        ended = house.happen()
        assert house.delivered() == house.expected(ended, lost_since) != house.expected(ended)


def revoke(client: TestClient, store: Store, user: str, name: str) -> None:
    (token,) = [token.id for token in store.people.tokens(user) if token.name == name]
    answer = client.delete(f"/api/v1/tokens/{token}", headers=headers_of("first_token"))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("change", ["membership", "user", "token"])
def test_a_message_that_waits_is_not_sent_once_it_may_not_be_seen(
    app: FastAPI, world: World, http: HttpReceiver, smtp: SmtpReceiver, change: str
) -> None:
    store = world.store
    with TestClient(app, base_url=BASE_URL) as client:
        wanted = {"channel": "webhook", "target": http.url, "topics": ["end"], "project": HERE}
        made = client.post("/api/v1/subscriptions", json=wanted, headers=headers_of("viewer_submit"))
        assert made.status_code == 201
        store.requests.cancel(world.submit()[0])
        assert store.notifications.address()
        if change == "membership":
            store.projects.remove_member(HERE, "viewer")
        elif change == "user":
            store.people.set_user("viewer", disabled=True)
        else:
            revoke(client, store, "viewer", "viewer_submit")
        Courier(store, app.state.settings).run_once()
        assert http.requests == []
        (subscription,), (entry,) = (
            store.notifications.subscriptions("viewer"),
            store.notifications.deliveries(owner="viewer"),
        )
    if change == "token":
        assert subscription.disabled_because == "the token 'viewer_submit' that it was made with was revoked"
    else:
        assert (entry.state, str(entry.answer).partition(":")[0]) == ("failed", "not sent")


def test_the_stream_of_changes_has_what_each_token_sees(app: FastAPI, world: World) -> None:
    projects = {world.experiment_id: HERE}
    for owner, project in EXPERIMENTS:
        projects[world.submit(project, owner)[0]] = project
    wrong = {}
    with serving(app) as url, httpx.Client(base_url=url, timeout=10.0, trust_env=False) as client:
        for name, sender in SENDERS.items():
            headers = headers_of(name) | {"Last-Event-ID": "1"}
            with client.stream("GET", "/api/v1/stream", headers=headers) as answer:
                assert answer.status_code == 200
                seen, event = set(), ""
                for line in answer.iter_lines():
                    if line.startswith("id:"):
                        break
                    event = line.removeprefix("event: ") if line.startswith("event: ") else event
                    if event == "experiment" and line.startswith("data: "):
                        seen.add(json.loads(line.removeprefix("data: "))["id"])
            if seen != {id for id, project in projects.items() if sender.sees(project)}:
                wrong[name] = seen
    assert not wrong
