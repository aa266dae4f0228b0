"""Device logins: what RFC 8628 answers, and who may let a device in."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api.login.device import GRANT_TYPE, normalised
from api.throttle import DEVICE_CODE, DEVICE_POLL, USER_CODE, Throttle
from service.domain.access import Scope
from service.domain.people import DEVICE_TOKEN_LASTS_S, GRANT_LASTS_S, GRANT_POLL_EVERY_S
from tests.api.conftest import TOKEN, files_up_to
from tests.api.login.conftest import browser_of, log_in, secret_of


class Clock:
    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(closed: FastAPI) -> Clock:
    clock = Clock()
    closed.state.store.clocks.simulated = clock
    return clock


@pytest.fixture
def device(closed: FastAPI) -> TestClient:
    return browser_of(closed, client=("192.0.2.7", 1))


def begin(device: TestClient, **fields: str) -> dict[str, Any]:
    answer = device.post("/device/code", data={"client_id": "stillhouse", "name": "laptop", **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    found: dict[str, Any] = answer.json()
    return found


def poll(device: TestClient, begun: dict[str, Any]) -> Any:
    return device.post("/device/token", data={"grant_type": GRANT_TYPE, "device_code": begun["device_code"]})


def error_of(answer: Any) -> str:
    assert answer.status_code == 400
    error: str = answer.json()["error"]
    return error


def test_an_approved_device_gets_a_token_once(
    browser: TestClient, device: TestClient, closed: FastAPI, clock: Clock
) -> None:
    begun = begin(device)
    assert begun["verification_uri_complete"].endswith(f"/device?user_code={begun['user_code']}")
    assert error_of(poll(device, begun)) == "authorization_pending"
    csrf = log_in(browser, secret_of(closed))
    path = f"/api/v1/device-logins/{begun['user_code']}"
    shown = browser.get(path).json()
    assert (shown["name"], shown["from_address"], shown["scope"]) == ("laptop", "192.0.2.7", "operate")
    assert browser.post(f"{path}/decision", json={"approve": True}).status_code == 403, "without the header"
    assert browser.post(f"{path}/decision", json={"approve": True}, headers=csrf).status_code == 204
    clock.now_s += GRANT_POLL_EVERY_S
    given = poll(device, begun).json()
    assert (given["token_type"], given["scope"]) == ("Bearer", "operate")
    assert given["expires_in"] == pytest.approx(DEVICE_TOKEN_LASTS_S, abs=60)
    bearer = {"Authorization": f"Bearer {given['access_token']}"}
    assert device.get("/api/v1/whoami", headers=bearer).json()["user"] == "ada"
    clock.now_s += GRANT_POLL_EVERY_S
    assert error_of(poll(device, begun)) == "expired_token", "the token is given once"
    assert browser.get(path).status_code == 404, "and decided once"


def test_an_approved_login_gives_its_token_once_a_full_disk_has_room(
    browser: TestClient, device: TestClient, closed: FastAPI, clock: Clock
) -> None:
    """The poll and the token are two writes: the first may find the room that the second does not."""
    begun = begin(device)
    csrf = log_in(browser, secret_of(closed))
    path = f"/api/v1/device-logins/{begun['user_code']}/decision"
    assert browser.post(path, json={"approve": True}, headers=csrf).status_code == 204
    log = closed.state.store.database.path.with_name("stillhouse.db-wal")
    answers = []
    for frames in range(1, 40):
        clock.now_s += GRANT_POLL_EVERY_S
        with files_up_to(log.stat().st_size + 4120 * frames):
            answers.append(poll(device, begun))
        if answers[-1].status_code != 507:
            break
    assert len(answers) > 2
    assert "access_token" in answers[-1].json()


def test_a_device_that_polls_too_fast_is_slowed_down(device: TestClient, clock: Clock) -> None:
    begun = begin(device)
    assert error_of(poll(device, begun)) == "authorization_pending"
    clock.now_s += GRANT_POLL_EVERY_S - 0.1
    assert error_of(poll(device, begun)) == "slow_down"
    clock.now_s += 0.2
    assert error_of(poll(device, begun)) == "authorization_pending"


def test_a_device_is_sent_to_the_port_at_which_it_found_the_server(closed: FastAPI) -> None:
    device = TestClient(closed, base_url="http://127.0.0.1:8463")
    assert begin(device)["verification_uri"] == "http://127.0.0.1:8463/device"


def test_an_expired_code_gives_nothing(
    browser: TestClient, device: TestClient, closed: FastAPI, clock: Clock
) -> None:
    begun = begin(device)
    csrf = log_in(browser, secret_of(closed))
    clock.now_s += GRANT_LASTS_S + 1
    path = f"/api/v1/device-logins/{begun['user_code']}/decision"
    assert browser.post(path, json={"approve": True}, headers=csrf).status_code == 404
    assert error_of(poll(device, begun)) == "expired_token"
    assert error_of(poll(device, {"device_code": "guessed"})) == "expired_token"


def test_a_denied_device_is_told_so(browser: TestClient, device: TestClient, closed: FastAPI) -> None:
    begun = begin(device)
    csrf = log_in(browser, secret_of(closed))
    path = f"/api/v1/device-logins/{begun['user_code'].lower().replace('-', '')}/decision"
    assert browser.post(path, json={"approve": False}, headers=csrf).status_code == 204
    assert error_of(poll(device, begun)) == "access_denied"


@pytest.mark.parametrize(
    ("form", "error"),
    [
        ({"device_code": "x"}, "unsupported_grant_type"),
        ({"grant_type": "password", "device_code": "x"}, "unsupported_grant_type"),
        ({"grant_type": GRANT_TYPE}, "invalid_request"),
    ],
)
def test_anything_else_is_refused_in_oauths_words(
    device: TestClient, form: dict[str, str], error: str
) -> None:
    assert error_of(device.post("/device/token", data=form)) == error


@pytest.mark.parametrize(
    ("fields", "error"), [({"scope": "root"}, "invalid_scope"), ({"name": "<b>"}, "invalid_request")]
)
def test_a_device_asks_for_what_there_is(device: TestClient, fields: dict[str, str], error: str) -> None:
    assert error_of(device.post("/device/code", data=fields)) == error


def test_no_one_gives_a_device_more_than_they_have(
    browser: TestClient, device: TestClient, closed: FastAPI, clock: Clock
) -> None:
    store = closed.state.store
    begun = begin(device, scope="admin")
    csrf = log_in(browser, secret_of(closed, scope=Scope.read, project="default", lasts_s=3600.0))
    path = f"/api/v1/device-logins/{begun['user_code']}/decision"
    assert browser.post(path, json={"approve": True}, headers=csrf).status_code == 204
    given = poll(device, begun).json()
    assert given["scope"] == "read"
    assert given["expires_in"] <= 3600
    (token, _) = store.people.tokens("ada")
    assert (token.scope, token.project) == (Scope.read, "default")


def test_the_installations_own_token_lets_a_device_in(
    device: TestClient, closed: FastAPI, clock: Clock
) -> None:
    """It stands for an administrator who need not have logged in before."""
    begun = begin(device, scope="admin")
    path = f"/api/v1/device-logins/{begun['user_code']}/decision"
    own = {"Authorization": f"Bearer {TOKEN}"}
    assert device.post(path, json={"approve": True}, headers=own).status_code == 204
    given = poll(device, begun).json()
    assert given["scope"] == "admin"
    bearer = {"Authorization": f"Bearer {given['access_token']}"}
    assert device.get("/api/v1/whoami", headers=bearer).json()["user"] == "admin"


def test_whoever_uses_an_open_service_lets_a_device_in(client: TestClient) -> None:
    begun = begin(client, scope="admin")
    path = f"/api/v1/device-logins/{begun['user_code']}/decision"
    answer = client.post(path, json={"approve": True}, headers={"Stillhouse-Owner": "eve"})
    assert answer.status_code == 204
    assert poll(client, begun).json()["scope"] == "operate", "eve is added as an ordinary user"


def test_codes_cannot_be_guessed_fast(browser: TestClient, device: TestClient, closed: FastAPI) -> None:
    begun = begin(device)
    log_in(browser, secret_of(closed))
    guesses = [browser.get("/api/v1/device-logins/BBBB-BBBB") for _ in range(USER_CODE.burst + 1)]
    assert [answer.status_code for answer in guesses] == [404] * USER_CODE.burst + [429]
    assert browser.get(f"/api/v1/device-logins/{begun['user_code']}").status_code == 429
    elsewhere = browser_of(closed, client=("192.0.2.9", 1))
    log_in(elsewhere, secret_of(closed, name="second"))
    assert elsewhere.get("/api/v1/device-logins/BBBB-BBBB").status_code == 429, "the same user"
    admin = browser_of(closed, client=("192.0.2.9", 1))
    log_in(admin, TOKEN)
    assert admin.get(f"/api/v1/device-logins/{begun['user_code']}").status_code == 200


def test_devices_are_throttled_by_address(device: TestClient, closed: FastAPI) -> None:
    closed.state.throttle = Throttle(lambda: 0.0)  # Else a poll becomes possible again each second.
    begun = [device.post("/device/code", data={}).status_code for _ in range(DEVICE_CODE.burst + 1)]
    assert begun == [200] * DEVICE_CODE.burst + [429]
    polls = [device.post("/device/token", data={}) for _ in range(DEVICE_POLL.burst + 1)]
    assert [answer.status_code for answer in polls] == [400] * DEVICE_POLL.burst + [429]
    assert int(polls[-1].headers["retry-after"]) >= 1


def test_a_code_is_read_however_it_is_typed() -> None:
    assert normalised(" wdjb mjht") == normalised("WDJBMJHT") == normalised("wdjb-mjht") == "WDJB-MJHT"
