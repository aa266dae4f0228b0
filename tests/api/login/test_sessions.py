"""Browser sessions: opened with a token, recognised by a cookie, ended with what they rest on."""

from __future__ import annotations

import time

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import AnyHttpUrl, SecretStr

from api.login.sessions import safe_return
from service.config.settings import Settings
from service.domain.access import Scope
from service.domain.people import SESSION_IDLE_S, SESSION_LASTS_S
from tests.api.conftest import SPEC, TOKEN
from tests.api.login.conftest import HTTPS, browser_of, log_in, opened, secret_of

COOKIE = "stillhouse-8400"


def test_a_pasted_token_opens_a_session_that_the_api_accepts(browser: TestClient, closed: FastAPI) -> None:
    assert browser.get("/api/v1/experiments").status_code == 401
    csrf = log_in(browser, secret_of(closed))
    assert browser.get("/api/v1/experiments").status_code == 200
    created = browser.post("/api/v1/experiments", content=SPEC, headers=csrf)
    assert (created.status_code, created.json()["owner"]) == (201, "ada")
    whoami = browser.get("/api/v1/whoami").json()
    assert (whoami["user"], whoami["via"], whoami["scope"]) == ("ada", "session", "operate")


def test_the_cookie_is_for_this_host_and_no_script(browser: TestClient, closed: FastAPI) -> None:
    answer = browser.post("/login/token", json={"token": secret_of(closed)})
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}=")
    assert {"HttpOnly", "Path=/", "SameSite=lax"} <= set(cookie.split("; "))
    assert "Domain" not in cookie


def test_over_https_the_cookie_has_the_host_prefix(settings: Settings) -> None:
    secure = settings.model_copy(update={"token": SecretStr(TOKEN), "url": AnyHttpUrl(HTTPS)})
    with opened(secure) as app:
        browser = browser_of(app, HTTPS)
        answer = browser.post("/login/token", json={"token": TOKEN})
        cookie = answer.headers["set-cookie"].split("; ")
        assert cookie[0].startswith("__Host-stillhouse=")
        assert {"Secure", "HttpOnly", "Path=/", "SameSite=lax"} <= set(cookie)
        assert browser.get("/api/v1/whoami").json()["user"] == "admin"
        # What a page of another host or over plain http could have planted has another name.
        planted = {"Cookie": f"{COOKIE}={cookie[0].partition('=')[2]}"}
        browser.cookies.clear()
        assert browser.get("/api/v1/whoami", headers=planted).status_code == 401


def test_there_are_no_sessions_over_plain_http_from_elsewhere(settings: Settings) -> None:
    with opened(settings.model_copy(update={"token": SecretStr(TOKEN), "host": "0.0.0.0"})) as app:
        answer = browser_of(app, "http://stillhouse.lan:8400").post("/login/token", json={"token": TOKEN})
        assert (answer.status_code, answer.json()["type"]) == (403, "/problems/insecure-login")
        assert "set-cookie" not in answer.headers


def test_only_a_hash_of_the_session_is_stored(browser: TestClient, closed: FastAPI) -> None:
    log_in(browser, secret_of(closed))
    with closed.state.store.database.read() as connection:
        stored = [dict(row) for row in connection.exec_driver_sql("SELECT * FROM sessions").mappings()]
    assert len(stored) == 1
    assert browser.cookies[COOKIE] not in str(stored)
    assert len(browser.cookies[COOKIE]) >= 43


def test_a_login_gets_a_new_id_and_ends_the_one_before(browser: TestClient, closed: FastAPI) -> None:
    secret = secret_of(closed)
    browser.cookies.set(COOKIE, "chosen-by-an-attacker", domain="127.0.0.1", path="/")
    log_in(browser, secret)
    first = browser.cookies[COOKIE]
    assert first != "chosen-by-an-attacker"
    log_in(browser, secret)
    assert browser.cookies[COOKIE] != first
    thief = browser_of(closed, cookies={COOKIE: first})
    assert thief.get("/api/v1/whoami").status_code == 401


@pytest.mark.parametrize("headers", [{}, {"Stillhouse-CSRF": "x" * 43}, {"Stillhouse-CSRF": "é"}])
def test_a_change_needs_the_sessions_own_header(
    browser: TestClient, closed: FastAPI, headers: dict[str, str]
) -> None:
    log_in(browser, secret_of(closed))
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = browser.post("/api/v1/experiments", content=SPEC, headers=raw)
    assert (answer.status_code, answer.json()["type"]) == (403, "/problems/csrf-failed")
    assert browser.get("/api/v1/experiments").json()["items"] == []


@pytest.mark.parametrize(
    ("header", "value"), [("Origin", "https://evil.example"), ("Sec-Fetch-Site", "cross-site")]
)
def test_another_sites_page_changes_nothing(
    browser: TestClient, closed: FastAPI, header: str, value: str
) -> None:
    csrf = log_in(browser, secret_of(closed))
    answer = browser.post("/api/v1/experiments", content=SPEC, headers={**csrf, header: value})
    assert answer.status_code == 403
    foreign = {header: value}
    assert browser.post("/login/token", json={"token": TOKEN}, headers=foreign).status_code == 403


def test_one_sessions_header_does_not_open_another(closed: FastAPI) -> None:
    ada, bob = browser_of(closed), browser_of(closed)
    of_ada = log_in(ada, secret_of(closed))
    log_in(bob, secret_of(closed, "bob"))
    assert bob.post("/api/v1/experiments", content=SPEC, headers=of_ada).status_code == 403


def test_a_session_ends_unused_and_in_any_case(browser: TestClient, closed: FastAPI) -> None:
    log_in(browser, secret_of(closed))
    store, began_s = closed.state.store, time.time()
    at_s = began_s
    store.clocks.simulated = lambda: at_s
    step_s = SESSION_IDLE_S - 60
    while at_s + step_s < began_s + SESSION_LASTS_S:
        at_s += step_s
        assert browser.get("/api/v1/whoami").status_code == 200, at_s - began_s
    at_s = began_s + SESSION_LASTS_S + 1
    assert browser.get("/api/v1/whoami").status_code == 401, "the longest life"
    at_s = began_s
    log_in(browser, TOKEN)
    at_s += SESSION_IDLE_S + 1
    assert browser.get("/api/v1/whoami").status_code == 401, "unused"


def test_a_session_ends_with_its_user(browser: TestClient, closed: FastAPI) -> None:
    log_in(browser, secret_of(closed))
    closed.state.store.people.set_user("ada", disabled=True)
    closed.state.principals.forget()
    assert browser.get("/api/v1/whoami").status_code == 401


def test_a_session_ends_with_its_token_and_does_no_more_than_it(browser: TestClient, closed: FastAPI) -> None:
    store = closed.state.store
    created = store.people.create_token("ada", name="reader", scope=Scope.read)
    csrf = log_in(browser, created.secret)
    refused = browser.post("/api/v1/experiments", content=SPEC, headers=csrf)
    assert (refused.status_code, refused.json()["type"]) == (403, "/problems/forbidden")
    assert "scope submit" in refused.json()["detail"]
    store.people.revoke_token(created.id)
    closed.state.principals.forget()
    assert browser.get("/api/v1/whoami").status_code == 401


def test_changing_the_installations_token_ends_its_sessions(
    browser: TestClient, closed: FastAPI, settings: Settings
) -> None:
    log_in(browser, TOKEN)
    closed.state.settings = settings.model_copy(update={"token": SecretStr("n" * 40)})
    assert browser.get("/api/v1/whoami").status_code == 401


def test_logout_ends_the_session(browser: TestClient, closed: FastAPI) -> None:
    csrf = log_in(browser, secret_of(closed))
    held = browser.cookies[COOKIE]
    assert browser.post("/logout").status_code == 403, "another site must not log people out"
    answer = browser.post("/logout", headers=csrf)
    assert (answer.status_code, answer.json()) == (200, {"provider": None})
    assert COOKIE not in browser.cookies
    browser.cookies.set(COOKIE, held, domain="127.0.0.1", path="/")
    assert browser.get("/api/v1/whoami").status_code == 401
    last = list(closed.state.store.audit.rows())[-1]
    assert (last.action, last.before) == ("session.end", {"user": last.actor})


def test_people_end_their_own_sessions_and_administrators_anyones(closed: FastAPI) -> None:
    ada, other, bob, admin = (browser_of(closed) for _ in range(4))
    secret = secret_of(closed)
    of_ada, _ = log_in(ada, secret), log_in(other, secret)
    of_bob, of_admin = log_in(bob, secret_of(closed, "bob")), log_in(admin, TOKEN)
    mine = ada.get("/api/v1/sessions").json()["items"]
    assert [one["user"] for one in mine] == ["ada", "ada"]
    (there,) = [one["id"] for one in mine if not one["current"]]
    assert bob.delete(f"/api/v1/sessions/{there}", headers=of_bob).status_code == 404
    assert bob.get("/api/v1/sessions?everyone=true").status_code == 403
    assert ada.delete(f"/api/v1/sessions/{there}", headers=of_ada).status_code == 204
    assert other.get("/api/v1/whoami").status_code == 401
    everyone = admin.get("/api/v1/sessions?everyone=true").json()["items"]
    assert sorted(one["user"] for one in everyone) == ["ada", "admin", "bob"]
    (bobs,) = [one["id"] for one in everyone if one["user"] == "bob"]
    assert admin.delete(f"/api/v1/sessions/{bobs}", headers=of_admin).status_code == 204
    assert bob.get("/api/v1/whoami").status_code == 401


def test_a_wrong_bearer_token_is_not_rescued_by_a_session(browser: TestClient, closed: FastAPI) -> None:
    log_in(browser, secret_of(closed))
    answer = browser.get("/api/v1/whoami", headers={"Authorization": "Bearer sth_" + "x" * 43})
    assert answer.status_code == 401


def test_a_page_that_is_opened_without_a_session_leads_to_the_login(browser: TestClient) -> None:
    where = "/api/v1/experiments/3/export?format=csv"
    answer = browser.get(where, headers={"Sec-Fetch-Mode": "navigate"})
    assert answer.status_code == 303
    expected = "/login?return=%2Fapi%2Fv1%2Fexperiments%2F3%2Fexport%3Fformat%3Dcsv"
    assert answer.headers["location"] == expected
    assert browser.get(where).status_code == 401, "a program gets the problem"
    for public in ("/login", "/device", "/", "/static/login.js", "/login/options"):
        assert browser.get(public).status_code == 200, public


@pytest.mark.parametrize(
    "path",
    ["//evil.example", "/\\evil.example", "https://evil.example", "evil", "/\t/evil.example", "/login?x=1",
     "javascript:alert(1)", "/a\r\nSet-Cookie: x", "", None, "/" + "x" * 3000],
)  # fmt: skip
def test_a_login_leads_to_no_other_server(path: str | None) -> None:
    assert safe_return(path) == "/"


@pytest.mark.parametrize("path", ["/", "/#/experiments/3", "/docs", "/device?user_code=WDJB-MJHT"])
def test_a_login_leads_back(path: str) -> None:
    assert safe_return(path) == path


def test_an_open_service_asks_for_no_login(client: TestClient) -> None:
    assert client.get("/login/options").json() == {"required": False, "provider": None}
    assert client.get("/api/v1/whoami").json()["via"] == "open"
