"""Guessing is slow, memory is bounded, and nobody locks out somebody else."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from api.problems import ProblemError
from api.throttle import BEARER, LOGIN, Limit, Throttle, network_of
from tests.api.conftest import TOKEN
from tests.api.login.conftest import browser_of

LIMIT = Limit(3, 60.0, "tries")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_is_allowed_and_then_one_try_at_a_time() -> None:
    clock = Clock()
    throttle = Throttle(clock)
    assert [throttle.take(LIMIT, "a") for _ in range(4)] == [0.0, 0.0, 0.0, 1.0]
    assert throttle.take(LIMIT, "b") == 0.0, "somebody else is not held up"
    clock.now_s = 1.0
    assert throttle.take(LIMIT, "a") == 0.0
    assert throttle.take(LIMIT, "a") == 1.0
    clock.now_s = 100.0
    assert [throttle.take(LIMIT, "a") for _ in range(4)] == [0.0, 0.0, 0.0, 1.0], "no more than the burst"


def test_the_refusal_says_how_long_to_wait() -> None:
    throttle = Throttle(Clock())
    for _ in range(3):
        throttle.count(LIMIT, "a")
    with pytest.raises(ProblemError, match="too many tries") as refused:
        throttle.count(LIMIT, "a")
    assert refused.value.kind.status == 429
    assert refused.value.headers == {"Retry-After": "1"}


def test_memory_is_bounded() -> None:
    throttle = Throttle(Clock(), size=100)
    for number in range(1000):
        throttle.take(LIMIT, str(number))
    assert len(throttle) == 100


def test_an_ipv6_network_is_one_address() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:2") != network_of("2001:db8:0:1::1")
    assert network_of("192.0.2.1") != network_of("192.0.2.2")
    assert network_of("::ffff:192.0.2.1") == "192.0.2.1"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_guessing_tokens_is_refused_and_the_right_one_is_not(browser: TestClient) -> None:
    guesses = [browser.get("/readyz", headers=bearer(f"sth_{n:040}")) for n in range(BEARER.burst + 1)]
    assert [answer.status_code for answer in guesses] == [401] * BEARER.burst + [429]
    assert int(guesses[-1].headers["retry-after"]) >= 1
    assert browser.get("/readyz", headers=bearer(TOKEN)).status_code == 200


def test_a_program_with_one_expired_token_is_not_guessing(browser: TestClient) -> None:
    same = [browser.get("/readyz", headers=bearer("sth_" + "x" * 40)) for _ in range(BEARER.burst + 1)]
    assert {answer.status_code for answer in same} == {401}


def test_failed_logins_are_refused_by_address(closed: FastAPI) -> None:
    guesser = browser_of(closed, client=("192.0.2.1", 1))
    wrong = [guesser.post("/login/token", json={"token": "guess"}) for _ in range(LOGIN.burst + 1)]
    assert [answer.status_code for answer in wrong] == [401] * LOGIN.burst + [429]
    assert guesser.post("/login/token", json={"token": TOKEN}).status_code == 429
    colleague = browser_of(closed, client=("192.0.2.2", 1))
    assert colleague.post("/login/token", json={"token": TOKEN}).status_code == 204
