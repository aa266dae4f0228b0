"""Logging in, in a real browser: with a token, through a real OpenID provider, and letting a device in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from pydantic import AnyHttpUrl, SecretStr

from api.app import create_app
from service.config.settings import Settings
from service.domain.access import Scope
from tests.browser.devtools import Page, browser_path, page
from tests.provider import running_provider
from tests.serving import serving

pytestmark = pytest.mark.slow

OWN = "stillhouse-" + "o" * 32
TAB, ENTER = ("Tab", 9), ("Enter", 13)


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Page]:
    """A tab of a new browser, on a phone's screen."""
    browser = browser_path()
    if browser is None:
        pytest.skip("no chromium is installed")
    with page(browser, tmp_path / "profile") as tab:
        tab.call(
            "Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True
        )
        yield tab


@pytest.fixture
def settings(tmp_path: Path, sqlite_template: Path) -> Settings:
    (tmp_path / "data").mkdir()
    shutil.copy(sqlite_template, tmp_path / "data" / "stillhouse.db")
    return Settings(data_dir=tmp_path / "data", token=SecretStr(OWN))


@pytest.fixture
def closed(settings: Settings) -> FastAPI:
    app = create_app(settings)
    app.state.store.people.add_user("ada")
    return app


def fits(tab: Page) -> None:
    """Checks that nothing is wider than the screen, and that every field has a label."""
    assert tab.value("document.documentElement.scrollWidth") <= 360
    assert tab.value("[...document.querySelectorAll('input')].every((one) => one.labels.length === 1)")


def in_page(tab: Page, words: str) -> None:
    tab.wait(f"document.body && document.body.innerText.includes({words!r})")


def test_a_token_logs_in_by_keyboard_and_leads_back(tab: Page, closed: FastAPI) -> None:
    secret = closed.state.store.people.create_token("ada", name="page", scope=Scope.submit).secret
    with serving(closed) as url:
        tab.open(f"{url}/queue")
        tab.wait("location.pathname === '/login' && document.activeElement.id === 'token'")
        fits(tab)
        tab.type("wrong")
        tab.press(*ENTER)
        in_page(tab, "no such token")
        assert tab.value("document.getElementById('problem').getAttribute('role')") == "alert"
        tab.wait("document.activeElement.id === 'token' && !document.getElementById('enter').disabled")
        tab.type(secret)  # The wrong one is selected, and replaced.
        tab.press(*TAB)
        assert tab.value("document.activeElement.id") == "enter"
        tab.press(*ENTER)
        tab.wait("location.pathname === '/queue'")
        in_page(tab, "Nothing is waiting")
        tab.wait("document.getElementById('who').textContent === 'ada'")
        (cookie,) = tab.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Lax", "/")
        assert cookie["domain"] == "127.0.0.1"
        assert tab.value("document.cookie") == ""
        assert secret not in tab.value("JSON.stringify({...localStorage, ...sessionStorage})")
        fits(tab)

        tab.open(f"{url}/account")
        in_page(tab, "Your sessions")
        assert tab.value("document.querySelectorAll('[aria-label=\"Your sessions\"] tbody tr').length") == 1
        tab.value("document.getElementById('out').click()")
        tab.wait("location.pathname === '/login'")
        assert tab.cookies() == []
        assert closed.state.store.sessions.live(3600.0, None) == []
    assert tab.errors == []


def test_the_login_page_follows_the_colour_scheme(tab: Page, closed: FastAPI) -> None:
    with serving(closed) as url:
        grounds = []
        for scheme in ("light", "dark"):
            tab.call(
                "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
            )
            tab.open(f"{url}/login")
            ground = "getComputedStyle(document.body).backgroundColor"
            tab.wait(f"{ground} !== 'rgba(0, 0, 0, 0)'")  # The style sheet is there.
            grounds.append(tab.value(ground))
    assert grounds == ["rgb(247, 248, 249)", "rgb(17, 21, 26)"]
    assert tab.errors == []


def test_another_servers_address_is_not_where_a_login_leads(tab: Page, closed: FastAPI) -> None:
    with serving(closed) as url:
        tab.open(f"{url}/login?return=https://evil.example/")
        tab.wait("document.activeElement && document.activeElement.id === 'token'")
        tab.type(OWN)
        tab.press(*ENTER)
        in_page(tab, "Nothing submitted yet")
        assert tab.value("location.href") == f"{url}/"


def test_a_device_is_let_in(tab: Page, closed: FastAPI) -> None:
    with serving(closed) as url, httpx.Client(base_url=url, trust_env=False) as device:
        begun = device.post("/device/code", data={"name": "laptop"}).json()
        tab.open(f"{url}/device?user_code={begun['user_code']}")
        tab.wait("location.pathname === '/login' && document.activeElement.id === 'token'")
        tab.type(OWN)
        tab.press(*ENTER)
        tab.wait("location.pathname === '/device' && !document.getElementById('asked').hidden")
        shown = tab.value("document.getElementById('asked').innerText")
        assert begun["user_code"] in shown
        assert "laptop" in shown
        assert "127.0.0.1" in shown
        fits(tab)
        assert tab.value("document.activeElement.id") == "deny", "Enter alone lets nobody in"
        tab.value("document.getElementById('approve').click()")
        in_page(tab, "The device is logged in")
        form = {
            "grant_type": "urn:ietf:params:oauth:grant-type:device_code",
            "device_code": begun["device_code"],
        }
        token = device.post("/device/token", data=form).json()["access_token"]
        bearer = {"Authorization": f"Bearer {token}"}
        assert device.get("/api/v1/whoami", headers=bearer).json()["user"] == "admin"
    assert tab.errors == []


def test_a_login_at_a_real_provider(tab: Page, settings: Settings) -> None:
    with running_provider() as provider:
        provider.knows("grace@example.org", preferred_username="grace")
        secret = SecretStr("of the client")
        more = {"oidc_issuer": provider.url, "oidc_client_id": "stillhouse", "oidc_client_secret": secret}
        app = create_app(settings.model_copy(update=more))
        with serving(app) as url:
            # The port is known only now.
            app.state.provider._settings = settings.model_copy(update={**more, "url": AnyHttpUrl(url)})
            tab.open(f"{url}/queue")
            in_page(tab, "Log in with localhost")
            fits(tab)
            tab.value("document.getElementById('leave').click()")
            field = "document.querySelector('input[name=sub]')"
            tab.wait(f"location.origin === {provider.url!r} && {field} !== null")
            tab.value(f"{field}.value = 'grace@example.org'")
            tab.value(f"{field}.form.requestSubmit()")
            tab.wait(f"location.href === {url + '/queue'!r}")
            in_page(tab, "Nothing is waiting")
            tab.wait("document.getElementById('who').textContent === 'grace'")
            tab.value("document.getElementById('out').click()")
            tab.wait(f"location.origin === {provider.url!r} || location.pathname === '/login'")
            assert [one for one in tab.cookies() if one["name"].startswith("stillhouse")] == []
        assert app.state.provider.issuer == provider.url


def test_a_provider_that_is_away_leaves_one_line(tab: Page, settings: Settings) -> None:
    more = {"oidc_issuer": "http://127.0.0.1:9", "oidc_client_id": "stillhouse"}
    with serving(create_app(settings.model_copy(update=more))) as url:
        tab.open(f"{url}/login")
        in_page(tab, "Log in with 127.0.0.1")
        tab.value("document.getElementById('leave').click()")
        in_page(tab, "127.0.0.1 does not answer; try again later, or log in with a token.")
        tab.value("document.getElementById('token').focus()")
        tab.type(OWN)
        tab.press(*ENTER)
        in_page(tab, "Nothing submitted yet")
    assert tab.errors == []
