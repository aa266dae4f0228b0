"""A headless Chromium, driven over its DevTools pipe: no driver, no network port."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-pipe",
)
_PATIENCE_S = 120.0
_WITH_PIPE = """
import os, sys
for end, place in zip(sys.argv[1:3], (3, 4)):
    os.dup2(int(end), place)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Starts a browser with the pipe at 3 and 4, as the protocol wants; this process may use those itself."""


def browser_path() -> str | None:
    """Returns the path of an installed browser."""
    return next((path for name in _BROWSERS if (path := shutil.which(name))), None)


class Page:
    """One tab.

    Args:
        to_browser, from_browser: ends of the pipe.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._number = 0
        self._received = b""
        self._session: str | None = None
        self.errors: list[str] = []
        """Exceptions of scripts, and what the page's policy blocked."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the DevTools protocol; returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._from], [], [], _PATIENCE_S)
            assert ready, "the browser does not answer"
            chunk = os.read(self._from, 1 << 20)
            assert chunk, "the browser has ended"
            self._received += chunk
        text, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
        elif message.get("method") == "Log.entryAdded":
            entry = parameters["entry"]
            if entry["source"] != "network" and entry["level"] == "error":
                self.errors.append(str(entry["text"]))
        return message

    def open(self, url: str) -> None:
        """Goes to an address."""
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Returns what a JavaScript expression is; None while a page is loading."""
        try:
            found = self.call(
                "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
            )
        except RuntimeError:  # The page went away while it was asked.
            return None
        return None if "exceptionDetails" in found else found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Waits until a JavaScript expression is true; returns its value."""
        return self._until(lambda: self.value(expression), expression)

    def press(self, key: str, code: int) -> None:
        """Presses and releases a key."""
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        """Types text where the focus is."""
        self.call("Input.insertText", text=text)

    def cookies(self) -> list[dict[str, Any]]:
        """Returns all cookies of the browser."""
        found: list[dict[str, Any]] = self.call("Network.getCookies")["cookies"]
        return found

    def _until(self, look: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + _PATIENCE_S
        while not (found := look()):
            if time.monotonic() > deadline:
                text = self.value("location.href + ' ' + document.body.innerText")
                raise AssertionError(f"not in time: {what}; the page is {text!r}; {self.errors}")
            time.sleep(0.05)
        return found


@contextmanager
def page(browser: str, profile: Path) -> Iterator[Page]:
    """A tab of a new browser with an empty profile."""
    child_reads, to_browser = os.pipe()
    from_browser, child_writes = os.pipe()
    command = [browser, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    # Above 4, so that moving one to 3 does not overwrite the other.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (child_reads, child_writes)]
    started = subprocess.Popen(
        [sys.executable, "-c", _WITH_PIPE, *map(str, ends), *command],
        pass_fds=ends,
        stderr=subprocess.DEVNULL,
    )
    for end in (child_reads, child_writes, *ends):
        os.close(end)
    try:
        yield Page(to_browser, from_browser)
    finally:
        os.close(to_browser)
        os.close(from_browser)
        started.terminate()
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
