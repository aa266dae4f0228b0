"""A trusted proxy's headers are believed, and nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import SecretStr

from api.login import refuse_invalid
from service.config.settings import Settings
from tests.api.conftest import SPEC, TOKEN
from tests.api.login.conftest import browser_of, opened

PROXY, CLIENT, OTHER = ("10.0.0.2", 1), ("192.0.2.1", 1), ("10.0.0.3", 1)
HEADER = "X-Forwarded-User"


@pytest.fixture
def behind(settings: Settings) -> Iterator[FastAPI]:
    """An application behind a proxy."""
    more = {"proxy_user_header": HEADER, "proxy_trusted": "10.0.0.2, 10.1.0.0/16"}
    with opened(settings.model_copy(update=more)) as app:
        yield app


def test_the_proxys_user_is_created_and_owns_what_they_submit(behind: FastAPI) -> None:
    proxy = browser_of(behind, client=PROXY)
    answer = proxy.post("/api/v1/experiments", content=SPEC, headers={HEADER: "grace"})
    assert (answer.status_code, answer.json()["owner"]) == (201, "grace")
    assert proxy.get("/api/v1/whoami", headers={HEADER: "grace"}).json()["via"] == "proxy"
    assert behind.state.store.people.user("grace").administrator is False
    assert proxy.get("/api/v1/whoami").status_code == 401, "it names nobody"


@pytest.mark.parametrize("peer", [CLIENT, OTHER, ("10.2.0.1", 1), ("testclient", 1)])
def test_nobody_else_is_believed(behind: FastAPI, peer: tuple[str, int]) -> None:
    answer = browser_of(behind, client=peer).get("/api/v1/whoami", headers={HEADER: "ada"})
    assert answer.status_code == 401
    forwarded = {HEADER: "ada", "X-Forwarded-For": "10.0.0.2"}
    assert browser_of(behind, client=peer).get("/api/v1/whoami", headers=forwarded).status_code == 401


def test_a_header_that_names_no_one_user_is_refused(behind: FastAPI) -> None:
    proxy = browser_of(behind, client=PROXY)
    for names in ([(HEADER, "ada"), (HEADER, "bob")], [(HEADER, "a b")], [(HEADER, "")]):
        assert proxy.get("/api/v1/whoami", headers=names).status_code == 422
    with pytest.raises(Exception, match="eve"):
        behind.state.store.people.user("eve")


def test_the_proxys_cookie_is_no_door_for_another_sites_page(behind: FastAPI) -> None:
    foreign = {HEADER: "ada", "Sec-Fetch-Site": "cross-site"}
    answer = browser_of(behind, client=PROXY).post("/api/v1/experiments", content=SPEC, headers=foreign)
    assert (answer.status_code, answer.json()["type"]) == (403, "/problems/csrf-failed")


def test_a_disabled_user_stays_out(behind: FastAPI) -> None:
    behind.state.store.people.set_user("ada", disabled=True)
    answer = browser_of(behind, client=PROXY).get("/api/v1/whoami", headers={HEADER: "ada"})
    assert answer.status_code == 401


@pytest.mark.parametrize(
    ("peer", "forwarded", "seen"),
    [
        (PROXY, "192.0.2.1", "192.0.2.1"),
        (PROXY, "203.0.113.9, 192.0.2.1", "192.0.2.1"),  # What the client wrote itself stands to the left.
        (PROXY, "203.0.113.9, 192.0.2.1, 10.1.2.3", "192.0.2.1"),
        (PROXY, "[2001:db8::1]:443", "2001:db8::1"),
        (PROXY, "192.0.2.1:5000", "192.0.2.1"),
        (PROXY, "nonsense", "10.0.0.2"),
        (CLIENT, "203.0.113.9", "192.0.2.1"),
    ],
)
def test_addresses_come_from_trusted_proxies_only(
    behind: FastAPI, peer: tuple[str, int], forwarded: str, seen: str
) -> None:
    device = browser_of(behind, client=peer)
    code = device.post("/device/code", headers={"X-Forwarded-For": forwarded}).json()["user_code"]
    shown = browser_of(behind, client=PROXY).get(f"/api/v1/device-logins/{code}", headers={HEADER: "ada"})
    assert shown.json()["from_address"] == seen


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"proxy_user_header": HEADER}, "set STILLHOUSE_PROXY_TRUSTED"),
        ({"proxy_user_header": "Cookie", "proxy_trusted": "10.0.0.2"}, "PROXY_USER_HEADER=Cookie"),
        ({"proxy_user_header": "a b", "proxy_trusted": "10.0.0.2"}, "PROXY_USER_HEADER=a b"),
        ({"proxy_trusted": "proxy.lan"}, "STILLHOUSE_PROXY_TRUSTED: 'proxy.lan'"),
        ({"proxy_trusted": "0.0.0.0/0"}, "every address would be trusted"),
        ({"oidc_issuer": "http://provider.example", "oidc_client_id": "x"}, "not an https address"),
        ({"oidc_issuer": "https://provider.example"}, "needs STILLHOUSE_OIDC_CLIENT_ID"),
        (
            {"oidc_issuer": "https://provider.example", "oidc_client_id": "x", "oidc_scopes": "email"},
            "add openid",
        ),
    ],
)
def test_settings_that_trust_too_much_or_nobody_are_refused(
    settings: Settings, more: dict[str, Any], words: str
) -> None:
    unsafe = settings.model_copy(update={"token": SecretStr(TOKEN), **more})
    with pytest.raises(ValueError, match="STILLHOUSE_") as refused:
        refuse_invalid(unsafe)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
