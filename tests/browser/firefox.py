"""A headless Firefox, driven over Marionette: no driver besides the browser itself."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PATIENCE_S = 60.0
_PREFERENCES = {
    "marionette.port": 0,
    "remote.prefs.recommended": True,
    "layout.css.prefers-color-scheme.content-override": 1,
    "privacy.reduceTimerPrecision": False,
}
_SIZED = """
const [width, height] = arguments, style = gBrowser.selectedBrowser.style;
for (const [name, length] of [["width", width], ["height", height]])
  for (const limit of ["min-", "max-"]) style.setProperty(limit + name, `${length}px`);
"""
_PROBLEMS = """
const [origin] = arguments;
const found = Services.console.getMessageArray()
  .filter(each => each instanceof Ci.nsIScriptError && each.sourceName.startsWith(origin))
  .filter(each => !(each.flags & Ci.nsIScriptError.warningFlag))
  .filter(each => !each.errorMessage.startsWith("NS_ERROR_"))  // Of a page that was left while it loaded.
  .map(each => `${each.category}: ${each.errorMessage} (${each.sourceName}:${each.lineNumber})`);
Services.console.reset();
return found;
"""
"""Errors of scripts and what a policy blocked: of the application's files, not of the browser's own."""


def firefox_path() -> str | None:
    """Returns the path of an installed Firefox."""
    return next((path for name in ("firefox-esr", "firefox") if (path := shutil.which(name))), None)


class Firefox:
    """One tab of a browser."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S)
        self._stream = self._socket.makefile("rb")
        self._number = 0
        self._read()  # The greeting.
        self._call("WebDriver:NewSession", pageLoadStrategy="normal")
        self._call("WebDriver:SetTimeouts", script=_PATIENCE_S * 1000, pageLoad=_PATIENCE_S * 1000)

    def _call(self, command: str, **parameters: Any) -> Any:
        self._number += 1
        message = json.dumps([0, self._number, command, parameters]).encode()
        self._socket.sendall(b"%d:%s" % (len(message), message))
        _, number, error, result = self._read()
        assert number == self._number
        if error:
            raise RuntimeError(f"{command}: {error['message']}")
        return result["value"] if isinstance(result, dict) and set(result) == {"value"} else result

    def _read(self) -> Any:
        length = b""
        while not length.endswith(b":"):
            byte = self._stream.read(1)
            assert byte, "the browser has ended"
            length += byte
        return json.loads(self._stream.read(int(length[:-1])))

    @contextmanager
    def _privileged(self) -> Iterator[None]:
        self._call("Marionette:SetContext", value="chrome")
        yield
        self._call("Marionette:SetContext", value="content")

    def open(self, url: str) -> None:
        """Goes to an address."""
        self._call("WebDriver:Navigate", url=url)

    def evaluate(self, function: str, argument: Any = None) -> Any:
        """Calls a JavaScript function in the page, and waits for what it returns."""
        script = f"const [given, done] = arguments; Promise.resolve(({function})(given)).then(done);"
        return self._call("WebDriver:ExecuteAsyncScript", script=script, args=[argument], sandbox=None)

    def resize(self, width: int, height: int) -> None:
        """Gives the page so much room."""
        with self._privileged():
            self._call("WebDriver:ExecuteScript", script=_SIZED, args=[width, height])

    def prefer(self, scheme: str) -> None:
        """Makes the system's colour scheme `light` or `dark`."""
        name = "layout.css.prefers-color-scheme.content-override"
        with self._privileged():
            script = "Services.prefs.setIntPref(arguments[0], arguments[1]);"
            self._call("WebDriver:ExecuteScript", script=script, args=[name, {"dark": 0, "light": 1}[scheme]])

    def problems(self, origin: str) -> list[str]:
        """Returns errors of scripts of a server, and what its policy blocked, since the last call."""
        with self._privileged():
            found: list[str] = self._call("WebDriver:ExecuteScript", script=_PROBLEMS, args=[origin])
        return found

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("WebDriver:TakeScreenshot", full=True)))

    def quit(self) -> None:
        self._call("Marionette:Quit", flags=["eForceQuit"])
        self._stream.close()
        self._socket.close()


@contextmanager
def firefox(path: str, profile: Path) -> Iterator[Firefox]:
    """A new browser with an empty profile."""
    profile.mkdir()
    lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in _PREFERENCES.items()]
    (profile / "user.js").write_text("\n".join(lines))
    command = [path, "--headless", "--no-remote", "--marionette", "--remote-allow-system-access"]
    process = subprocess.Popen(
        [*command, "--profile", str(profile)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        ready, deadline = profile / "MarionetteActivePort", time.monotonic() + _PATIENCE_S
        while not (ready.exists() and ready.read_text()):
            assert time.monotonic() < deadline and process.poll() is None, "Firefox did not start"
            time.sleep(0.1)
        browser = Firefox(int(ready.read_text()))
        yield browser
        browser.quit()
        process.wait(_PATIENCE_S)
    finally:
        process.kill()
        process.wait()
