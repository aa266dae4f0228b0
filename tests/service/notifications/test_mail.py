"""E-mail through a real SMTP receiver."""

from __future__ import annotations

import asyncio
import email
import email.policy
from pathlib import Path

import pytest
from pydantic import SecretStr

from service.config.settings import MailSecurity, Settings
from service.db.errors import BadValue
from service.domain.events import Topic
from service.domain.notifications import DeliveryState
from service.notifications.channels import Undeliverable
from service.notifications.courier import Courier
from service.notifications.subscribing import CHANNELS, subscribe
from service.store import Store
from service.store.notifications import Outgoing
from tests.service.notifications.receivers import SmtpReceiver, smtp_receiver
from tests.service.notifications.test_webhooks import cancelled

MAIL = "mail"
BODY = '{"type":"experiment.failed","timestamp":"2026-01-01T00:00:00Z","data":{"message":"failed: bug"}}'


def settings_for(receiver: SmtpReceiver, folder: Path, **changes: object) -> Settings:
    return Settings(
        data_dir=folder,
        smtp_host="localhost",
        smtp_port=receiver.port,
        smtp_from="stillhouse@example.com",
        smtp_user="service",
        smtp_password=SecretStr("word"),
    ).model_copy(update=changes)


def outgoing(target: str = "ada@example.com") -> Outgoing:
    return Outgoing(1, 3, "msg_1", 1, BODY, MAIL, target, None)


def test_a_mail_arrives_encrypted_after_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
    with smtp_receiver(tmp_path) as receiver:
        settings = settings_for(receiver, tmp_path)
        store = Store.open(settings, migrate=True)
        try:
            subscribe(
                store, settings, owner="ada", channel=MAIL, target="ada@example.com", topics=[Topic.end]
            )
            experiment = cancelled(store)
            did = Courier(store, settings).run_once()
            (entry,) = store.notifications.deliveries()
        finally:
            store.close()
    assert did.delivered
    assert entry.state is DeliveryState.delivered
    ((recipient, text),) = receiver.mails
    assert recipient == "ada@example.com"
    assert receiver.encrypted == [True]
    assert receiver.logins
    mail = email.message_from_bytes(text, policy=email.policy.default)
    assert mail["Subject"] == "[stillhouse] conformance: experiment.cancelled"
    assert mail["Message-ID"] == f"<{entry.message_id}@example.com>"
    assert mail.get_content_type() == "text/plain"
    assert f"/experiments/{experiment}" in mail.get_content()


def test_nothing_is_sent_to_a_server_without_encryption(tmp_path: Path) -> None:
    with smtp_receiver(tmp_path, starttls=False) as receiver:
        with pytest.raises(Undeliverable, match="STARTTLS"):
            asyncio.run(CHANNELS[MAIL].send(outgoing(), settings_for(receiver, tmp_path)))
        assert not receiver.logins
        plain = settings_for(receiver, tmp_path, smtp_security=MailSecurity.none)
        assert asyncio.run(CHANNELS[MAIL].send(outgoing(), plain)) == "accepted by localhost"


def test_a_server_whose_certificate_is_not_trusted_gets_no_password(tmp_path: Path) -> None:
    with smtp_receiver(tmp_path) as receiver:
        with pytest.raises(Undeliverable, match="certificate"):
            asyncio.run(CHANNELS[MAIL].send(outgoing(), settings_for(receiver, tmp_path)))
        assert not receiver.logins


@pytest.mark.parametrize(("code", "again"), [(b"450 later", True), (b"550 no such user", False)])
def test_a_refused_recipient_is_tried_again_only_if_that_may_help(
    code: bytes, again: bool, tmp_path: Path
) -> None:
    with smtp_receiver(tmp_path, starttls=False) as receiver:
        receiver.to_recipient = code
        plain = settings_for(receiver, tmp_path, smtp_security=MailSecurity.none)
        with pytest.raises(Undeliverable, match=code.decode()) as raised:
            asyncio.run(CHANNELS[MAIL].send(outgoing(), plain))
    assert raised.value.again is again


@pytest.mark.parametrize("target", ["ada", "a@b@c", "ada@example.com\nBcc: x@y", "ada <a@b.c>", "@", ""])
def test_bad_addresses_are_refused(target: str, tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="not an e-mail address"):
        CHANNELS[MAIL].check(target, Settings(data_dir=tmp_path, smtp_host="localhost"))


def test_without_a_server_no_one_subscribes_to_mail(tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="STILLHOUSE_SMTP_HOST"):
        CHANNELS[MAIL].check("ada@example.com", Settings(data_dir=tmp_path))
