"""Notifications in the browser: set up, tried out with real receivers, paused, resumed and deleted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from playwright.sync_api import Page, expect

from service.config.settings import MailSecurity, Settings
from service.notifications.courier import Courier
from service.store import Store
from tests.browser.conftest import ready
from tests.service.notifications.receivers import (
    HttpReceiver,
    SmtpReceiver,
    http_receiver,
    smtp_receiver,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def webhooks() -> Iterator[HttpReceiver]:
    with http_receiver() as receiver:
        yield receiver


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[SmtpReceiver]:
    with smtp_receiver(tmp_path) as receiver:
        yield receiver


@pytest.fixture
def settings(settings: Settings, mailbox: SmtpReceiver) -> Settings:
    return settings.model_copy(
        update={
            "webhook_hosts": "127.0.0.1",
            "smtp_host": "127.0.0.1",
            "smtp_port": mailbox.port,
            "smtp_security": MailSecurity.none,
        }
    )


@pytest.fixture
def courier(app: FastAPI, settings: Settings) -> Iterator[None]:
    """Delivers messages, as a scheduler does."""
    stop = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("service.notifications.courier.EVERY_S", 0.1)
        thread = threading.Thread(target=Courier(app.state.store, settings).run, args=(stop,))
        thread.start()
        yield
        stop.set()
        thread.join()


def add(page: Page, channel: str, target: str, *topics: str) -> None:
    page.get_by_role("button", name="Add a notification").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("By").select_option(channel)
    dialog.get_by_label("To").fill(target)
    for topic in topics:
        dialog.get_by_label(topic).check()
    dialog.get_by_role("button", name="Add", exact=True).click()
    if channel != "webhook":  # Its secret is shown first.
        expect(page.get_by_role("table", name="Notifications")).to_contain_text(channel)


@pytest.mark.usefixtures("courier")
def test_messages_reach_mail_and_chat_and_a_webhook(
    page: Page, site: str, webhooks: HttpReceiver, mailbox: SmtpReceiver
) -> None:
    page.goto(f"{site}/account")
    ready(page)
    add(page, "mail", "ada@example.com")
    add(page, "slack", webhooks.url, "an experiment failed")
    add(page, "teams", webhooks.url, "do not decide")
    add(page, "webhook", webhooks.url)
    secret = page.get_by_role("dialog", name="Secret of the webhook")
    assert secret.get_by_role("textbox").input_value().startswith("whsec_")
    secret.get_by_role("button", name="Done").click()
    table = page.get_by_role("table", name="Notifications")
    expect(table.get_by_role("row")).to_have_count(5)
    expect(table).to_contain_text("end, failure")
    expect(table).to_contain_text("end, undecided")
    assert "/hook" not in table.inner_text(), "the path of a webhook may be its secret"
    for channel in ("mail", "slack", "teams", "webhook"):
        page.get_by_role("button", name=f"Test {channel}").click()
        expect(page.locator(".toast").filter(has_text="The test arrived")).to_have_count(1)
        page.get_by_role("button", name="Dismiss").click()
    ((recipient, text),) = mailbox.mails
    assert (recipient, b"a test of subscription 1" in text) == ("ada@example.com", True)
    slack, teams, webhook = (json.loads(body) for _, _, body in webhooks.requests)
    assert "a test of subscription 2" in slack["text"]
    assert "a test of subscription 3" in json.dumps(teams["attachments"])
    assert webhook["type"] == "notice.test"


def test_one_is_paused_resumed_and_deleted(
    page: Page, app: FastAPI, site: str, webhooks: HttpReceiver, looked_at: Callable[[str], None]
) -> None:
    store: Store = app.state.store
    page.goto(f"{site}/account")
    ready(page)
    add(page, "slack", webhooks.url)
    row = page.get_by_role("table", name="Notifications").get_by_role("row").last
    page.get_by_role("button", name="Pause slack").click()
    expect(row).to_contain_text("paused by its owner")
    page.get_by_role("button", name="Resume slack").click()
    expect(row).to_contain_text("works")
    looked_at("account-notifications")
    page.get_by_role("button", name="Delete slack").click()
    page.get_by_role("button", name="Delete the subscription").click()
    expect(page.get_by_text("Nothing is sent to you yet.")).to_be_visible()
    assert store.notifications.subscriptions() == []


def test_a_refused_address_is_said_in_the_dialog(
    page: Page, site: str, looked_at: Callable[[str], None]
) -> None:
    page.goto(f"{site}/account")
    ready(page)
    add(page, "webhook", "https://elsewhere.example/hook")
    alert = page.get_by_role("dialog").get_by_role("alert")
    expect(alert).to_contain_text("STILLHOUSE_WEBHOOK_HOSTS")
    looked_at("add-a-notification")
