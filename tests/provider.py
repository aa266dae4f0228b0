"""A real OpenID provider in a process of its own."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import httpx
import pytest


class OpenIdProvider:
    """The provider at an address.

    Args:
        url: its issuer.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def knows(self, sub: str, **claims: object) -> None:
        """Gives a person claims."""
        answer = httpx.put(f"{self.url}/users/{quote(sub, safe='')}", json=claims, trust_env=False)
        answer.raise_for_status()

    def log_in(self, address: str, sub: str) -> str:
        """Logs somebody in at the address that a browser was sent to; returns where it is sent back to."""
        answer = httpx.post(address, data={"sub": sub}, trust_env=False)
        assert answer.status_code == 302, answer.text
        return answer.headers["location"]


@contextmanager
def running_provider() -> Iterator[OpenIdProvider]:
    """A provider on a free port; skips where the package is missing."""
    if importlib.util.find_spec("oidc_provider_mock") is None:
        pytest.skip("oidc-provider-mock is not installed")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = subprocess.Popen(
        [sys.executable, "-m", "oidc_provider_mock", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://localhost:{port}"
    try:
        deadline = time.monotonic() + 30.0
        while True:
            try:
                httpx.get(f"{url}/.well-known/openid-configuration", trust_env=False).raise_for_status()
                break
            except httpx.HTTPError:
                assert time.monotonic() < deadline and started.poll() is None, "the provider does not start"
                time.sleep(0.05)
        yield OpenIdProvider(url)
    finally:
        started.kill()
        started.wait(10)
