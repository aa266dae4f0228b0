"""Webhooks against a real receiver: what arrives, and where no message goes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import logging
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.config.hosts import AllowedHosts
from service.config.settings import Settings
from service.db.errors import BadValue
from service.domain.events import Topic
from service.domain.notifications import DeliveryState, NewSubscription
from service.notifications import courier as couriers
from service.notifications.channels import Undeliverable
from service.notifications.courier import ATTEMPTS, Courier, retry_in_s
from service.notifications.subscribing import CHANNELS, subscribe
from service.notifications.webhook import Slack
from service.store import NewExperiment, Store
from service.store.notifications import Outgoing
from tests.conformance.building import plans_of
from tests.service.notifications.receivers import HttpReceiver, http_receiver

WEBHOOK = "webhook"


@pytest.fixture
def receiver() -> Iterator[HttpReceiver]:
    with http_receiver() as found:
        yield found


@pytest.fixture
def settings(tmp_path: Path, sqlite_template: Path) -> Settings:
    shutil.copy(sqlite_template, tmp_path / "stillhouse.db")
    return Settings(data_dir=tmp_path, webhook_hosts="127.0.0.1, hooks.example.com")


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    opened = Store.open(settings)
    yield opened
    opened.close()


def told(store: Store, settings: Settings, url: str, *topics: Topic) -> NewSubscription:
    return subscribe(store, settings, owner="ada", channel=WEBHOOK, target=url, topics=topics or (Topic.end,))


def cancelled(store: Store, owner: str = "ada") -> int:
    """Number of an experiment that has ended."""
    spec, plans, text = plans_of(1)
    experiment, _ = store.submissions.submit(NewExperiment(spec, plans, spec_text=text, owner=owner))
    store.requests.cancel(experiment.id)
    return experiment.id


@pytest.mark.parametrize("channel", ["slack", "teams"])
def test_a_chat_gets_words_and_a_link_and_no_signature(
    store: Store, settings: Settings, receiver: HttpReceiver, channel: str
) -> None:
    made = subscribe(store, settings, owner="ada", channel=channel, target=receiver.url, topics=[Topic.end])
    experiment = cancelled(store)
    assert Courier(store, settings).run_once().delivered
    ((_, headers, body),) = receiver.requests
    assert made.secret is None
    assert "webhook-signature" not in headers
    message = json.loads(body)
    link = f"{str(settings.url).rstrip('/')}/experiments/{experiment}"
    if channel == "slack":
        title, _, reference = message["text"].split("\n")
        assert (title, reference) == ("*conformance: experiment.cancelled*", f"<{link}|{link}>")
    else:
        (attached,) = message["attachments"]
        assert attached["content"]["body"][0]["text"] == "conformance: experiment.cancelled"
        assert attached["content"]["actions"][0]["url"] == link


def test_slack_finds_no_mentions_in_what_users_wrote(settings: Settings) -> None:
    body = json.dumps({"type": "notice.test", "timestamp": "now", "data": {"message": "<!channel> & so on"}})
    content = Slack().content(
        Outgoing(1, 1, "m", 1, body, "slack", "https://hooks.slack.com/", None), settings
    )
    assert "&lt;!channel&gt; &amp; so on" in json.loads(content)["text"]


def test_a_message_arrives_signed(store: Store, settings: Settings, receiver: HttpReceiver) -> None:
    made = told(store, settings, receiver.url)
    experiment = cancelled(store)
    did = Courier(store, settings).run_once()
    assert (did.addressed, len(did.delivered), did.failed) == (1, 1, ())
    ((path, headers, body),) = receiver.requests
    message = json.loads(body)
    assert (path, message["type"]) == ("/hook", "experiment.cancelled")
    assert message["data"]["experiment"] == {"id": experiment, "name": "conformance", "owner": "ada"}
    assert made.secret is not None
    key = base64.b64decode(made.secret.removeprefix("whsec_"))
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert len(key) == 32


def test_the_signature_is_that_of_the_specification() -> None:
    # The example of https://github.com/standard-webhooks/standard-webhooks, computed by its libraries.
    from service.notifications.webhook import signed

    headers = signed(
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "msg_p5jXN8AQM9LWM0D4loKWxJek",
        1614265330,
        b'{"test": 2432232314}',
    )
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_message_that_did_not_arrive_comes_again_under_the_same_id(
    store: Store, settings: Settings, receiver: HttpReceiver
) -> None:
    now = 1000.0
    store.clocks.simulated = lambda: now
    told(store, settings, receiver.url)
    cancelled(store)
    receiver.answers = [(500, {}), (503, {})]
    courier = Courier(store, settings)
    assert courier.run_once().failed
    assert courier.run_once() == couriers.Round(0, (), ())  # Its time has not come.
    now += retry_in_s(1) or 0.0
    assert courier.run_once().failed
    now += retry_in_s(2) or 0.0
    assert courier.run_once().delivered
    assert len({headers["webhook-id"] for _, headers, _ in receiver.requests}) == 1
    assert len({body for _, _, body in receiver.requests}) == 1
    (entry,) = store.notifications.deliveries(owner="ada")
    assert (entry.state, entry.attempts, entry.next_s) == (DeliveryState.delivered, 3, None)


@pytest.mark.parametrize(
    "answer",
    [(204, {}), (200, {}), (404, {}), (410, {}), (302, {"Location": "/hook/T0123456789"}), (500, {}), None],
    ids=lambda answer: str(answer[0]) if answer else "refused",
)
def test_a_secret_in_a_url_is_in_no_log_and_no_answer(
    store: Store,
    settings: Settings,
    receiver: HttpReceiver,
    caplog: pytest.LogCaptureFixture,
    answer: tuple[int, dict[str, str]] | None,
) -> None:
    """Slack's, Teams' and Discord's webhooks have no other secret; a receiver may quote its path."""
    caplog.set_level(1)
    secrets = ("T0123456789", "t0ken%2Bvalue")
    url = f"{receiver.url}/{secrets[0]}?key={secrets[1]}"
    if answer is None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            url = url.replace(receiver.url, f"http://127.0.0.1:{unused.getsockname()[1]}")
    else:
        receiver.answers, receiver.echoes = [answer], True
    made = told(store, settings, url)
    cancelled(store)
    Courier(store, settings).run_once()
    assert len(receiver.requests) == (answer is not None)
    formatter = logging.Formatter()
    (entry,) = store.notifications.deliveries()
    (subscription,) = store.notifications.subscriptions()
    kept = [
        *(formatter.format(record) for record in caplog.records),
        entry.answer or "",
        subscription.disabled_because or "",
    ]
    for secret in (*secrets, "t0ken+value", made.secret or ""):
        assert not [line for line in kept if secret in line]
    assert (entry.answer or "").startswith("ConnectError" if answer is None else str(answer[0]))


@pytest.mark.parametrize("target", ["ftp://127.0.0.1/T0123456789", "http://127.0.0.1:x/T0123456789"])
def test_an_error_about_a_url_does_not_quote_its_secret(
    store: Store, settings: Settings, target: str
) -> None:
    with pytest.raises(BadValue) as refused:
        told(store, settings, target)
    assert "T0123456789" not in str(refused.value)


def test_pauses_grow_and_end() -> None:
    pauses = [retry_in_s(attempt) for attempt in range(1, ATTEMPTS + 1)]
    assert pauses[:3] == [5.0, 20.0, 80.0]
    assert pauses[-1] is None
    known = [pause for pause in pauses if pause is not None]
    assert known == sorted(known)
    assert sum(known) < 24 * 3600


def test_a_message_is_given_up_in_the_end(store: Store, settings: Settings, receiver: HttpReceiver) -> None:
    now = 1000.0
    store.clocks.simulated = lambda: now
    told(store, settings, receiver.url)
    cancelled(store)
    receiver.answers = [(500, {})] * ATTEMPTS
    courier = Courier(store, settings)
    for _ in range(ATTEMPTS + 2):
        courier.run_once()
        now += couriers.LONGEST_RETRY_S
    assert len(receiver.requests) == ATTEMPTS
    (entry,) = store.notifications.deliveries()
    assert (entry.state, entry.answer) == (DeliveryState.failed, "500")


def test_a_receiver_that_is_gone_ends_its_subscription(
    store: Store, settings: Settings, receiver: HttpReceiver
) -> None:
    told(store, settings, receiver.url)
    cancelled(store)
    receiver.answers = [(410, {})]
    Courier(store, settings).run_once()
    (subscription,) = store.notifications.subscriptions("ada")
    assert subscription.disabled_because == "410"
    cancelled(store)
    Courier(store, settings).run_once()
    assert len(receiver.requests) == 1


def test_redirects_are_not_followed(store: Store, settings: Settings, receiver: HttpReceiver) -> None:
    with http_receiver() as elsewhere:
        told(store, settings, receiver.url)
        cancelled(store)
        receiver.answers = [(307, {"Location": elsewhere.url})]
        Courier(store, settings).run_once()
        assert not elsewhere.requests
    assert "redirects are not followed" in str(store.notifications.deliveries()[0].answer)


def test_only_subscribers_of_the_owner_and_the_topic_are_told(
    store: Store, settings: Settings, receiver: HttpReceiver
) -> None:
    told(store, settings, receiver.url, Topic.failure, Topic.hold)
    cancelled(store)
    cancelled(store, owner="bob")
    assert Courier(store, settings).run_once().addressed == 2
    assert not receiver.requests
    told(store, settings, receiver.url, Topic.end)
    cancelled(store, owner="bob")
    cancelled(store)
    Courier(store, settings).run_once()
    (told_of,) = [json.loads(body)["data"]["experiment"] for _, _, body in receiver.requests]
    assert told_of["owner"] == "ada"


def test_a_silent_receiver_holds_up_no_other(
    store: Store, settings: Settings, receiver: HttpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.notifications.webhook.TIMEOUT_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        told(store, settings, f"http://127.0.0.1:{silent.getsockname()[1]}/")
        told(store, settings, receiver.url)
        cancelled(store)
        did = Courier(store, settings).run_once()
    assert (len(did.delivered), len(did.failed)) == (1, 1)
    assert {entry.answer for entry in store.notifications.deliveries()} == {"204", "no answer within 2 s"}


def outgoing(url: str) -> Outgoing:
    return Outgoing(1, 1, "msg_1", 1, "{}", WEBHOOK, url, "whsec_" + base64.b64encode(bytes(32)).decode())


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Makes every name resolve to these addresses; returns the names that were asked for."""
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        try:
            ipaddress.ip_address(host)
            found: tuple[str, ...] = (host,)
        except ValueError:
            found = addresses
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


NOT_PUBLIC = (
    "127.0.0.1", "10.0.0.7", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "172.16.0.1",
    "192.0.0.1", "192.0.0.9", "192.0.0.170", "192.0.0.192", "192.88.99.1", "192.0.2.1", "198.18.0.1",
    "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::7f00:1", "::8.8.8.8", "fe80::1", "fec0::1", "feff::1", "fc00::1", "fd00::1", "ff02::1",
    "ff0e::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1", "::ffff:0:8.8.8.8",
    "64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::7f00:1", "64:ff9b:1:ffff::1", "100::1", "2001::1",
    "2001:0:7f00:1::", "2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1", "2002:7f00:1::",
    "2002:808:808::", "3fff::1", "4000::1", "5f00::1", "2a00:1450::5efe:7f00:1", "2a00:1450::200:5efe:a00:1",
)  # fmt: skip
"""One address, at least, of everything that is not a single host on the internet."""
PUBLIC = (
    "8.8.8.8",
    "93.184.216.34",
    "1.1.1.1",
    "2606:4700::1111",
    "2a00:1450:4001:800::200e",
    "2001:4860::1",
)


@pytest.mark.parametrize("listed", ["*", "*.example.com"])
def test_only_public_addresses_are_taken_where_no_name_is_listed(listed: str) -> None:
    hosts, host = AllowedHosts.read(listed), "hooks.example.com"
    assert [one for one in NOT_PUBLIC if hosts.takes_address(host, ipaddress.ip_address(one))] == []
    assert [one for one in PUBLIC if not hosts.takes_address(host, ipaddress.ip_address(one))] == []


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_an_address_as_the_host_is_refused_when_the_subscription_is_made(
    address: str, tmp_path: Path
) -> None:
    host = f"[{address}]" if ":" in address else address
    settings = Settings(data_dir=tmp_path, webhook_hosts="*")
    with pytest.raises(BadValue, match="that is not public"):
        CHANNELS[WEBHOOK].check(f"http://{host}/", settings)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_a_name_that_resolves_to_a_private_address_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path, webhook_hosts="*")
    resolving(monkeypatch, "93.184.216.34", address)
    with pytest.raises(Undeliverable, match="that is not public") as raised:
        asyncio.run(CHANNELS[WEBHOOK].send(outgoing("http://hooks.example.com/"), settings))
    assert not raised.value.again


def test_the_connection_goes_to_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, receiver: HttpReceiver
) -> None:
    # The exact name is listed, so its address may be private; it is resolved once.
    asked = resolving(monkeypatch, "127.0.0.1")
    url = receiver.url.replace("127.0.0.1", "hooks.example.com")
    assert asyncio.run(CHANNELS[WEBHOOK].send(outgoing(url), settings)) == "204"
    assert asked.count("hooks.example.com") == 1
    assert receiver.requests[0][1]["host"] == url.split("/")[2]


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://10.0.0.1/", "webhooks may not go to '10.0.0.1'"),
        ("http://127.0.0.1.nip.io/", "webhooks may not go to"),
        ("http://[::1]:80/", "webhooks may not go to '::1'"),
        ("http://2130706433/", "webhooks may not go to"),
        ("https://evil.example/hooks.example.com", "webhooks may not go to"),
        ("https://user:pw@hooks.example.com/", "no user and password"),
        ("ftp://hooks.example.com/", "is not a URL"),
        ("https://hooks.example.com:99999/", "is not a URL"),
        ("https://hooks.example.com/ä", "ASCII"),
        ("https://hooks.example.com/\nHost: x", "ASCII"),
        ("", "is not a URL"),
    ],
)
def test_bad_targets_are_refused_in_one_line_and_nothing_is_stored(
    store: Store, settings: Settings, url: str, error: str
) -> None:
    with pytest.raises(BadValue, match=error) as raised:
        told(store, settings, url)
    assert "\n" not in str(raised.value)
    assert raised.value.field == "target"
    assert not store.notifications.subscriptions()


def test_without_a_list_webhooks_go_nowhere(store: Store, tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="STILLHOUSE_WEBHOOK_HOSTS"):
        told(store, Settings(data_dir=tmp_path), "https://hooks.example.com/")


def test_a_host_that_is_no_longer_allowed_gets_nothing(
    store: Store, settings: Settings, receiver: HttpReceiver
) -> None:
    told(store, settings, receiver.url)
    cancelled(store)
    Courier(store, settings.model_copy(update={"webhook_hosts": "hooks.example.com"})).run_once()
    assert not receiver.requests
    assert store.notifications.deliveries()[0].state is DeliveryState.failed


@pytest.mark.parametrize(
    ("listed", "host", "address", "allowed"),
    [
        ("chat.internal", "chat.internal", "10.0.0.1", True),
        ("*.internal", "chat.internal", "10.0.0.1", False),
        ("*.internal, 10.0.0.0/8", "chat.internal", "10.0.0.1", True),
        ("*", "chat.internal", "8.8.8.8", True),
        ("*.example.com", "example.com.evil.org", "8.8.8.8", False),
        ("*.example.com", "notexample.com", "8.8.8.8", False),
        ("10.0.0.0/8", "10.1.2.3", "10.1.2.3", True),
        ("10.0.0.0/8", "chat.internal", "10.1.2.3", False),
        ("10.0.0.0/8", "::ffff:10.1.2.3", "::ffff:10.1.2.3", True),  # A socket connects to 10.1.2.3.
        ("10.0.0.0/8", "64:ff9b::a01:203", "64:ff9b::a01:203", False),  # A gateway would.
        ("*, 64:ff9b::/96", "chat.example.com", "64:ff9b::808:808", True),
        ("*, 10.0.0.0/8", "chat.example.com", "64:ff9b::a01:203", False),
    ],
)
def test_what_an_operator_allows(listed: str, host: str, address: str, allowed: bool) -> None:
    hosts = AllowedHosts.read(listed)
    takes = hosts.takes_name(host) and hosts.takes_address(host, ipaddress.ip_address(address))
    assert takes is allowed


@pytest.mark.parametrize("listed", ["*evil", "10.0.0.0/99"])
def test_a_list_that_cannot_be_read_is_refused_at_start(listed: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="webhook_hosts"):
        Settings(data_dir=tmp_path, webhook_hosts=listed)
