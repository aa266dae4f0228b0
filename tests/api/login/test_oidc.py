"""Logging in at a real OpenID provider, and everything that must not count as one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import SecretStr

from api.login.people import Departure
from service.config.groups import group_table
from service.config.settings import Settings
from service.domain.access import Role
from tests.api.conftest import TOKEN
from tests.api.login.conftest import browser_of, opened
from tests.provider import OpenIdProvider, running_provider

KEPT = "stillhouse-8400-provider"
GROUPS = """\
groups:
  nlp-team: {projects: {nlp: member}}
  leads: {projects: {nlp: maintainer, vision: maintainer}}
  platform: {administrator: true}
"""


@pytest.fixture(scope="module")
def provider() -> Iterator[OpenIdProvider]:
    with running_provider() as provider:
        yield provider


@pytest.fixture
def app(settings: Settings, provider: OpenIdProvider) -> Iterator[FastAPI]:
    (settings.data_dir / "groups.yaml").write_text(GROUPS)
    more = {"oidc_issuer": provider.url, "oidc_client_id": "stillhouse", "oidc_client_secret": SecretStr("s")}
    with opened(settings.model_copy(update={"token": SecretStr(TOKEN), **more})) as app:
        yield app


@pytest.fixture
def browser(app: FastAPI) -> TestClient:
    return browser_of(app)


def leave(browser: TestClient, return_to: str = "/") -> str:
    answer = browser.get("/login/oidc", params={"return": return_to})
    assert answer.status_code == 303
    location: str = answer.headers["location"]
    return location


def come_back(browser: TestClient, address: str) -> str:
    answer = browser.get(address)
    assert answer.status_code == 303
    location: str = answer.headers["location"]
    return location


def kept(browser: TestClient) -> Departure:
    departure = Departure.unpacked(browser.cookies[KEPT])
    assert departure is not None
    return departure


def keep(browser: TestClient, departure: Departure) -> None:
    browser.cookies.clear()
    browser.cookies.set(KEPT, departure.packed(), domain="127.0.0.1", path="/")


def test_a_first_login_creates_the_user_and_leads_back(
    browser: TestClient, provider: OpenIdProvider, app: FastAPI
) -> None:
    provider.knows("g-1", preferred_username="grace", email="grace@example.org", groups=["nlp-team"])
    app.state.store.projects.create("nlp", title="NLP")
    address = leave(browser, "/#/queue")
    asked = parse_qs(urlsplit(address).query)
    assert asked["code_challenge_method"] == ["S256"]
    assert {"state", "nonce", "code_challenge"} <= asked.keys()
    assert asked["redirect_uri"] == ["http://127.0.0.1:8400/login/oidc/callback"]
    assert come_back(browser, provider.log_in(address, "g-1")) == "/#/queue"
    whoami = browser.get("/api/v1/whoami").json()
    assert (whoami["user"], whoami["via"], whoami["administrator"]) == ("grace", "session", False)
    assert whoami["roles"] == {"default": "member", "nlp": "member"}
    user = app.state.store.people.user("grace")
    assert (user.subject, user.email) == (f"{provider.url}|g-1", "grace@example.org")


def test_roles_follow_the_groups_at_every_login(
    browser: TestClient, provider: OpenIdProvider, app: FastAPI
) -> None:
    store = app.state.store
    for name in ("nlp", "vision", "audio"):
        store.projects.create(name, title=name)
    provider.knows("h-1", preferred_username="hedy", groups=["leads", "nlp-team", "platform"])
    come_back(browser, provider.log_in(leave(browser), "h-1"))
    store.projects.set_member("audio", "hedy", Role.viewer)
    whoami = browser.get("/api/v1/whoami").json()
    assert whoami["administrator"] is True
    assert whoami["roles"]["nlp"] == "maintainer", "the highest of two groups"
    provider.knows("h-1", preferred_username="hedy", groups=["nlp-team"])
    come_back(browser, provider.log_in(leave(browser), "h-1"))
    whoami = browser.get("/api/v1/whoami").json()
    assert whoami["administrator"] is False
    assert whoami["roles"] == {"default": "member", "nlp": "member", "audio": "viewer"}


def test_a_name_at_the_provider_opens_no_account_that_exists(
    browser: TestClient, provider: OpenIdProvider, app: FastAPI
) -> None:
    for sub, name, expected in (
        ("i-1", "ada", "ada-2"), ("i-2", "admin", "admin-2"), ("i-3", "ada", "ada-3"), ("i-4", "<>", "user"),
    ):  # fmt: skip
        provider.knows(sub, preferred_username=name)
        come_back(browser, provider.log_in(leave(browser), sub))
        assert browser.get("/api/v1/whoami").json()["user"] == expected
    come_back(browser, provider.log_in(leave(browser), "i-1"))
    assert browser.get("/api/v1/whoami").json()["user"] == "ada-2", "the same person again"


def test_a_disabled_user_does_not_come_back(
    browser: TestClient, provider: OpenIdProvider, app: FastAPI
) -> None:
    provider.knows("j-1", preferred_username="joan")
    come_back(browser, provider.log_in(leave(browser), "j-1"))
    app.state.store.people.set_user("joan", disabled=True)
    assert "problem=account-disabled" in come_back(browser, provider.log_in(leave(browser), "j-1"))
    assert browser.get("/api/v1/whoami").status_code == 401


def test_a_state_is_used_once(browser: TestClient, provider: OpenIdProvider) -> None:
    back = provider.log_in(leave(browser), "k-1")
    departure = kept(browser)
    assert come_back(browser, back) == "/"
    assert KEPT not in browser.cookies
    assert "problem=provider-late" in come_back(browser, back), "the browser has forgotten it"
    keep(browser, departure)
    assert "problem=provider-refused" in come_back(browser, back), "the provider has, too"


def test_a_login_that_began_in_another_browser_is_refused(
    browser: TestClient, provider: OpenIdProvider, app: FastAPI
) -> None:
    attackers = provider.log_in(leave(browser_of(app)), "mallory")
    leave(browser)
    assert "problem=provider-refused" in come_back(browser, attackers)
    assert browser.get("/api/v1/whoami").status_code == 401


def test_a_token_for_another_login_is_refused(browser: TestClient, provider: OpenIdProvider) -> None:
    back = provider.log_in(leave(browser), "l-1")
    keep(browser, replace(kept(browser), nonce="another"))
    assert "problem=provider-refused" in come_back(browser, back)


def test_a_token_of_another_issuer_is_refused(
    browser: TestClient, provider: OpenIdProvider, app: FastAPI
) -> None:
    back = provider.log_in(leave(browser), "m-1")
    assert "problem=provider-refused" in come_back(browser, f"{back}&iss=https://other.example")
    back = provider.log_in(leave(browser), "m-1")
    found = app.state.provider._description()
    # The same provider under its other name is another issuer, which signs with the same key.
    found["token_endpoint"] = found["token_endpoint"].replace("localhost", "127.0.0.1")
    assert "problem=provider-refused" in come_back(browser, back)


def test_a_token_for_another_client_or_with_another_key_is_refused(
    browser: TestClient, provider: OpenIdProvider, app: FastAPI
) -> None:
    from joserfc.jwk import KeySet, RSAKey

    back = provider.log_in(leave(browser), "n-1")
    app.state.provider._fetched("jwks", app.state.provider._described("jwks_uri"))
    keys = app.state.provider._kept["jwks"]
    forged = KeySet([RSAKey.generate_key(2048, {"kid": key.get("kid")}) for key in keys["keys"]]).as_dict()
    app.state.provider._kept["jwks"] = forged
    assert "problem=provider-refused" in come_back(browser, back)
    app.state.provider._forget("jwks")
    back = provider.log_in(leave(browser), "n-1")
    app.state.provider._settings = app.state.provider._settings.model_copy(
        update={"oidc_client_id": "somebody-else"}
    )
    assert "problem=provider-refused" in come_back(browser, back)


def test_whoever_denies_it_there_is_not_logged_in(browser: TestClient, provider: OpenIdProvider) -> None:
    address = leave(browser, "/docs")
    denied = httpx.post(address, data={"action": "deny"}, trust_env=False).headers["location"]
    assert come_back(browser, denied) == "/login?return=%2Fdocs&problem=provider-refused"


def test_an_answer_without_a_login_is_refused(browser: TestClient) -> None:
    assert "problem=provider-late" in come_back(browser, "/login/oidc/callback?state=x&code=y")
    browser.cookies.set(KEPT, "nonsense", domain="127.0.0.1", path="/")
    assert "problem=provider-late" in come_back(browser, "/login/oidc/callback?state=x&code=y")


def test_the_login_leads_to_no_other_server(browser: TestClient, provider: OpenIdProvider) -> None:
    back = provider.log_in(leave(browser, "//evil.example"), "o-1")
    assert come_back(browser, back) == "/"


def test_logging_out_ends_the_session_there_too(browser: TestClient, provider: OpenIdProvider) -> None:
    come_back(browser, provider.log_in(leave(browser), "p-1"))
    csrf = {"Stillhouse-CSRF": browser.get("/api/v1/whoami").json()["csrf"]}
    where = urlsplit(browser.post("/logout", headers=csrf).json()["provider"])
    assert f"{where.scheme}://{where.netloc}" == provider.url
    assert parse_qs(where.query)["post_logout_redirect_uri"] == ["http://127.0.0.1:8400/login"]
    assert browser.get("/api/v1/whoami").status_code == 401


@pytest.fixture(params=["refuses", "silent", "not OpenID"])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Issuer of a provider that does not work."""
    from api.login import oidc

    monkeypatch.setattr(oidc, "_TIMEOUT", httpx.Timeout(0.3))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if request.param == "refuses":
            listener.close()
        if request.param == "not OpenID":
            url = request.getfixturevalue("provider").url + "/users"
        yield url


def test_a_provider_that_does_not_answer_keeps_no_one_else_out(settings: Settings, broken: str) -> None:
    more = {"token": SecretStr(TOKEN), "oidc_issuer": broken, "oidc_client_id": "stillhouse"}
    with opened(settings.model_copy(update=more)) as app:
        browser = browser_of(app)
        answer = browser.get("/login/oidc?return=/docs")
        assert answer.status_code == 303
        assert answer.headers["location"] == "/login?return=%2Fdocs&problem=provider-unavailable"
        assert browser.post("/login/token", json={"token": TOKEN}).status_code == 204
        assert browser.get("/api/v1/whoami").json()["user"] == "admin"


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("groups: {a: {projects: {nlp: boss}}}", "groups.a.projects.nlp"),
        ("groups: {a: {projects: {NLP!: member}}}", "groups.a.projects"),
        ("groups: {a: {administrator: maybe}}", "groups.a.administrator"),
        ("group: {}", "group"),
        ("- a", "groups.yaml"),
    ],
)
def test_a_wrong_group_table_names_field_and_value(settings: Settings, text: str, field: str) -> None:
    (settings.data_dir / "groups.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"groups\.yaml: ") as refused:
        group_table(settings.data_dir)
    assert field in str(refused.value)
    assert "\n" not in str(refused.value)
