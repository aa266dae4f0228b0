"""Subscriptions over HTTP: whose they are, and what is refused."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from service.config.settings import Settings
from service.store import Store
from tests.service.notifications.test_webhooks import cancelled

PLACE = "/api/v1/subscriptions"
WANTED = {"channel": "webhook", "target": "https://hooks.example.com/", "topics": ["end"]}


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"webhook_hosts": "hooks.example.com"})


def as_user(name: str) -> dict[str, str]:
    return {"Stillhouse-Owner": name}


def test_subscriptions_are_ones_own(client: TestClient) -> None:
    made = client.post(PLACE, json=WANTED, headers=as_user("ada"))
    assert made.status_code == 201
    id = made.json()["subscription"]["id"]
    assert made.json()["secret"].startswith("whsec_")
    assert "secret" not in client.get(PLACE, headers=as_user("ada")).json()["items"][0]
    assert client.get(PLACE, headers=as_user("bob")).json()["items"] == []
    for method, path in (
        ("DELETE", f"{PLACE}/%d"),
        ("POST", f"{PLACE}/%d/test"),
        ("PUT", f"{PLACE}/%d/paused"),
        ("GET", "/api/v1/deliveries?subscription=%d"),
    ):
        body = {"paused": True} if method == "PUT" else None
        hidden, missing = (
            client.request(method, path % one, headers=as_user("bob"), json=body) for one in (id, 999)
        )
        assert hidden.status_code == missing.status_code == 404
        assert hidden.json()["detail"] == f"no subscription has the id {id}"
        assert missing.json()["detail"] == "no subscription has the id 999"
    assert client.delete(f"{PLACE}/{id}", headers=as_user("ada")).status_code == 204


def test_a_test_is_in_the_log_at_once(client: TestClient) -> None:
    id = client.post(PLACE, json=WANTED).json()["subscription"]["id"]
    sent = client.post(f"{PLACE}/{id}/test")
    assert sent.status_code == 202
    (entry,) = client.get("/api/v1/deliveries").json()["items"]
    assert entry == sent.json()
    assert (entry["kind"], entry["state"], entry["attempts"]) == ("notice.test", "pending", 0)


def test_a_paused_subscription_gets_nothing_until_it_is_resumed(client: TestClient, store: Store) -> None:
    id = client.post(PLACE, json=WANTED).json()["subscription"]["id"]
    owner = client.get(PLACE).json()["items"][0]["owner"]

    def waiting() -> int:
        cancelled(store, owner)
        store.notifications.address()
        return len(store.notifications.take_deliveries(10, 60.0))

    assert waiting() == 1
    paused = client.put(f"{PLACE}/{id}/paused", json={"paused": True}).json()
    assert paused["disabled_because"] == "paused by its owner"
    assert waiting() == 0
    assert client.put(f"{PLACE}/{id}/paused", json={"paused": False}).json()["disabled_s"] is None
    assert waiting() == 1


def test_one_that_its_receiver_ended_cannot_be_resumed(client: TestClient, store: Store) -> None:
    id = client.post(PLACE, json=WANTED).json()["subscription"]["id"]
    client.post(f"{PLACE}/{id}/test")
    (sent,) = store.notifications.take_deliveries(10, 60.0)
    store.notifications.disable_subscription(sent, "410 gone")
    for paused in (True, False):
        stays = client.put(f"{PLACE}/{id}/paused", json={"paused": paused}).json()
        assert stays["disabled_because"] == "410 gone"


def test_what_may_be_chosen_names_what_an_operator_must_set(client: TestClient) -> None:
    found = client.get("/api/v1/subscription-choices").json()
    problems = {one["name"]: one["problem"] for one in found["channels"]}
    assert problems.keys() == {"mail", "slack", "teams", "webhook"}
    assert problems["webhook"] is None
    assert "STILLHOUSE_SMTP_HOST" in problems["mail"]
    assert {one["name"] for one in found["topics"] if one["of_project"]} == {"budget"}


def test_the_number_of_subscriptions_is_limited(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.notifications.subscribing.MOST_PER_USER", 2)
    assert [client.post(PLACE, json=WANTED).status_code for _ in range(3)] == [201, 201, 422]


@pytest.mark.parametrize(
    "change", [{"topics": []}, {"topics": ["weather"]}, {"channel": None}, {"unknown": 1}]
)
def test_bodies_are_checked(client: TestClient, store: Store, change: dict[str, object]) -> None:
    answer = client.post(PLACE, json={**WANTED, **change})
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/invalid-body")
    assert store.notifications.subscriptions() == []
