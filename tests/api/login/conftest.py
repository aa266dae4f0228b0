"""Applications that ask who one is, with users in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import SecretStr

from api.app import create_app
from api.throttle import Throttle
from service.config.settings import Settings
from service.domain.access import Scope
from service.store import Store
from tests.api.conftest import (
    BASE_URL,
    TOKEN,
    app,
    client,
    driver,
    http,
    migrated,
    settings,
    store,
    url,
)

__all__ = ["app", "client", "driver", "http", "migrated", "settings", "store", "url"]

HTTPS = "https://stillhouse.example"


@contextmanager
def opened(settings: Settings) -> Iterator[FastAPI]:
    """An application with the users ada and bob, closed at the end."""
    app = create_app(settings)
    app.state.store.people.add_user("ada")
    app.state.store.people.add_user("bob")
    yield app
    app.state.streams.close()
    app.state.intake.checks.close()
    app.state.store.close()


@pytest.fixture
def closed(settings: Settings) -> Iterator[FastAPI]:
    """An application with a token of its own."""
    with opened(settings.model_copy(update={"token": SecretStr(TOKEN)})) as app:
        app.state.throttle = Throttle(lambda: 0.0)  # Nothing is allowed again, however long a test takes
        yield app


def browser_of(app: FastAPI, base_url: str = BASE_URL, **more: Any) -> TestClient:
    """Returns another browser, which keeps its own cookies."""
    return TestClient(app, base_url=base_url, follow_redirects=False, **more)


@pytest.fixture
def browser(closed: FastAPI) -> TestClient:
    """A browser that is not logged in."""
    return browser_of(closed)


def secret_of(app: FastAPI, user: str = "ada", scope: Scope = Scope.operate, **more: Any) -> str:
    """Returns a new token of a user."""
    store: Store = app.state.store
    return store.people.create_token(user, name=more.pop("name", "test"), scope=scope, **more).secret


def log_in(browser: TestClient, secret: str) -> dict[str, str]:
    """Logs in with a token; returns the header that changes carry."""
    answer = browser.post("/login/token", json={"token": secret})
    assert answer.status_code == 204, answer.text
    return {"Stillhouse-CSRF": browser.get("/api/v1/whoami").json()["csrf"]}
