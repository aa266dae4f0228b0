"""The whole service on one machine: database, local Ray, API and scheduler as child processes.

`stillhouse up` and the demo run this. It is a supervisor that restarts nothing: a part that
dies is reported and takes the rest down, because a restart loop would hide the error and a
dead part loses nothing (the database is the truth).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from service.config.examples import keep_demo_texts
from service.config.settings import Settings
from service.local.local_ray import LocalRay, RayStartError, status_of

_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_LOG_TAIL_LINES = 12


class ServiceStartError(RuntimeError):
    """A part of the local service did not start; the message says which, why and what to do."""


@dataclass(frozen=True, slots=True)
class Addresses:
    api_url: str
    ray_dashboard_url: str
    ray_token: str | None
    """Token that the dashboard asks for once; None on a cluster that was already running."""
    ray_was_there: bool  # The cluster was named by `RAY_ADDRESS` and is left running
    logs: Path  # Folder with the log of each part


@dataclass
class _Part:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  | {line}" for line in lines[-_LOG_TAIL_LINES:])


class LocalService:
    """Starts all parts in order, watches them, and ends them in the opposite order."""

    def __init__(
        self,
        settings: Settings,
        *,
        num_cpus: int | None = None,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`report` receives one line at each stage of starting."""
        self._settings = settings
        self._num_cpus = num_cpus
        self._report = report
        self._ray: LocalRay | None = None
        self._parts: list[_Part] = []
        self._ends = ExitStack()
        self._logs = settings.data_dir / "logs"

    def start(self) -> Addresses:
        """Migrates, starts Ray, the API and the scheduler, and waits until they serve.

        After a `ServiceStartError` everything that had started has been ended again.
        """
        settings = self._settings
        self._logs.mkdir(parents=True, exist_ok=True)
        port = _port(settings)
        self._migrate()
        keep_demo_texts(settings)
        self._report("starting Ray ...")
        ray_was_there = os.environ.get("RAY_ADDRESS") not in (None, "", "local", "auto")
        with ExitStack() as ends:
            try:
                self._ray = ray = LocalRay.start(settings, self._num_cpus)
            except RayStartError as error:
                raise ServiceStartError(str(error)) from None
            ends.callback(ray.stop)
            url = f"http://{_reachable(settings.host)}:{port}"
            known: dict[str, Any] = {"port": port, "ray_dashboard_url": ray.dashboard_url}
            if "url" not in settings.model_fields_set:
                known["url"] = url  # Of pages that people are sent to.
            environment = _environment_of(settings.model_copy(update=known))
            self._report("starting the API and the scheduler ...")
            for name, module in (("api", ["api"]), ("scheduler", ["service.cli", "scheduler"])):
                self._parts.append(self._spawn(name, module, environment))
                ends.callback(_end, self._parts[-1].process)
            self._wait_until_ready(url)
            self._ends = ends.pop_all()
        return Addresses(url, ray.dashboard_url, ray.token, ray_was_there, self._logs)

    def _migrate(self) -> None:
        from service.db.errors import StoreError
        from service.store import Store

        try:
            Store.open(self._settings, migrate=True).close()
        except StoreError as error:
            raise ServiceStartError(f"the database cannot be used: {error}") from None

    def _spawn(self, name: str, module: Sequence[str], environment: Mapping[str, str]) -> _Part:
        log = self._logs / f"{name}.log"
        # Only what the settings say reaches a part; a token or database of the shell does not.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("STILLHOUSE_")}
        with log.open("ab") as stream:
            process = subprocess.Popen(
                # -P: a folder `api` or `service` of the user's is not ours.
                [sys.executable, "-P", "-m", *module, "--end-with-parent"],
                stdin=subprocess.PIPE,  # Closes however this process ends, kill -9 included.
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**inherited, **environment, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C in the terminal is for us; we end the parts in order.
            )
        return _Part(name, process, log)

    def _wait_until_ready(self, url: str) -> None:
        deadline = time.monotonic() + _READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if died := self.died():
                raise ServiceStartError(died)
            if status_of(f"{url}/healthz") is not None:  # An error of its own is in its log.
                return
            time.sleep(0.1)
        raise ServiceStartError(
            f"the API was not reachable at {url} within {_READY_TIMEOUT_S:.0f} s:\n{self._parts[0].tail()}"
        )

    def died(self) -> str | None:
        """Returns which part ended by itself, with the end of its log; None while all are alive."""
        for part in self._parts:
            code = part.process.poll()
            if code is not None:
                killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else None
                ended = killed or f"ended with code {code}"
                return f"the {part.name} {ended}; the end of {part.log}:\n{part.tail()}"
        if self._ray is not None and not self._ray.alive:
            return "the local Ray stopped unexpectedly; running experiments continue at the next start"
        return None

    def stop(self) -> None:
        """Ends every part that was started: the scheduler first, Ray last. Safe to call twice."""
        self._ends.close()


def watch_parent() -> None:
    """Ends this process as by SIGTERM when the parent's end of standard input closes, however it ended."""

    def watch() -> None:
        while sys.stdin.buffer.read(1024):
            continue
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def _environment_of(settings: Settings) -> dict[str, str]:
    # The variables from which a child process reads the same settings.
    variables = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if value is None:
            continue
        text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        variables[f"STILLHOUSE_{name.upper()}"] = text
    return variables


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _port(settings: Settings) -> int:
    """Returns the port to bind, a free one for 0; a taken one is reported before anything is started."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise ServiceStartError(
                f"{settings.host}:{settings.port} cannot be bound ({error.strerror}); "
                "set STILLHOUSE_PORT to another port, or 0 for any free one"
            ) from None
        return int(probe.getsockname()[1])


def _reachable(host: str) -> str:
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host
