"""Calls about who one is, and the login of a command line by a code (RFC 8628)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import orjson

from service.client.wire import ClientError, Unreachable, Wire, api_error
from service.domain.access import Scope
from service.domain.sessions import Whoami

_GRANT_TYPE = "urn:ietf:params:oauth:grant-type:device_code"
_SLOWER_S = 5.0
"""What each `slow_down` adds to the interval; RFC 8628, section 3.5."""


class LoginRefused(ClientError):
    """The device login ended without a token; the message says why."""


@dataclass(frozen=True, slots=True)
class DeviceCode:
    """A device login that has begun."""

    device_code: str
    user_code: str
    verification_uri: str
    verification_uri_complete: str
    expires_in: float
    interval: float


class AccessCalls(Wire):
    """Who one is, and logging in."""

    def whoami(self) -> Whoami:
        """Whom the server takes this client for.

        Raises:
            ApiError: the token is missing or not accepted.
        """
        return self._get(Whoami, "/whoami")

    def begin_device_login(self, name: str, scope: Scope | None = None) -> DeviceCode:
        """Asks to be let in.

        Args:
            name: what this machine calls itself.
            scope: most that the token may be used for; None = the server's default.

        Raises:
            LoginRefused: the server refused the name or the scope.
        """
        form = {"client_id": "stillhouse", "name": name, **({"scope": str(scope)} if scope else {})}
        answer = self._send_form("/device/code", form)
        if answer.status_code != 200:
            raise _refusal(answer)
        found = orjson.loads(answer.content)
        return DeviceCode(**{field: found[field] for field in DeviceCode.__slots__})

    def await_device_login(self, begun: DeviceCode, clock: Callable[[], float] = time.monotonic) -> str:
        """Polls until someone has approved; returns the token.

        Raises:
            LoginRefused: it was denied, or the code has expired.
        """
        interval_s = begun.interval
        end_s = clock() + begun.expires_in
        form = {"grant_type": _GRANT_TYPE, "device_code": begun.device_code, "client_id": "stillhouse"}
        while True:
            self._sleep(interval_s)
            if clock() > end_s:
                raise LoginRefused("the code has expired; run `stillhouse login` again")
            try:
                answer = self._send_form("/device/token", form)
            except Unreachable:
                interval_s *= 2  # RFC 8628, section 3.5: back off when the connection fails.
                continue
            if answer.status_code == 200:
                return str(orjson.loads(answer.content)["access_token"])
            if answer.status_code == 429:
                interval_s += _SLOWER_S
                continue
            refusal = _refusal(answer)
            if refusal.error == "slow_down":
                interval_s += _SLOWER_S
            elif refusal.error != "authorization_pending":
                raise refusal

    def _send_form(self, path: str, form: dict[str, str]) -> httpx.Response:
        try:
            answer = self._http.post(path, data=form)
        except httpx.TransportError as error:
            raise Unreachable(f"cannot reach {self.url} ({error})") from None
        if answer.headers.get("Content-Type", "").startswith("application/problem+json"):
            if answer.status_code == 429:
                return answer
            raise api_error(answer.status_code, answer.content)
        return answer


class _Refusal(LoginRefused):
    """A refusal with OAuth's word for it."""

    def __init__(self, error: str, description: str) -> None:
        self.error = error
        super().__init__(description)


def _refusal(answer: httpx.Response) -> _Refusal:
    try:
        found = orjson.loads(answer.content)
        return _Refusal(str(found["error"]), str(found.get("error_description") or found["error"]))
    except (ValueError, KeyError, TypeError):
        return _Refusal("unknown", f"unexpected answer from the server (status {answer.status_code})")
